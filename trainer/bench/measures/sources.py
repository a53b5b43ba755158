"""Speed of each source on one core, with its files in the page cache."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.bench.measures.variants import READING
from trainer.bench.progress import progress
from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE, TrainConfig
from trainer.data import Batch, SourceContext, open_source
from trainer.runtime.malloc import apply_malloc

DataOptions = dict[str, dict[str, Any]]  # options of `data` by name
_ROWS = 1 << 18
_PER_READ = 2_048
_SECONDS = 3.0
_POOL = 100_000


@contextmanager
def sample_files(config: TrainConfig) -> Iterator[DataOptions]:
    """Write 262,144 rows in each file format to a temporary folder; yield the options of `data` that read them.

    They are samples of the synthetic source with Criteo's 13 dense and 26 sparse features and the configured rows per
    table, so that a step does the same work on them.
    """
    torch.set_num_threads(1)
    tree = config.model_dump()
    tree["data"] |= {"source": "synthetic", "num_dense": CRITEO_NUM_DENSE, "num_sparse": CRITEO_NUM_SPARSE}
    tree["data"]["ids_per_feature"] = 1
    tree["model"]["num_embeddings"] = min(config.rows_per_table)
    batch = open_source(SourceContext(TrainConfig.model_validate(tree), "train", torch.device("cpu"))).read(0, _ROWS)
    with tempfile.TemporaryDirectory() as folder:
        yield {"criteo": _criteo_files(Path(folder), batch), "parquet": _parquet_files(Path(folder), batch)}


def bench_sources(config: TrainConfig, files: DataOptions) -> dict[str, Any]:
    """Measure samples/s of one thread for the synthetic, Criteo and Parquet sources, shuffled, in reads of 2,048.

    The first epoch warms up the page cache and Parquet's decoded row groups; the second one counts. The variants named
    "decoding" keep no decoded row groups and decode each one again, as in a first epoch. For these "of_arrow" is the
    rate divided by the rate at which Arrow alone reads the same columns, which no reader based on Arrow can exceed.
    """
    pa.set_cpu_count(1)
    apply_malloc(config.train.malloc, torch.device("cpu"))  # as in training; otherwise page faults dominate a read
    with tempfile.TemporaryDirectory() as folder:
        kept = {"synthetic": {"source": "synthetic"}, "criteo npy": files["criteo"], "parquet": files["parquet"]}
        decoded = {
            "parquet, decoding 26 hashed strings": _decoded_file(folder, "strings", _strings, hashed=True),
            "parquet, decoding 26 lists of 0 to 3 ids": _decoded_file(folder, "lists", _lists, hashed=False),
        }
        sources = kept | decoded
        with progress("reading", len(sources), "sources") as advance:
            rates, of_arrow = {}, {}
            for name, data in sources.items():
                rates[name] = _rate(config, data)
                if name in decoded:
                    of_arrow[name] = rates[name] / _arrow_rate(data["path"])
                advance()
    return {"sources": rates, "of_arrow": of_arrow, "rows": _ROWS, "samples_per_read": _PER_READ}


def reading_variants(config: TrainConfig, files: DataOptions) -> dict[str, list[str]]:
    """Return the variants of a step: reading the configured source, and with batches in memory.

    For a synthetic source of Criteo's shape, also reading its samples from both kinds of files: the model is the same.
    """
    variants = {f"{READING}{config.data.source.rpartition(':')[2]}": list[str]()}
    shape = (config.data.num_dense, config.data.num_sparse, config.data.ids_per_feature)
    one_size = len(set(config.rows_per_table)) == 1
    if config.data.source == "synthetic" and shape == (CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE, 1) and one_size:
        variants |= {READING + name: _as_options("--data", data) for name, data in files.items()}
    return variants | {"cached": []}


def _as_options(name: str, value: Any) -> list[str]:
    """Return a tree of values as command-line options."""
    if isinstance(value, dict):
        return [option for key in value for option in _as_options(f"{name}.{key.replace('_', '-')}", value[key])]
    return [name, value if isinstance(value, str) else json.dumps(value)]


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


def _arrow_rate(path: str) -> float:
    """Return the rows/s of one thread that only reads the row groups in turn."""
    file = pq.ParquetFile(path)
    began, rows = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for group in range(file.num_row_groups):
            rows += file.read_row_group(group).num_rows
    return rows / (time.perf_counter() - began)


def _criteo_files(folder: Path, batch: Batch) -> dict[str, Any]:
    np.save(folder / "day_0_dense.npy", batch.dense_BD.numpy())
    np.save(folder / "day_0_sparse.npy", _ids(batch).T.astype(np.int32, order="C"))
    np.save(folder / "day_0_labels.npy", batch.labels_B.numpy().astype(np.int32)[:, None])
    return {"source": "criteo", "path": str(folder), "criteo": {"train_days": (0,), "eval_days": ()}}


def _parquet_files(folder: Path, batch: Batch) -> dict[str, Any]:
    dense = {f"dense_{i}": np.ascontiguousarray(batch.dense_BD.numpy()[:, i]) for i in range(CRITEO_NUM_DENSE)}
    sparse = {f"cat_{i}": ids for i, ids in enumerate(_ids(batch))}
    path = folder / "train.parquet"
    table = pa.table({"label": batch.labels_B.numpy().astype(np.int64), **dense, **sparse})
    pq.write_table(table, path, row_group_size=_ROWS // 8)
    columns = {"dense": list(dense), "sparse": list(sparse), "cache_groups": 8}
    return {"source": "parquet", "path": str(path), "eval_path": str(path), "parquet": columns}


def _ids(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the ids as (26, N)."""
    ids: npt.NDArray[np.int64] = batch.sparse.values().numpy().reshape(CRITEO_NUM_SPARSE, -1)
    return ids


def _decoded_file(
    folder: str, name: str, column: Callable[[np.random.Generator], pa.Array[Any]], *, hashed: bool
) -> dict[str, Any]:
    """Write a file whose row groups are decoded again on every visit, since the source keeps only one of them."""
    path = Path(folder) / f"{name}.parquet"
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
    """Return strings of eight characters, drawn from 100,000 different ones."""
    pool = pa.array([f"{number:08x}" for number in draw.integers(0, 2**32, _POOL)])
    return pool.take(draw.integers(0, _POOL, _ROWS))


def _lists(draw: np.random.Generator) -> pa.Array[Any]:
    offsets = np.concatenate([[0], draw.integers(0, 4, _ROWS).cumsum()])
    values: pa.Array[Any] = pa.array(draw.integers(0, _POOL, offsets[-1]))
    found: pa.Array[Any] = pa.ListArray.from_arrays(pa.array(offsets.tolist(), pa.int32()), values)
    return found
