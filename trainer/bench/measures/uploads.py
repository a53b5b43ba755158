"""Upload speed of a checkpoint to an object store, compared with one large file uploaded by the same library."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from fsspec.core import url_to_fs

from trainer.checkpoint import Checkpointer, Progress
from trainer.checkpoint.store import CheckpointStore

PAIRS = 3


def bench_uploads(checkpointer: Checkpointer, store: CheckpointStore, folder: str, step: int) -> dict[str, Any]:
    """Measure MB/s of saves and of `pipe_file` with as many bytes from one process, in turn (collective).

    Saves are numbered from `step` on. `ratio` is the median of pairs.
    """
    rates: dict[str, list[float]] = {"checkpoint": [], "one_file": []}
    size = 0
    for number in range(step, step + PAIRS + 1):  # the first pair opens connections
        seconds = _timed(lambda number=number: checkpointer.save(Progress(number, 0)))  # type: ignore[misc]
        size = sum(int(file["bytes"]) for file in _marker(store, number)["files"].values())
        rates["checkpoint"].append(size / seconds / 1e6)
        rates["one_file"].append(size / _upload_one_file(folder, size) / 1e6)
    pairs = list(zip(rates["checkpoint"][1:], rates["one_file"][1:], strict=True))
    return {
        "bytes": size,
        "checkpoint_mb_per_s": statistics.median(ours for ours, _ in pairs),
        "one_file_mb_per_s": statistics.median(file for _, file in pairs),
        "ratio": statistics.median(ours / file for ours, file in pairs),
    }


def _marker(store: CheckpointStore, step: int) -> dict[str, Any]:
    found: list[Any] = [store.read_marker(step) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    marker: dict[str, Any] = found[0]
    return marker


def _upload_one_file(folder: str, size: int) -> float:
    """Return the seconds of the library's parallel upload of `size` bytes by rank 0; the others wait."""
    main = dist.get_rank() == 0
    data = os.urandom(size) if main else b""
    fs, root = url_to_fs(folder)  # type: ignore[no-untyped-call]
    seconds = _timed(lambda: fs.pipe_file(f"{root}/one-file", data) if main else None)
    if main:
        fs.rm_file(f"{root}/one-file")
    return seconds


def _timed(operation: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    operation()
    dist.barrier()
    return time.perf_counter() - began
