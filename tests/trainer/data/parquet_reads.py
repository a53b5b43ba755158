"""Read small Parquet files, or files with one column, as the tests of Parquet columns and files need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from data_samples import config_of, parquet_data, samples_of, source_of, write_table

from trainer.data import Batch
from trainer.data.sources.stable_hash import hash_integers, hash_strings

FOUR = {"label": [0, 1, 0, 1], "serial": [0.0, 1.0, 2.0, 3.0]}


def read(path: Path, num_embeddings: int = 1_000, **columns: Any) -> Batch:
    """Read all rows in the order of the file."""
    source = source_of(config_of(parquet_data(path, path, **columns), num_embeddings), "eval")
    return source.read(0, source.samples_per_epoch or 0)


def read_column(tmp_path: Path, values: Any, num_embeddings: int = 1_000, **options: Any) -> Batch:
    """Read rows with `values` in the sparse column `user`."""
    rows = len(values)
    path = write_table(tmp_path / "x.parquet", {"label": [0] * rows, "serial": [0.0] * rows, "user": values})
    return read(path, num_embeddings, sparse=[{"column": "user", **options}])


def ids(batch: Batch, feature: str = "user") -> list[list[int]]:
    features = list(batch.sparse.keys())
    return [list(sample[1][features.index(feature)]) for sample in samples_of(batch)]


def ids_of_column(tmp_path: Path, values: Any, num_embeddings: int = 1_000, **options: Any) -> list[list[int]]:
    return ids(read_column(tmp_path, values, num_embeddings, **options))


def dense_of_column(tmp_path: Path, values: Any, **options: Any) -> list[float]:
    path = write_table(tmp_path / "x.parquet", {"label": [0] * len(values), "age": values, "user": [0] * len(values)})
    batch = read(path, dense=[{"column": "age", **options}])
    return [float(value) for value in batch.dense_BD[:, 0]]


def row_of(value: int | str, rows: int) -> int:
    hashed = hash_integers(np.array([value])) if isinstance(value, int) else hash_bytes(value.encode())
    return int(hashed[0]) % rows


def hash_bytes(*texts: bytes) -> Any:
    offsets = np.cumsum([0, *map(len, texts)])
    return hash_strings(np.frombuffer(b"".join(texts), np.uint8), offsets)
