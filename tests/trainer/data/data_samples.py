"""Small data sets with recognizable samples, and batches as plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.config import TrainConfig
from trainer.data import Batch, Source, SourceContext, open_source
from trainer.data.base import Split

CPU = torch.device("cpu")
Sample = tuple[tuple[float, ...], tuple[tuple[int, ...], ...], float]


def config_of(data: dict[str, Any], num_embeddings: Any = 1_000, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"data": data, "model": {"num_embeddings": num_embeddings}, **sections})


def source_of(config: TrainConfig, split: Split = "train") -> Source:
    return open_source(SourceContext(config, split, CPU))


def samples_of(batch: Batch) -> list[Sample]:
    """Return each sample as (dense values, ids of each feature, label)."""
    ids = []
    for feature in batch.sparse.keys():  # noqa: SIM118 - a KeyedJaggedTensor is not a dict
        jagged = batch.sparse[feature]
        ids.append([tuple(part.tolist()) for part in torch.split(jagged.values(), jagged.lengths().tolist())])
    dense = [tuple(row) for row in batch.dense_BD.tolist()]
    return list(zip(dense, zip(*ids, strict=True), batch.labels_B.tolist(), strict=True))


def serials(source: Source, position: int, count: int) -> list[int]:
    """Return the first dense value of each sample, which is the number of its row in the files below."""
    return [int(value) for value in source.read(position, count).dense_BD[:, 0].tolist()]


def write_criteo(folder: Path, rows_per_day: Sequence[int], num_embeddings: int = 1_000) -> None:
    """Write days 0, 1, ..; dense column 0 numbers the rows of all days."""
    draw, first = np.random.default_rng(0), 0
    folder.mkdir(parents=True, exist_ok=True)
    for day, rows in enumerate(rows_per_day):
        dense = draw.random((rows, 13), dtype=np.float32)
        dense[:, 0] = np.arange(first, first + rows)
        np.save(folder / f"day_{day}_dense.npy", dense)
        np.save(folder / f"day_{day}_sparse.npy", draw.integers(0, num_embeddings, (rows, 26), dtype=np.int32))
        np.save(folder / f"day_{day}_labels.npy", draw.integers(0, 2, rows, dtype=np.int32))
        first += rows


def criteo_data(folder: Path, train_days: Sequence[int], eval_days: Sequence[int], **data: Any) -> dict[str, Any]:
    criteo = {"train_days": list(train_days), "eval_days": list(eval_days), "block_rows": 16}
    return {"source": "criteo", "path": str(folder), "criteo": criteo | data.pop("criteo", {}), **data}


def write_table(path: Path, columns: dict[str, Any], row_group_size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def parquet_data(path: Path | str, eval_path: Path | str | None = None, **columns: Any) -> dict[str, Any]:
    parquet = {"label": "label", "dense": ["serial"], "sparse": ["user"]} | columns
    return {
        "source": "parquet",
        "path": str(path),
        "eval_path": None if eval_path is None else str(eval_path),
        "parquet": parquet,
    }


def table_of(rows: int, first: int = 0, **more: Any) -> dict[str, Any]:
    """Return columns label, serial (numbers the rows from `first`) and user."""
    draw = np.random.default_rng(first)
    serial = np.arange(first, first + rows)
    return {"label": serial % 2, "serial": serial, "user": draw.integers(0, 1_000, rows), **more}


def lists_of(rows: int, first: int = 0) -> pa.Array[Any]:
    """Return a column with 0 to 3 ids per row."""
    draw = np.random.default_rng(first)
    return pa.array([draw.integers(0, 1_000, int(n)).tolist() for n in draw.integers(0, 4, rows)], pa.list_(pa.int64()))


class Countdown:
    """A source of a user: sample k has dense value -k and one id per feature."""

    samples_per_epoch: int | None = None

    def __init__(self, context: SourceContext) -> None:
        self.config = context.config
        self.offset = 0 if context.split == "train" else 10**6

    def read(self, position: int, count: int) -> Batch:
        from trainer.data import one_id_batch

        index_B = torch.arange(position, position + count) + self.offset
        features, rows = self.config.data.sparse_features, self.config.rows_per_table
        ids_FB = index_B.remainder(7).expand(len(features), count)
        dense_BD = -index_B.double()[:, None].float().expand(count, len(self.config.data.dense_features))
        return one_id_batch(features, rows, dense_BD, ids_FB, torch.zeros(count), position)


def _synthetic(_: Path) -> TrainConfig:
    return config_of({"num_sparse": 5, "num_dense": 3})


def _several_ids(_: Path) -> TrainConfig:
    return config_of({"num_sparse": 4, "num_dense": 2, "ids_per_feature": 3})


def _criteo(folder: Path) -> TrainConfig:
    write_criteo(folder, [50, 7, 33, 20])
    return config_of(criteo_data(folder, [0, 1, 2], [3]))


def _parquet(folder: Path) -> TrainConfig:
    for part, (rows, first) in enumerate([(35, 0), (1, 35), (54, 36)]):
        write_table(folder / "train" / f"part-{part}.parquet", table_of(rows, first))
    write_table(folder / "eval.parquet", table_of(20, first=90))
    return config_of(parquet_data(folder / "train", folder / "eval.parquet", cache_groups=2))


def _lists(folder: Path) -> TrainConfig:
    write_table(folder / "train.parquet", table_of(90, genres=lists_of(90)))
    write_table(folder / "eval.parquet", table_of(20, first=90, genres=lists_of(20, first=90)))
    data = parquet_data(folder / "train.parquet", folder / "eval.parquet", sparse=["user", "genres"], cache_groups=2)
    return config_of(data)


def _custom(_: Path) -> TrainConfig:
    return config_of({"source": "data_samples:Countdown", "num_sparse": 2, "num_dense": 1})


SOURCES: dict[str, Callable[[Path], TrainConfig]] = {
    "synthetic": _synthetic,
    "synthetic with several ids": _several_ids,
    "criteo": _criteo,
    "parquet": _parquet,
    "parquet with lists": _lists,
    "a class of the user": _custom,
}
FINITE = ("criteo", "parquet", "parquet with lists")  # each has train samples 0 .. 89 and eval samples 90 .. 109
NUM_TRAIN, NUM_EVAL = 90, 20
