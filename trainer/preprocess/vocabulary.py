"""Map ids to contiguous numbers by frequency, as TorchRec's sparse_to_contiguous does, but in bounded memory.

An id that occurs at least `threshold` times in all days gets the next number from 2 on, in the order of first
occurrence; every other id gets 1. TorchRec counts in a dictionary per feature. This module aggregates with polars;
counts that exceed the memory are partitioned into files by a hash of the id, which are then aggregated one by one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from trainer.cli.progress import Task
from trainer.errors import UserError
from trainer.preprocess.ordered import in_order
from trainer.preprocess.staging import Stage
from trainer.storage.atomic_write import atomic_replace

FIRST, RARE = 2, 1
_CHUNK = 1 << 20  # ids aggregated at once
_PARTS = 64
_SCRAMBLE = 0x9E3779B1  # odd, so a bijection of 32-bit integers; its top bits distribute small ids over all parts
_BYTES_PER_ID = 16  # id, count and first position, as columns


class Counts:
    """Count and first position of each id, with at most `budget` bytes in memory at a time."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._recent: list[pl.DataFrame] = []
        self._recent_bytes = 0
        self._spilled = False

    def add(self, ids: npt.NDArray[np.uint32], first: int) -> None:
        """Count ids whose positions start at `first`."""
        positions = np.arange(first, first + ids.size, dtype=np.uint64)
        frame = pl.DataFrame({"id": ids, "n": np.ones(ids.size, np.uint32), "first": positions})
        self._recent.append(_aggregate(frame))
        self._recent_bytes += self._recent[-1].height * _BYTES_PER_ID
        if self._recent_bytes > self._budget:
            self._recent = [_aggregate(pl.concat(self._recent))]
            self._recent_bytes = self._recent[0].height * _BYTES_PER_ID
            if self._recent_bytes > self._budget // 2:
                self._spill()

    def frequent(self, threshold: int) -> npt.NDArray[np.uint32]:
        """Return the ids that occur at least `threshold` times, by first occurrence."""
        found = [part.filter(pl.col("n") >= threshold).drop("n") for part in self._parts()]
        return pl.concat(found).sort("first")["id"].to_numpy()

    def _parts(self) -> Iterator[pl.DataFrame]:
        """Yield frames that have no id in common."""
        if not self._spilled:
            yield _aggregate(pl.concat(self._recent))
            return
        self._spill()
        for part in range(_PARTS):
            files = sorted(self._folder.glob(f"{part}_*.parquet"))
            if files:
                yield _aggregate(pl.concat([pl.read_parquet(file, memory_map=False) for file in files]))

    def _spill(self) -> None:
        if self._recent:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = (pl.col("id").cast(pl.UInt64) * _SCRAMBLE) % 2**32 // (2**32 // _PARTS)
            frame = pl.concat(self._recent).with_columns(part=part)
            run = len(list(self._folder.glob("0_*.parquet")))
            for number in range(_PARTS):
                own = frame.filter(pl.col("part") == number).drop("part")
                own.write_parquet(self._folder / f"{number}_{run}.parquet", compression="lz4")
        self._recent, self._recent_bytes, self._spilled = [], 0, True


def _aggregate(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.group_by("id").agg(pl.col("n").sum(), pl.col("first").min())


class Numbers:
    """The number of each id of a vocabulary."""

    def __init__(self, ids: npt.NDArray[np.uint32]) -> None:
        order = ids.argsort()
        self._sorted = ids[order]
        self._numbers = (order + FIRST).astype(np.int32)

    def of(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the numbers of ids, (N,) int32: from 2 on for ids of the vocabulary, 1 for others."""
        if not self._sorted.size:
            return np.full(ids.size, RARE, np.int32)
        at = self._sorted.searchsorted(ids)
        np.minimum(at, self._sorted.size - 1, out=at)
        return np.where(self._sorted[at] == ids, self._numbers[at], np.int32(RARE))


def number_feature(
    stages: Sequence[Stage], feature: int, threshold: int, keep: Path, memory: int, workers: int, task: Task
) -> int:
    """Write the mapped column of each stage and the vocabulary, and return the rows that a table needs.

    The k-th id of the vocabulary file `keep` (npy) has number k + 2. The raw columns are deleted.
    """
    sizes = [(stage.facts or {})["rows"] for stage in stages]
    if all(stage.mapped(feature).exists() for stage in stages):
        task.advance(2 * sum(sizes))
        return int(np.load(keep).size) + FIRST
    spill = stages[0].folder.parent / f"counts_{feature}"
    shutil.rmtree(spill, ignore_errors=True)
    counts, before = Counts(spill, memory // 4), 0
    for stage, size in zip(stages, sizes, strict=True):
        for start in range(0, size, _CHUNK):
            ids = np.fromfile(stage.column(feature), np.uint32, min(_CHUNK, size - start), offset=4 * start)
            counts.add(ids, before + start)
            task.advance(ids.size)
        before += size
    ids = counts.frequent(threshold)
    shutil.rmtree(spill, ignore_errors=True)
    if ids.size * _BYTES_PER_ID > memory:
        raise UserError(
            f"feature cat_{feature} has too many ids for the memory: got {ids.size:,} that occur {threshold} times or "
            f"more. Fix: use --memory-gib {ids.size * _BYTES_PER_ID / 2**30 + 1:.0f}, or a higher --threshold"
        )
    keep.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(keep) as part, part.open("wb") as stream:
        np.save(stream, ids)
    _map(stages, sizes, feature, Numbers(ids), workers, task)
    return int(ids.size) + FIRST


def _map(
    stages: Sequence[Stage], sizes: Sequence[int], feature: int, numbers: Numbers, workers: int, task: Task
) -> None:
    for stage, size in zip(stages, sizes, strict=True):

        def mapped(start: int, stage: Stage = stage, size: int = size) -> npt.NDArray[np.int32]:
            return numbers.of(
                np.fromfile(stage.column(feature), np.uint32, min(_CHUNK, size - start), offset=4 * start)
            )

        with atomic_replace(stage.mapped(feature)) as part, part.open("wb") as stream:
            for chunk in in_order(mapped, range(0, size, _CHUNK), workers):
                stream.write(chunk.data)
                task.advance(chunk.size)
    for stage in stages:
        stage.column(feature).unlink(missing_ok=True)
