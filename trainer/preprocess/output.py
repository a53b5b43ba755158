"""Finished days: written under another name, renamed into place when whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer.cli.progress import Task
from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE
from trainer.preprocess.ordered import in_order
from trainer.preprocess.rows import BLOCK_ROWS, Block, Part
from trainer.storage.atomic_write import write_json

if TYPE_CHECKING:
    import pyarrow as pa

MARKER = "_COMPLETE.json"
_GROUP_ROWS = 131_072  # of a Parquet row group; the trainer decodes whole groups


class Days:
    """The days of the output folder and what is known of them. A context: at its end all that was written is in place,
    or is not there."""

    def __init__(self, output: Path, staging: Path, kind: str, eval_day: int | None, workers: int) -> None:
        self._output, self._staging, self._kind, self._eval_day = output, staging, kind, eval_day
        self._workers = workers
        self._placer = ThreadPoolExecutor(1)
        self._placing: Future[None] | None = None

    def __enter__(self) -> Days:
        return self

    def __exit__(self, *_: object) -> None:
        self._placer.shutdown(wait=True)

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

    def write(self, day: int, rows: int, parts: Iterator[Part], task: Task, placed: Callable[[], None]) -> None:
        """Write the `rows` rows of a day. Its files are synchronised and get their names in the background, where
        `placed` is called then; `settle` waits for that."""
        asides = {part: self._staging / f"{path.name}.part" for part, path in self.files(day).items()}
        write = _write_parquet if self._kind == "parquet" else _write_npy
        largest = write(asides, rows, parts, self._workers, task)
        self.settle()
        self._placing = self._placer.submit(self._place, day, asides, {"rows": rows, "max_ids": largest}, placed)

    def settle(self) -> None:
        """Wait until the days that were written are in place; raises what went wrong."""
        if self._placing:
            self._placing.result()

    def _place(self, day: int, asides: dict[str, Path], facts: dict[str, Any], placed: Callable[[], None]) -> None:
        for aside in asides.values():
            with aside.open("rb") as stream:
                _sync(stream)
        for part, path in self.files(day).items():
            path.parent.mkdir(exist_ok=True)
            asides[part].replace(path)
        write_json(self._staging / f"day_{day}.json", facts)
        placed()


def _write_npy(paths: dict[str, Path], rows: int, parts: Iterator[Part], workers: int, task: Task) -> list[int]:
    """dense (N, 13) float32, sparse (N, 26) int64 for raw ids and int32 for others, labels (N, 1) int32; each thread
    writes what it has made. Returns the largest id per feature."""
    first = next(parts)
    block = first.make()
    wide = np.dtype(np.int64 if block.sparse.dtype == np.uint32 else np.int32)
    shapes = {"dense": (np.dtype(np.float32), CRITEO_NUM_DENSE), "sparse": (wide, CRITEO_NUM_SPARSE)}
    shapes |= {"labels": (np.dtype(np.int32), 1)}
    with ExitStack() as stack:
        files = {part: _NpyRows(stack.enter_context(paths[part].open("wb")), rows, *shapes[part]) for part in shapes}

        def written(part_at: tuple[int, Part]) -> npt.NDArray[Any]:
            at, part = part_at
            block = part.make()
            for name, file in files.items():
                file.write(at, getattr(block, name))
            task.advance(part.rows)
            largest: npt.NDArray[Any] = block.sparse.max(axis=0)
            return largest

        known = Part(first.rows, lambda: block)
        found = in_order(written, _placed(chain((known,), parts)), workers)
        return [int(n) for n in reduce(np.maximum, found)]


class _NpyRows:
    """A file of an array (`rows`, `columns`) of a `kind`, written in any order by any thread."""

    def __init__(self, stream: IO[bytes], rows: int, kind: np.dtype[Any], columns: int) -> None:
        header = {"descr": kind.str, "fortran_order": False, "shape": (rows, columns)}
        np.lib.format.write_array_header_1_0(stream, header)
        stream.flush()
        self._stream, self._begin, self._kind, self._row_bytes = stream, stream.tell(), kind, columns * kind.itemsize

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """Rows `row` and on."""
        left = np.ascontiguousarray(values, self._kind).data.cast("B")
        at = self._begin + row * self._row_bytes
        while left:
            done = os.pwrite(self._stream.fileno(), left, at)
            left, at = left[done:], at + done


def _placed(parts: Iterator[Part]) -> Iterator[tuple[int, Part]]:
    """Each with the number of its first row."""
    at = 0
    for part in parts:
        yield at, part
        at += part.rows


def _write_parquet(paths: dict[str, Path], rows: int, parts: Iterator[Part], workers: int, task: Task) -> list[int]:
    """Columns label (int32), dense_0 .. dense_12 (float32), cat_0 .. cat_25 (int64 for raw ids, int32 for others).
    Returns the largest id per feature."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    largest = np.zeros(CRITEO_NUM_SPARSE, np.int64)
    written = 0
    with paths["rows"].open("wb") as stream, ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        blocks = in_order(lambda part: part.make(), parts, workers)
        while held := list(islice(blocks, -(-_GROUP_ROWS // BLOCK_ROWS))):
            for block in held:
                np.maximum(largest, block.sparse.max(axis=0), out=largest)
            table = pa.concat_tables([_table(block) for block in held])
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(stream, table.schema, compression="zstd"))
            writer.write_table(table, row_group_size=_GROUP_ROWS)
            written += table.num_rows
            task.advance(table.num_rows)
    assert written == rows, f"{paths['rows']} has {written} rows, not {rows}"
    return largest.tolist()


def _table(block: Block) -> pa.Table:
    import pyarrow as pa

    wide = pa.int64() if block.sparse.dtype == np.uint32 else pa.int32()
    columns = {"label": pa.array(block.labels)}
    columns |= {f"dense_{i}": pa.array(np.ascontiguousarray(block.dense[:, i])) for i in range(CRITEO_NUM_DENSE)}
    sparse = {f"cat_{i}": np.ascontiguousarray(block.sparse[:, i]) for i in range(CRITEO_NUM_SPARSE)}
    return pa.table(columns | {name: pa.array(ids).cast(wide) for name, ids in sparse.items()})


def _sync(stream: IO[bytes]) -> None:
    os.fsync(stream.fileno())
