"""Write days under temporary names, and rename them when they are complete."""

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
from trainer.preprocess.rows import BLOCK_ROWS, Block, LazyBlock
from trainer.storage.atomic_write import write_json

if TYPE_CHECKING:
    import pyarrow as pa

MARKER = "_COMPLETE.json"
_GROUP_ROWS = 131_072  # rows of a Parquet row group, the unit that the trainer decodes


class OutputDays:
    """The days of the output folder. As a context manager it waits at its end for days that are being renamed."""

    def __init__(self, output: Path, staging: Path, kind: str, eval_day: int | None, workers: int) -> None:
        self._output, self._staging, self._kind, self._eval_day = output, staging, kind, eval_day
        self._workers = workers
        self._publisher = ThreadPoolExecutor(1)
        self._publishing: Future[None] | None = None

    def __enter__(self) -> OutputDays:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.shutdown(wait=True)

    def facts(self, day: int) -> dict[str, Any] | None:
        """Return rows and the largest id per feature (max_ids) of a complete day, or None for an incomplete one."""
        marker = self._staging / f"day_{day}.json"
        found: dict[str, Any] | None = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else None
        return found

    def files(self, day: int) -> dict[str, Path]:
        """Return the paths of a day's files by part."""
        if self._kind == "parquet":
            return {"rows": self._output / ("eval" if day == self._eval_day else "train") / f"day_{day}.parquet"}
        return {part: self._output / f"day_{day}_{part}.npy" for part in ("dense", "sparse", "labels")}

    def write(
        self, day: int, rows: int, blocks: Iterator[LazyBlock], task: Task, on_complete: Callable[[], None]
    ) -> None:
        """Write the rows of a day.

        A background thread syncs and renames its files and calls `on_complete`; `wait` waits for that.
        """
        temporary = {part: self._staging / f"{path.name}.part" for part, path in self.files(day).items()}
        write = _write_parquet if self._kind == "parquet" else _write_npy
        largest = write(temporary, rows, blocks, self._workers, task)
        self.wait()
        facts = {"rows": rows, "max_ids": largest}
        self._publishing = self._publisher.submit(self._publish, day, temporary, facts, on_complete)

    def wait(self) -> None:
        """Wait until all written days are complete; raise the error if one failed."""
        if self._publishing:
            self._publishing.result()

    def _publish(
        self, day: int, temporary: dict[str, Path], facts: dict[str, Any], on_complete: Callable[[], None]
    ) -> None:
        for path in temporary.values():
            with path.open("rb") as stream:
                _sync(stream)
        for part, path in self.files(day).items():
            path.parent.mkdir(exist_ok=True)
            temporary[part].replace(path)
        write_json(self._staging / f"day_{day}.json", facts)
        on_complete()


def _write_npy(paths: dict[str, Path], rows: int, blocks: Iterator[LazyBlock], workers: int, task: Task) -> list[int]:
    """Write arrays and return the largest id per feature; each thread writes the blocks that it builds.

    The arrays are dense (N, 13) float32, sparse (N, 26) int64 for raw ids and int32 for others, labels (N, 1) int32.
    """
    first = next(blocks)
    block = first.build()
    wide = np.dtype(np.int64 if block.sparse.dtype == np.uint32 else np.int32)
    shapes = {"dense": (np.dtype(np.float32), CRITEO_NUM_DENSE), "sparse": (wide, CRITEO_NUM_SPARSE)}
    shapes |= {"labels": (np.dtype(np.int32), 1)}
    with ExitStack() as stack:
        files = {part: _NpyRows(stack.enter_context(paths[part].open("wb")), rows, *shapes[part]) for part in shapes}

        def write(numbered: tuple[int, LazyBlock]) -> npt.NDArray[Any]:
            at, lazy = numbered
            block = lazy.build()
            for name, file in files.items():
                file.write(at, getattr(block, name))
            task.advance(lazy.rows)
            largest: npt.NDArray[Any] = block.sparse.max(axis=0)
            return largest

        built = LazyBlock(first.rows, lambda: block)
        largest_per_block = in_order(write, _with_first_row(chain((built,), blocks)), workers)
        return [int(n) for n in reduce(np.maximum, largest_per_block)]


class _NpyRows:
    """A file of an array (`rows`, `columns`), which threads write in any order."""

    def __init__(self, stream: IO[bytes], rows: int, kind: np.dtype[Any], columns: int) -> None:
        header = {"descr": kind.str, "fortran_order": False, "shape": (rows, columns)}
        np.lib.format.write_array_header_1_0(stream, header)
        stream.flush()
        self._stream, self._begin, self._kind, self._row_bytes = stream, stream.tell(), kind, columns * kind.itemsize

    def write(self, row: int, values: npt.NDArray[Any]) -> None:
        """Write rows from `row` on."""
        left = np.ascontiguousarray(values, self._kind).data.cast("B")
        at = self._begin + row * self._row_bytes
        while left:
            done = os.pwrite(self._stream.fileno(), left, at)
            left, at = left[done:], at + done


def _with_first_row(blocks: Iterator[LazyBlock]) -> Iterator[tuple[int, LazyBlock]]:
    """Yield each block with the number of its first row."""
    at = 0
    for block in blocks:
        yield at, block
        at += block.rows


def _write_parquet(
    paths: dict[str, Path], rows: int, lazy_blocks: Iterator[LazyBlock], workers: int, task: Task
) -> list[int]:
    """Write a table and return the largest id per feature.

    Columns are label (int32), dense_0 to dense_12 (float32), and cat_0 to cat_25 (int64 for raw ids, else int32).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    largest = np.zeros(CRITEO_NUM_SPARSE, np.int64)
    written = 0
    with paths["rows"].open("wb") as stream, ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        blocks = in_order(lambda lazy: lazy.build(), lazy_blocks, workers)
        while group := list(islice(blocks, -(-_GROUP_ROWS // BLOCK_ROWS))):
            for block in group:
                np.maximum(largest, block.sparse.max(axis=0), out=largest)
            table = pa.concat_tables([_table(block) for block in group])
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
