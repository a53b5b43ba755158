"""A watchdog that ends a job when a step hangs, and prints the stack of the process that blocks the others."""

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
_POLLS_PER_LIMIT, _LONGEST_POLL_SECONDS = 10, 5.0
_LOCKED_SECONDS = 10.0  # beyond the limit, when this module's thread is blocked too
_BUSY_REPORT_SECONDS = 6.0  # longer than a poll, because other processes may notice one poll later
_INNERMOST_FRAMES = 5
_COLLECTIVES = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torchrec{os.sep}distributed{os.sep}")
_REPORTED_THREADS = ("MainThread", "trainer-data", "checkpoint")


class Watchdog:
    """Limits the time between two calls of `start_step`. Every process has one; it runs as a context manager.

    After the limit, a process that is not waiting for others prints its stack and reports so through `store`. The
    others wait up to 6 s for that report, and all exit with code 75. If a thread holds the GIL forever, faulthandler's
    C thread, which does not need it, prints the stack and ends the process.
    """

    def __init__(self, limit_seconds: float, rank: int, store: dist.Store | None) -> None:
        self._limit, self._rank, self._store = limit_seconds, rank, store
        self._closed = threading.Event()
        self._watched: tuple[int, float] | None = None  # step, deadline
        self._began = 0.0
        self._first = True

    def start_step(self, number: int) -> None:
        """Start the limit of step `number`."""
        self._began = time.monotonic()
        factor = _FIRST_STEP_FACTOR if self._first else 1
        self._first = False
        self._watched = (number, self._began + self._limit * factor)

    def pause(self) -> None:
        """Suspend the limit until the next step, for a save or the end of the run."""
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
        pause = min(self._limit / _POLLS_PER_LIMIT, _LONGEST_POLL_SECONDS)
        while not self._closed.wait(pause):
            watched = self._watched
            left = watched[1] - time.monotonic() if watched else self._limit * _FIRST_STEP_FACTOR
            faulthandler.dump_traceback_later(max(left, 0) + _LOCKED_SECONDS, exit=True)
            if watched is not None and time.monotonic() > watched[1]:
                self._end_process(watched[0])

    def _end_process(self, step: int) -> None:
        stacks = self._stacks()
        seconds = time.monotonic() - self._began
        if self._is_waiting():
            head = f"rank {self._rank} waits in step {step} for another process, for {seconds:.0f} s"
            if self._is_another_busy():
                text = f"{head}, which has printed its stack"
            else:
                text = f"{head}, and no process has reported where it is:\n{stacks}"
        else:
            text = (
                f"rank {self._rank} has been in step {step} for {seconds:.0f} s (fault.step_timeout_seconds "
                f"{self._limit:g}):\n{stacks}"
            )
        sys.stderr.write(f"{text}\nrank {self._rank} exits with code {EXIT_RESTART} for a restart\n")
        sys.stderr.flush()
        self._report_busy()
        os._exit(EXIT_RESTART)

    def _report_busy(self) -> None:
        """Tell the other processes that this one is not waiting for them."""
        if self._store is not None and not self._is_waiting():
            try:
                self._store.set("busy", str(self._rank))
            except dist.DistError:  # the host of the store has already exited
                return
            time.sleep(_BUSY_REPORT_SECONDS)  # the store may be in this process, and the others are about to read it

    def _is_another_busy(self) -> bool:
        if self._store is None:
            return False
        try:
            self._store.wait(["busy"], timedelta(seconds=_BUSY_REPORT_SECONDS))
        except dist.DistError:
            return False
        return True

    def _main_frame(self) -> FrameType | None:
        assert self._main is not None
        return sys._current_frames().get(self._main)

    def _is_waiting(self) -> bool:
        """Return whether the main thread is in a collective, by the files of its innermost frames."""
        frames = traceback.extract_stack(self._main_frame())[-_INNERMOST_FRAMES:]
        return any(part in frame.filename for frame in frames for part in _COLLECTIVES)

    def _stacks(self) -> str:
        frames = sys._current_frames()
        threads = [t for t in threading.enumerate() if t.name in _REPORTED_THREADS and t.ident in frames]
        texts = [
            f"thread {t.name} of rank {self._rank} (innermost call last):\n"
            + "".join(traceback.format_stack(frames[t.ident])).rstrip()
            for t in threads
            if t.ident is not None
        ]
        return "\n".join(texts)
