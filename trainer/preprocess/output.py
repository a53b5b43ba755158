"""Finished days: written under another name, renamed into place when whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE
from trainer.jobprogress import Task
from trainer.preprocess.rows import Block
from trainer.preprocess.staging import write_json

MARKER = "_COMPLETE.json"
_GROUP_ROWS = 131_072  # of a Parquet row group; the trainer decodes whole groups


class Days:
    """The days of the output folder and what is known of them."""

    def __init__(self, output: Path, staging: Path, kind: str, eval_day: int | None) -> None:
        self._output, self._staging, self._kind, self._eval_day = output, staging, kind, eval_day

    def facts(self, day: int) -> dict[str, Any] | None:
        """rows and largest id per feature (max_ids) of a finished day."""
        marker = self._staging / f"day_{day}.json"
        found: dict[str, Any] | None = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else None
        return found

    def files(self, day: int) -> dict[str, Path]:
        """Where the day's files go, by their part."""
        if self._kind == "parquet":
            return {"rows": self._output / ("eval" if day == self._eval_day else "train") / f"day_{day}.parquet"}
        return {part: self._output / f"day_{day}_{part}.npy" for part in ("dense", "sparse", "labels")}

    def write(self, day: int, rows: int, blocks: Iterator[Block], task: Task) -> None:
        """Write the `rows` rows of a day, unless it is finished."""
        files = self.files(day)
        asides = {part: self._staging / f"{path.name}.part" for part, path in files.items()}
        largest = np.zeros(CRITEO_NUM_SPARSE, np.int64)

        def counted() -> Iterator[Block]:
            for block in blocks:
                np.maximum(largest, block.sparse.max(axis=0), out=largest)
                yield block
                task.advance(block.labels.size)

        (_write_parquet if self._kind == "parquet" else _write_npy)(asides, rows, counted())
        for part, path in files.items():
            path.parent.mkdir(exist_ok=True)
            asides[part].replace(path)
        write_json(self._staging / f"day_{day}.json", {"rows": rows, "max_ids": largest.tolist()})


def _write_npy(paths: dict[str, Path], rows: int, blocks: Iterator[Block]) -> None:
    """dense (N, 13) float32, sparse (N, 26) int64 for raw ids and int32 for others, labels (N, 1) int32."""
    first = next(blocks)
    wide = np.int64 if first.sparse.dtype == np.uint32 else np.int32
    legal = {
        "dense": ("<f4", CRITEO_NUM_DENSE),
        "sparse": (np.dtype(wide).str, CRITEO_NUM_SPARSE),
        "labels": ("<i4", 1),
    }
    with ExitStack() as stack:
        files = {part: stack.enter_context(path.open("wb")) for part, path in paths.items()}
        for part, (kind, columns) in legal.items():
            header = {"descr": kind, "fortran_order": False, "shape": (rows, columns)}
            np.lib.format.write_array_header_1_0(files[part], header)
        for block in _chained(first, blocks):
            files["dense"].write(np.ascontiguousarray(block.dense).data)
            files["sparse"].write(np.ascontiguousarray(block.sparse, dtype=wide).data)
            files["labels"].write(np.ascontiguousarray(block.labels).data)
        for file in files.values():
            _sync(file)


def _write_parquet(paths: dict[str, Path], rows: int, blocks: Iterator[Block]) -> None:
    """Columns label (int32), dense_0 .. dense_12 (float32), cat_0 .. cat_25 (int64 for raw ids, int32 for others)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(blocks)
    wide = pa.int64() if first.sparse.dtype == np.uint32 else pa.int32()
    dense = [pa.field(f"dense_{i}", pa.float32()) for i in range(CRITEO_NUM_DENSE)]
    sparse = [pa.field(f"cat_{i}", wide) for i in range(CRITEO_NUM_SPARSE)]
    fields: list[pa.Field[Any]] = [pa.field("label", pa.int32()), *dense, *sparse]
    schema = pa.schema(fields)
    written = 0
    with paths["rows"].open("wb") as stream:
        with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
            for block in _chained(first, blocks):
                columns = [block.labels, *block.dense.T, *block.sparse.T]
                arrays = [pa.array(np.ascontiguousarray(c)).cast(f.type) for c, f in zip(columns, schema, strict=True)]
                writer.write_batch(pa.record_batch(arrays, schema=schema), row_group_size=_GROUP_ROWS)
                written += block.labels.size
        assert written == rows, f"{paths['rows']} has {written} rows, not {rows}"
        _sync(stream)


def _chained(first: Block, others: Iterator[Block]) -> Iterator[Block]:
    yield first
    yield from others


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
