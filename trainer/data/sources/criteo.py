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
from trainer.data.block_order import BlockOrder
from trainer.data.checks import Where, check_dense, check_ids, check_labels
from trainer.data.lru import LruCache
from trainer.errors import UserError

Array = npt.NDArray[Any]
BLOCKS_IN_MEMORY = 4  # 42 MB with 65,536 rows each; a batch rarely needs more than two
PARTS = {"dense": ("f", "floating point"), "sparse": ("iu", "integers"), "labels": ("iufb", "numbers")}


@dataclass(frozen=True)
class _Day:
    """The memory-mapped arrays of a day, (rows, 13), (rows, 26) and (rows,), and the paths of their files."""

    dense: Array
    sparse: Array
    labels: Array
    paths: dict[str, Path]

    def row_from(self, part: str, start: int) -> Where:
        """Return a function that describes the place of row `start + i`."""
        return lambda i: f"row {start + i} of {self.paths[part]}"


@dataclass(frozen=True)
class _Block:
    """Checked rows in memory."""

    dense_ND: npt.NDArray[np.float32]
    sparse_NF: Array
    labels_N: npt.NDArray[np.float32]


class CriteoSource:
    """Days of Criteo data. The train split is reshuffled by blocks in every epoch, the eval split never."""

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
        self._blocks: LruCache[int, _Block] = LruCache(self._load, BLOCKS_IN_MEMORY)
        self.samples_per_epoch: int | None = self._order.num_samples

    def read(self, position: int, count: int) -> Batch:
        """Return samples `position` .. `position + count - 1`, in host memory."""
        dense_BD = np.empty((count, len(self._dense_features)), dtype=np.float32)
        ids_FB = np.empty((len(self._features), count), dtype=np.int64)
        labels_B = np.empty(count, dtype=np.float32)
        at = 0
        for block_number, rows in self._order.locate(position, count):
            block, part = self._blocks[block_number], slice(at, at + rows.size)
            block.dense_ND.take(rows, axis=0, out=dense_BD[part])
            block.labels_N.take(rows, out=labels_B[part])
            ids_FB[:, part] = block.sparse_NF.take(rows, axis=0).T
            at += rows.size
        dense, ids, labels = (torch.from_numpy(a) for a in (dense_BD, ids_FB, labels_B))
        return one_id_batch(self._features, None, dense, ids, labels, position)

    def _load(self, block: int) -> _Block:
        """Read and check a block; an error names the row of the file."""
        day, start, end = self._spans[block]
        dense_ND = np.array(day.dense[start:end], dtype=np.float32, order="C")
        labels_N = np.array(day.labels[start:end], dtype=np.float32)
        narrow = np.can_cast(day.sparse.dtype, np.int32) and max(self._rows) < 2**31
        sparse_NF = np.array(day.sparse[start:end], dtype=np.int32 if narrow else np.int64, order="C")
        check_dense(self._dense_features, torch.from_numpy(dense_ND), day.row_from("dense", start))
        check_labels(torch.from_numpy(labels_N), day.row_from("labels", start))
        if self._modulo:
            np.remainder(sparse_NF, np.asarray(self._rows, dtype=sparse_NF.dtype), out=sparse_NF)
        elif bool((sparse_NF.min(0) < 0).any() or (sparse_NF.max(0) >= np.asarray(self._rows)).any()):
            for feature, rows, ids_N in zip(self._features, self._rows, sparse_NF.T, strict=True):
                check_ids(feature, rows, torch.from_numpy(ids_N.copy()), day.row_from("sparse", start))
        return _Block(dense_ND, sparse_NF, labels_N)


def _open_days(config: TrainConfig, split: Split) -> list[_Day]:
    """Memory-map the days of a split; raise UserError for a missing file or wrong contents."""
    folder = Path(config.data.path or "")
    if not folder.is_dir():
        raise UserError(
            f"data.path {folder}: no such folder on this machine; allowed: a folder with "
            f"day_N_{{dense,sparse,labels}}.npy"
        )
    days = config.data.criteo.train_days if split == "train" else config.data.criteo.eval_days
    option = f"data.criteo.{split}_days"
    if not days:
        raise UserError(f"{option} is empty; allowed: one or more days. Fix: --{option.replace('_', '-')} '[0]'")
    opened = [_open_day(folder, day, option) for day in days]
    if not sum(len(day.labels) for day in opened):
        raise UserError(
            f"{option} names only days without rows in {folder}: got {list(days)}. Fix: add a day with rows"
        )
    return opened


def _open_day(folder: Path, day: int, option: str) -> _Day:
    """Memory-map one day and check the shapes of its arrays."""
    paths = {part: folder / f"day_{day}_{part}.npy" for part in PARTS}
    dense, sparse, labels = (_open_array(path, part, day, option) for part, path in paths.items())
    if labels.ndim == 2 and labels.shape[1] == 1:  # the shape that TorchRec's preprocessing writes
        labels = labels[:, 0]
    num_rows = len(sparse)
    shapes = {"dense": (num_rows, CRITEO_NUM_DENSE), "sparse": (num_rows, CRITEO_NUM_SPARSE), "labels": (num_rows,)}
    for part, array in (("sparse", sparse), ("dense", dense), ("labels", labels)):
        if array.shape != shapes[part]:
            raise UserError(
                f"wrong shape of {paths[part]}: got {array.shape}; allowed: {shapes[part]}, "
                f"with the {num_rows} rows of {paths['sparse'].name}"
            )
    return _Day(dense, sparse, labels, paths)


def _open_array(path: Path, part: str, day: int, option: str) -> Array:
    """Return a file as a read-only memory map."""
    if not path.is_file():
        days = sorted(
            int(m[1]) for p in path.parent.iterdir() if (m := re.fullmatch(rf"day_(\d+)_{part}\.npy", p.name))
        )
        raise UserError(
            f"{path} is missing: {option} names day {day}; allowed: {days or 'none'}, the days with such a file. "
            f"Fix: --{option.replace('_', '-')} '{days}'"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a complete npy file ({error}). Fix: write it again with numpy.save") from error
    kinds, words = PARTS[part]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or not array.ndim:
        found = f"{array.ndim}-dimensional {array.dtype}" if isinstance(array, np.ndarray) else "an npz archive"
        raise UserError(f"wrong content of {path}: got {found}; allowed: an array of {words}")
    return array
