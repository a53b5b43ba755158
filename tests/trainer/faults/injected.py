"""Faults that a process injects into itself at a given moment: kill -9, a hang, a full disk, slow writes."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.checkpoint import manager
from trainer.checkpoint.checksums import ChecksumWriter, VerifiedReader
from trainer.checkpoint.store import FsspecStore
from trainer.main import main
from trainer.training.pipeline import Pipeline


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inject(fault: dict[str, Any]) -> None:
    """Install a fault; `kind` is a key of FAULTS, the other entries are its arguments."""
    FAULTS[fault["kind"]](**{key: value for key, value in fault.items() if key != "kind"})


def at_call(owner: type, name: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` at the start of the `number`-th call (from 1) of a method."""
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
    """Kill the process `delay` seconds into its `step`-th step, from a thread, at an arbitrary point of the step."""

    def later() -> None:
        threading.Timer(delay, die).start()

    at_call(Pipeline, "progress", step, later)


def kill_in_save(write: int) -> None:
    """Kill the process at the n-th piece that it writes into any checkpoint, with files half written."""
    at_call(ChecksumWriter, "write", write, die)


def kill_before_marker(commit: int) -> None:
    """Kill the process when all files but the marker are written; only rank 0 writes the marker."""
    at_call(FsspecStore, "commit", commit, die)


def kill_in_load(read: int) -> None:
    """Kill the process at the n-th read from a checkpoint."""
    at_call(VerifiedReader, "readinto", read, die)


def hang_in_step(step: int) -> None:
    """Hang forever in a step."""
    at_call(Pipeline, "progress", step, lambda: time.sleep(10_000))


def full_disk(first: int, last: int) -> None:
    """Fail the saves `first` to `last` of this process with a full disk."""
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
    """Delay every written piece, as on a loaded file server."""
    wrote = ChecksumWriter.write

    def write(self: Any, data: Any) -> int:
        time.sleep(seconds)
        return wrote(self, data)

    ChecksumWriter.write = write  # type: ignore[method-assign]


def slow_steps(seconds: float) -> None:
    """Delay every step."""
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


if __name__ == "__main__":  # python -m injected FAULT [ARGUMENT OF THE TRAINER ...]
    inject(json.loads(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
