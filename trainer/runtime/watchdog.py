"""Ends a job in which a step hangs, with the stack of the process that holds up the others."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from types import FrameType, TracebackType

import torch.distributed as dist

from trainer.exit_codes import EXIT_RESTART

_FIRST_STEP_FACTOR = 5  # it also compiles kernels and fills the pipeline
_LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS = 10, 5.0
_LOCKED_SECONDS = 10.0  # beyond the limit: then this module's own thread is stuck too
_HEARD_SECONDS = 6.0  # longer than a look: others may find out a look later
_INNERMOST = 5
_COLLECTIVES = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torchrec{os.sep}distributed{os.sep}")
_TELLING_THREADS = ("MainThread", "trainer-data", "checkpoint")


class Watchdog:
    """Watches the time between two calls of `step`. Every process has one; as a context manager it runs.

    When time is up, a process that is not waiting for others says so with its stack through `store`, the others give it
    6 s to do that, and all end with exit code 75. Should a thread hold Python's lock for ever, faulthandler's C
    thread, which needs none, writes the stack and ends the process.
    """

    def __init__(self, limit_seconds: float, rank: int, store: dist.Store | None) -> None:
        self._limit, self._rank, self._store = limit_seconds, rank, store
        self._closed = threading.Event()
        self._watched: tuple[int, float] | None = None  # step, deadline
        self._began = 0.0
        self._first = True

    def step(self, number: int) -> None:
        """A step begins; the one before it is over."""
        self._began = time.monotonic()
        factor = _FIRST_STEP_FACTOR if self._first else 1
        self._first = False
        self._watched = (number, self._began + self._limit * factor)

    def rest(self) -> None:
        """What follows is no step: a save, an evaluation, the end."""
        self._watched = None

    def __enter__(self) -> Watchdog:
        if self._limit:
            self._main = threading.main_thread().ident
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._limit:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        pause = min(self._limit / _LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS)
        while not self._closed.wait(pause):
            watched = self._watched
            left = watched[1] - time.monotonic() if watched else self._limit * _FIRST_STEP_FACTOR
            faulthandler.dump_traceback_later(max(left, 0) + _LOCKED_SECONDS, exit=True)
            if watched is not None and time.monotonic() > watched[1]:
                self._end(watched[0])

    def _end(self, step: int) -> None:
        stacks = self._stacks()
        seconds = time.monotonic() - self._began
        if self._is_waiting():
            told = self._another_is_busy()
            head = f"rank {self._rank} waits in step {step} for another process since {seconds:.0f} s"
            text = f"{head}, which has said where it is" if told else f"{head}, and none says where it is:\n{stacks}"
        else:
            text = (
                f"rank {self._rank} has been in step {step} for {seconds:.0f} s (fault.step_timeout_seconds "
                f"{self._limit:g}):\n{stacks}"
            )
        sys.stderr.write(f"{text}\nrank {self._rank} ends with exit code {EXIT_RESTART}, for a restart\n")
        sys.stderr.flush()
        self._say_busy()
        os._exit(EXIT_RESTART)

    def _say_busy(self) -> None:
        if self._store is not None and not self._is_waiting():
            try:
                self._store.set("busy", str(self._rank))
            except dist.DistError:  # its host has ended already
                return
            time.sleep(_HEARD_SECONDS)  # the store may live in this process, and the others are about to ask it

    def _another_is_busy(self) -> bool:
        if self._store is None:
            return False
        try:
            self._store.wait(["busy"], timedelta(seconds=_HEARD_SECONDS))
        except dist.DistError:
            return False
        return True

    def _main_frame(self) -> FrameType | None:
        assert self._main is not None
        return sys._current_frames().get(self._main)

    def _is_waiting(self) -> bool:
        """Whether the main thread sits in a collective, by the files of its innermost frames."""
        frames = traceback.extract_stack(self._main_frame())[-_INNERMOST:]
        return any(part in frame.filename for frame in frames for part in _COLLECTIVES)

    def _stacks(self) -> str:
        frames = sys._current_frames()
        told = [t for t in threading.enumerate() if t.name in _TELLING_THREADS and t.ident in frames]
        texts = [
            f"thread {t.name} of rank {self._rank} (innermost call last):\n"
            + "".join(traceback.format_stack(frames[t.ident])).rstrip()
            for t in told
            if t.ident is not None
        ]
        return "\n".join(texts)
