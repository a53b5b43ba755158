"""How fast each source makes batches on one core, with its files in the page cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.bench.progress import progress
from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE, TrainConfig
from trainer.data import SourceContext, open_source

_ROWS = 1 << 18
_PER_READ = 2_048
_SECONDS = 3.0
_POOL = 100_000


def bench_sources(config: TrainConfig) -> dict[str, Any]:
    """Samples/s of one thread for the synthetic, Criteo and Parquet sources, shuffled, in reads of 2,048.

    Criteo and Parquet files of 262,144 rows with the configured features are made in a temporary folder; the first
    epoch is read to warm up (page cache, Parquet's decoded row groups), the second one counts. Where decoding is
    named, no decoded row group is kept: every one is read from its file, as in a first epoch.
    """
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "synthetic": {"source": "synthetic"},
            "criteo npy": _criteo_files(Path(folder), min(config.rows_per_table)),
            "parquet": _parquet_files(Path(folder), min(config.rows_per_table)),
            "parquet, decoding 26 hashed strings": _decoded(Path(folder) / "strings.parquet", _strings, hashed=True),
            "parquet, decoding 26 lists of 0 to 3 ids": _decoded(Path(folder) / "lists.parquet", _lists, hashed=False),
        }
        with progress("reading", len(variants), "sources") as advance:
            rates = {}
            for name, data in variants.items():
                rates[name] = _rate(config, data)
                advance()
    return {"sources": rates, "rows": _ROWS, "samples_per_read": _PER_READ}


def _rate(config: TrainConfig, data: dict[str, Any]) -> float:
    tree = config.model_dump()
    tree["data"] |= data
    tree["model"]["num_embeddings"] = max(config.rows_per_table)
    source = open_source(SourceContext(TrainConfig.model_validate(tree), "train", torch.device("cpu")))
    for position in range(0, _ROWS, _PER_READ):
        source.read(position, _PER_READ)
    began, position = time.perf_counter(), _ROWS
    while time.perf_counter() - began < _SECONDS:
        source.read(position, _PER_READ)
        position += _PER_READ
    return (position - _ROWS) / (time.perf_counter() - began)


def _criteo_files(folder: Path, rows: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    np.save(folder / "day_0_dense.npy", draw.random((_ROWS, CRITEO_NUM_DENSE), dtype=np.float32))
    np.save(folder / "day_0_sparse.npy", draw.integers(0, rows, (_ROWS, CRITEO_NUM_SPARSE), dtype=np.int32))
    np.save(folder / "day_0_labels.npy", draw.integers(0, 2, (_ROWS, 1), dtype=np.int32))
    return {"source": "criteo", "path": str(folder), "criteo": {"train_days": (0,), "eval_days": ()}}


def _parquet_files(folder: Path, rows: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    dense = {f"dense_{i}": draw.random(_ROWS, dtype=np.float32) for i in range(CRITEO_NUM_DENSE)}
    sparse = {f"cat_{i}": draw.integers(0, rows, _ROWS) for i in range(CRITEO_NUM_SPARSE)}
    path = folder / "train.parquet"
    pq.write_table(pa.table({"label": draw.integers(0, 2, _ROWS), **dense, **sparse}), path, row_group_size=_ROWS // 8)
    columns = {"dense": list(dense), "sparse": list(sparse), "cache_groups": 8}
    return {"source": "parquet", "path": str(path), "eval_path": str(path), "parquet": columns}


def _decoded(path: Path, column: Callable[[np.random.Generator], pa.Array[Any]], hashed: bool) -> dict[str, Any]:
    """A file whose row groups are decoded whenever they are met: one is kept, and they come in turn."""
    draw = np.random.default_rng(0)
    dense = {f"dense_{i}": draw.random(_ROWS, dtype=np.float32) for i in range(CRITEO_NUM_DENSE)}
    sparse = {f"cat_{i}": column(draw) for i in range(CRITEO_NUM_SPARSE)}
    pq.write_table(pa.table({"label": draw.integers(0, 2, _ROWS), **dense, **sparse}), path, row_group_size=_ROWS // 8)
    columns = {
        "dense": list(dense),
        "sparse": [{"column": name, "rows": _POOL, "hash": hashed} for name in sparse],
        "cache_groups": 1,
    }
    return {"source": "parquet", "path": str(path), "eval_path": str(path), "parquet": columns}


def _strings(draw: np.random.Generator) -> pa.Array[Any]:
    """Eight characters each, of 100,000 different ones."""
    pool = pa.array([f"{number:08x}" for number in draw.integers(0, 2**32, _POOL)])
    return pool.take(draw.integers(0, _POOL, _ROWS))


def _lists(draw: np.random.Generator) -> pa.Array[Any]:
    offsets = np.concatenate([[0], draw.integers(0, 4, _ROWS).cumsum()])
    values: pa.Array[Any] = pa.array(draw.integers(0, _POOL, offsets[-1]))
    found: pa.Array[Any] = pa.ListArray.from_arrays(pa.array(offsets.tolist(), pa.int32()), values)
    return found
