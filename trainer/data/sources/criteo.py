"""Criteo click logs as npy files: day_N_{dense,sparse,labels}.npy, memory-mapped, shuffled by blocks.

Shapes: N rows of a block, B samples, D = 13 dense and F = 26 sparse features.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE, TrainConfig
from trainer.data.base import Batch, SourceContext, Split, one_id_batch
from trainer.data.blocks import BlockOrder
from trainer.data.checks import Where, check_dense, check_ids, check_labels
from trainer.data.lru import Recent
from trainer.errors import UserError

Array = npt.NDArray[Any]
BLOCKS_IN_MEMORY = 4  # of 65,536 rows: 42 MB; a batch rarely straddles more than two
PARTS = {"dense": ("f", "floating point"), "sparse": ("iu", "integers"), "labels": ("iufb", "numbers")}


@dataclass(frozen=True)
class _Day:
    """One day's memory-mapped arrays, (rows, 13), (rows, 26) and (rows,), and the paths of their files."""

    dense: Array
    sparse: Array
    labels: Array
    paths: dict[str, Path]

    def row_of(self, part: str, start: int) -> Where:
        """The place of the i-th row from row `start` on, in words."""
        return lambda i: f"row {start + i} of {self.paths[part]}"


@dataclass(frozen=True)
class _Block:
    """Checked rows in memory."""

    dense_ND: npt.NDArray[np.float32]
    sparse_NF: Array
    labels_N: npt.NDArray[np.float32]


class CriteoSource:
    """Days of Criteo data; the train split is shuffled by blocks anew in every epoch, the eval split never."""

    def __init__(self, context: SourceContext) -> None:
        config = context.config
        self._features, self._rows = config.data.sparse_features, config.rows_per_table
        self._dense_features = config.data.dense_features
        self._modulo = config.data.criteo.modulo_ids
        days = _open_days(config, context.split)
        step = config.data.criteo.block_rows
        self._spans = [
            (day, at, min(at + step, len(day.labels))) for day in days for at in range(0, len(day.labels), step)
        ]
        sizes = [end - start for _, start, end in self._spans]
        self._order = BlockOrder(sizes, config.data.seed, config.data.shuffle and context.split == "train")
        self._blocks: Recent[int, _Block] = Recent(self._load, BLOCKS_IN_MEMORY)
        self.samples_per_epoch: int | None = self._order.num_samples

    def read(self, position: int, count: int) -> Batch:
        """Samples `position` .. `position + count - 1`, in host memory."""
        dense_BD = np.empty((count, len(self._dense_features)), dtype=np.float32)
        ids_FB = np.empty((len(self._features), count), dtype=np.int64)
        labels_B = np.empty(count, dtype=np.float32)
        at = 0
        for block_number, rows in self._order.runs(position, count):
            block, part = self._blocks[block_number], slice(at, at + rows.size)
            block.dense_ND.take(rows, axis=0, out=dense_BD[part])
            block.labels_N.take(rows, out=labels_B[part])
            ids_FB[:, part] = block.sparse_NF.take(rows, axis=0).T
            at += rows.size
        dense, ids, labels = (torch.from_numpy(a) for a in (dense_BD, ids_FB, labels_B))
        return one_id_batch(self._features, None, dense, ids, labels, position)

    def _load(self, block: int) -> _Block:
        """Reads a block from its files in one go and checks it, so that an error can name the row of the file."""
        day, start, end = self._spans[block]
        dense_ND = np.array(day.dense[start:end], dtype=np.float32, order="C")
        labels_N = np.array(day.labels[start:end], dtype=np.float32)
        narrow = np.can_cast(day.sparse.dtype, np.int32) and max(self._rows) < 2**31
        sparse_NF = np.array(day.sparse[start:end], dtype=np.int32 if narrow else np.int64, order="C")
        check_dense(self._dense_features, torch.from_numpy(dense_ND), day.row_of("dense", start))
        check_labels(torch.from_numpy(labels_N), day.row_of("labels", start))
        if self._modulo:
            np.remainder(sparse_NF, np.asarray(self._rows, dtype=sparse_NF.dtype), out=sparse_NF)
        elif bool((sparse_NF.min(0) < 0).any() or (sparse_NF.max(0) >= np.asarray(self._rows)).any()):
            for feature, rows, ids_N in zip(self._features, self._rows, sparse_NF.T, strict=True):
                check_ids(feature, rows, torch.from_numpy(ids_N.copy()), day.row_of("sparse", start))
        return _Block(dense_ND, sparse_NF, labels_N)


def _open_days(config: TrainConfig, split: Split) -> list[_Day]:
    """Memory-maps the days of a split; raises UserError for a file that is missing or has the wrong contents."""
    folder = Path(config.data.path or "")
    if not folder.is_dir():
        raise UserError(
            f"data.path is {folder}: no such folder on this machine; it holds day_N_{{dense,sparse,labels}}.npy"
        )
    days = config.data.criteo.train_days if split == "train" else config.data.criteo.eval_days
    option = f"data.criteo.{split}_days"
    if not days:
        raise UserError(f"{option} is empty: name at least one day; set --{option.replace('_', '-')} '[0]'")
    opened = [_open_day(folder, day, option) for day in days]
    if not sum(len(day.labels) for day in opened):
        raise UserError(f"{folder} has no rows in days {list(days)} of {option}: name a day that has some")
    return opened


def _open_day(folder: Path, day: int, option: str) -> _Day:
    paths = {part: folder / f"day_{day}_{part}.npy" for part in PARTS}
    dense, sparse, labels = (_open_array(path, part, day, option) for part, path in paths.items())
    if labels.ndim == 2 and labels.shape[1] == 1:  # as TorchRec's own preprocessing writes them
        labels = labels[:, 0]
    num_rows = len(sparse)
    legal = {"dense": (num_rows, CRITEO_NUM_DENSE), "sparse": (num_rows, CRITEO_NUM_SPARSE), "labels": (num_rows,)}
    for part, array in (("sparse", sparse), ("dense", dense), ("labels", labels)):
        if array.shape != legal[part]:
            raise UserError(
                f"{paths[part]} has shape {array.shape}; legal is {legal[part]}, "
                f"with the {num_rows} rows of {paths['sparse'].name}"
            )
    return _Day(dense, sparse, labels, paths)


def _open_array(path: Path, part: str, day: int, option: str) -> Array:
    """One file as a read-only memory map."""
    if not path.is_file():
        found = sorted(
            int(m[1]) for p in path.parent.iterdir() if (m := re.fullmatch(rf"day_(\d+)_{part}\.npy", p.name))
        )
        raise UserError(
            f"{path} is missing: {option} names day {day}; days with such a file: {found or 'none'}; "
            f"set --{option.replace('_', '-')} '{found}'"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a complete npy file ({error}); write it again with numpy.save") from error
    kinds, words = PARTS[part]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or not array.ndim:
        seen = f"{array.ndim}-dimensional {array.dtype}" if isinstance(array, np.ndarray) else "an npz archive"
        raise UserError(f"{path} holds {seen}; legal: an array of {words}")
    return array
