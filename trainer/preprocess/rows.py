"""Convert parsed rows to their final form: logarithms, ids, and the order in which they are written.

Shapes: N rows of a block, 13 dense values and 26 ids per row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.cli.progress import Task
from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE
from trainer.preprocess.ordered import in_order
from trainer.preprocess.staging import Stage
from trainer.storage.atomic_write import write_json

BLOCK_ROWS = 16_384  # small enough that every thread gets several blocks of a day
BUCKET_ROWS = 1 << 20  # mean size of a bucket of the shuffle: 168 MB
_SCATTER_BLOCKS = 32  # blocks that are distributed to the buckets together
_TRANSPOSED_ROWS = 1_024  # rows per transposition: source and result fit into the second-level cache
_DRAW_BUCKET, _DRAW_ORDER = 0, 1  # two random streams of one seed


@dataclass(frozen=True)
class Block:
    """`dense` (N, 13) float32, `labels` (N,) int32, `sparse` (N, 26) uint32 for raw ids, int32 for others."""

    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    sparse: npt.NDArray[Any]


@dataclass(frozen=True)
class LazyBlock:
    """A block of `rows` rows that a thread builds later."""

    rows: int
    build: Callable[[], Block]


@dataclass(frozen=True)
class Span:
    """A day: rows `start` to `end` - 1 of a parsed file."""

    day: int
    stage: Stage
    start: int
    end: int

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return self.end - self.start


class Convert:
    """Converts parsed rows to blocks in their final form."""

    def __init__(self, hash_rows: Sequence[int], workers: int) -> None:
        self._hash_rows, self._workers = hash_rows, workers

    def blocks(self, span: Span) -> Iterator[Block]:
        """Yield the rows of a day in the order of the file, built by threads."""
        return in_order(lambda block: block.build(), self.lazy_blocks(span), self._workers)

    def lazy_blocks(self, span: Span) -> Iterator[LazyBlock]:
        """Yield the rows of a day in the order of the file, not built yet."""
        for start in range(span.start, span.end, BLOCK_ROWS):
            count = min(BLOCK_ROWS, span.end - start)
            yield LazyBlock(count, partial(self._block, span, start, count))

    def _block(self, span: Span, start: int, count: int) -> Block:
        smallest = int((span.stage.facts or {})["dense_min"])
        # As in TorchRec's tsv_to_npys, the smallest value of the file becomes log(2). int64 avoids overflow.
        dense = np.log(span.stage.dense(start, count) - np.int64(smallest - 2), dtype=np.float32)
        columns = np.stack([self._ids(f, span.stage.ids(f, start, count)) for f in range(CRITEO_NUM_SPARSE)])
        sparse = np.empty((count, CRITEO_NUM_SPARSE), columns.dtype)
        for at in range(0, count, _TRANSPOSED_ROWS):
            sparse[at : at + _TRANSPOSED_ROWS] = columns[:, at : at + _TRANSPOSED_ROWS].T
        return Block(dense, span.stage.labels(start, count), sparse)

    def _ids(self, feature: int, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not self._hash_rows:
            return ids
        from trainer.data.sources.stable_hash import hash_integers

        return (hash_integers(ids.astype(np.int64)) % np.uint64(self._hash_rows[feature])).astype(np.int32)


def _identity(block: Block) -> Block:
    return block


class Shuffled:
    """The rows of several days in one random order, split into days of the same sizes as before.

    Every row goes to a random bucket on disk, then each bucket is read and permuted. So all orders are equally likely,
    and only one bucket is in memory. The order depends only on the seed and the rows.
    """

    def __init__(self, folder: Path, spans: Sequence[Span], seed: int, raw: bool) -> None:
        self._folder, self._spans, self._seed = folder, spans, seed
        kind = np.uint32 if raw else np.int32
        fields = [("labels", np.int32), ("dense", np.float32, CRITEO_NUM_DENSE), ("sparse", kind, CRITEO_NUM_SPARSE)]
        self._record = np.dtype(fields)
        self._count = -(-sum(span.size for span in spans) // BUCKET_ROWS)
        self._marker = folder / "buckets.json"

    def scatter(self, convert: Convert, task: Task) -> None:
        """Fill the buckets, unless they are already filled."""
        if self._marker.exists():
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        sizes = np.zeros(self._count, np.int64)
        for span in self._spans:
            for number, records in enumerate(self._records(convert.blocks(span))):
                draw = np.random.default_rng([self._seed, _DRAW_BUCKET, span.day, number])
                buckets = draw.integers(self._count, size=records.size)
                order, counts = buckets.argsort(kind="stable"), np.bincount(buckets, minlength=self._count)
                ordered, ends = records[order], counts.cumsum()
                for bucket in np.flatnonzero(counts).tolist():
                    with self._bucket(bucket).open("ab") as stream:
                        stream.write(ordered[ends[bucket] - counts[bucket] : ends[bucket]].data)
                sizes += counts
                task.advance(records.size)
        write_json(self._marker, sizes.tolist())

    def lazy_blocks(self, day: int) -> Iterator[LazyBlock]:
        """Yield the rows of a day after the shuffle, already built, so that no thread keeps a bucket in memory."""
        at = [span.day for span in self._spans].index(day)
        left, skip = self._spans[at].size, sum(span.size for span in self._spans[:at])
        for bucket, size in enumerate(json.loads(self._marker.read_text(encoding="utf-8"))):
            if skip >= size or not left:
                skip -= min(skip, size)
                continue
            records = np.fromfile(self._bucket(bucket), self._record, size)
            order = np.random.default_rng([self._seed, _DRAW_ORDER, bucket]).permutation(size)[skip : skip + left]
            left, skip = left - order.size, 0
            for start in range(0, order.size, BLOCK_ROWS):
                chosen = records[order[start : start + BLOCK_ROWS]]
                block = Block(chosen["dense"], chosen["labels"], chosen["sparse"])
                yield LazyBlock(block.labels.size, partial(_identity, block))

    def _records(self, blocks: Iterator[Block]) -> Iterator[npt.NDArray[Any]]:
        """Yield several blocks at a time, as records."""
        held: list[npt.NDArray[Any]] = []
        for block in blocks:
            records = np.empty(block.labels.size, self._record)
            records["dense"], records["labels"], records["sparse"] = block.dense, block.labels, block.sparse
            held.append(records)
            if len(held) == _SCATTER_BLOCKS:
                yield np.concatenate(held)
                held = []
        if held:
            yield np.concatenate(held)

    def _bucket(self, number: int) -> Path:
        return self._folder / f"{number}.bin"
