"""Faults that a process inflicts on itself: kill -9, a hang, a full disk, a slow write, at a chosen moment."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.checkpoint import manager
from trainer.checkpoint.checksums import ChecksumWriter, VerifiedReader
from trainer.checkpoint.store import FsspecStore
from trainer.training.pipeline import Pipeline


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inject(fault: dict[str, Any]) -> None:
    """`kind` and its numbers: see FAULTS. Everything before the moment is as always."""
    FAULTS[fault["kind"]](**{key: value for key, value in fault.items() if key != "kind"})


def at_call(owner: type, name: str, number: int, act: Callable[[], None]) -> None:
    """Do `act` first in the `number`-th call (from 1) of a method."""
    original, calls, lock = getattr(owner, name), [0], threading.Lock()

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        with lock:
            calls[0] += 1
            mine = calls[0]
        if mine == number:
            act()
        return original(self, *arguments, **options)

    setattr(owner, name, counted)


def kill_in_step(step: int, delay: float) -> None:
    """`delay` seconds into the `step`-th step of this process, from a thread: in whatever it does at that moment."""

    def later() -> None:
        threading.Timer(delay, die).start()

    at_call(Pipeline, "progress", step, later)


def kill_in_save(write: int) -> None:
    """At the n-th piece that this process writes into any checkpoint: files are half written."""
    at_call(ChecksumWriter, "write", write, die)


def kill_before_marker(commit: int) -> None:
    """When all files are written and the marker is not (rank 0 alone gets there)."""
    at_call(FsspecStore, "commit", commit, die)


def kill_in_load(read: int) -> None:
    """At the n-th read from a checkpoint."""
    at_call(VerifiedReader, "readinto", read, die)


def hang_in_step(step: int) -> None:
    """For ever."""
    at_call(Pipeline, "progress", step, lambda: time.sleep(10_000))


def full_disk(first: int, last: int) -> None:
    """No space in the saves `first` to `last` of this process."""
    original, saves = manager.Checkpointer.write, [0]

    def write(self: Any, *arguments: Any, **options: Any) -> Any:
        saves[0] += 1
        return original(self, *arguments, **options)

    manager.Checkpointer.write = write  # type: ignore[method-assign]
    wrote = ChecksumWriter.write

    def refuse(self: Any, data: Any) -> int:
        if first <= saves[0] <= last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return wrote(self, data)

    ChecksumWriter.write = refuse  # type: ignore[method-assign]


def slow_writes(seconds: float) -> None:
    """Every piece takes that long, as on a loaded file server."""
    wrote = ChecksumWriter.write

    def write(self: Any, data: Any) -> int:
        time.sleep(seconds)
        return wrote(self, data)

    ChecksumWriter.write = write  # type: ignore[method-assign]


def slow_steps(seconds: float) -> None:
    """Every step takes that much longer."""
    progressed = Pipeline.progress

    def progress(self: Any, batches: Any) -> Any:
        time.sleep(seconds)
        return progressed(self, batches)

    Pipeline.progress = progress  # type: ignore[method-assign]


FAULTS: dict[str, Callable[..., None]] = {
    "kill_in_step": kill_in_step,
    "kill_in_save": kill_in_save,
    "kill_before_marker": kill_before_marker,
    "kill_in_load": kill_in_load,
    "hang_in_step": hang_in_step,
    "full_disk": full_disk,
    "slow_writes": slow_writes,
    "slow_steps": slow_steps,
}
