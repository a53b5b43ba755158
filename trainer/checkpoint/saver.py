"""Saves in the background: the step waits for a copy of the state alone, one save is under way at a time, and one that
fails is tried again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainer.checkpoint.manager import Checkpointer, Progress, SaveFailedError
from trainer.checkpoint.snapshot import Snapshot
from trainer.config import CheckpointConfig
from trainer.errors import UserError
from trainer.runtime.vote import new_gloo_group

# Gloo reports a process that died at once; this is for one that writes slowly while the others wait for it.
_SLOWEST_SAVE = timedelta(hours=2)
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 60.0, 600.0
_FINAL_PAUSE_SECONDS, _LONGEST_FINAL_PAUSE_SECONDS = 0.5, 30.0

_log = logging.getLogger("trainer.checkpoint")
Report = Callable[..., None]


@dataclass
class _Flight:
    """One save under way."""

    progress: Progress
    began: float
    blocked_seconds: float
    seconds: float = 0.0
    thread: threading.Thread | None = None
    error: BaseException | None = None


class Saver:
    """Collective, except for `busy`. Reports events `checkpoint` and `checkpoint_failed`."""

    def __init__(self, checkpointer: Checkpointer, config: CheckpointConfig, report: Report) -> None:
        self._checkpointer, self._config, self._report = checkpointer, config, report
        self._group = new_gloo_group(_SLOWEST_SAVE)
        self._snapshot = Snapshot()
        self._flight: _Flight | None = None
        self._failures = 0
        self.retry_at: float | None = None  # when to retry a failed save, by time.monotonic
        self.safe_since = time.monotonic()  # when the saved state was copied, or training began
        self._warned = False
        self.saved_step: int | None = None
        self.started_step = -1

    @property
    def busy(self) -> bool:
        """Whether this process still writes."""
        return self._flight is not None and self._flight.thread is not None and self._flight.thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether a save was started whose outcome nobody has asked for; the same on all processes."""
        return self._flight is not None

    def reserve(self) -> None:
        """Make the memory for copies in the background, where saves are to be expected."""
        if self._config.asynchronous and (self._config.every_steps or self._config.every_minutes):
            state = self._checkpointer.state()
            threading.Thread(target=self._reserve, args=(state,), daemon=True).start()

    def _reserve(self, state: dict[str, Any]) -> None:
        try:
            self._snapshot.reserve(state)
        except (MemoryError, RuntimeError):
            return  # the first save finds the same, and tells it

    def start(self, progress: Progress) -> None:
        """Save the state as it is now; returns once it is copied (or written, without checkpoint.asynchronous)."""
        assert self._flight is None, "one save at a time"
        began = time.monotonic()
        self.started_step = progress.step
        state = self._checkpointer.state()
        copied = self._copied(state) if self._config.asynchronous else None
        flight = self._flight = _Flight(progress, began, time.monotonic() - began)
        if copied is not None:
            flight.thread = threading.Thread(target=self._write, args=(flight, copied), name="checkpoint", daemon=True)
            flight.thread.start()
            return
        self._write(flight, state)
        flight.blocked_seconds = time.monotonic() - began
        if not self._config.asynchronous:
            self.wait()

    def _copied(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """The state in memory of its own; None where this process has too little, which then writes at once while the
        others go on in the background, and wait for it at their next step."""
        try:
            return self._snapshot.take(state)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise the latter
            if not self._warned:
                _log.warning(
                    "too little memory for a copy of the state (%s), so saves block training; give the process more "
                    "memory, or set --checkpoint.asynchronous false",
                    " ".join(str(error).split())[:200],
                )
            self._warned = True
            return None

    def wait(self) -> None:
        """Wait for the save under way and report it; raises UserError after checkpoint.max_failures in a row."""
        flight = self._flight
        if flight is None:
            return
        if flight.thread is not None:
            flight.thread.join()
        self._flight = None
        if flight.error is None:
            self._succeeded(flight)
        elif isinstance(flight.error, SaveFailedError):
            self._failed(flight, flight.error)
        else:
            raise flight.error

    def finish(self, progress: Progress) -> None:
        """Have `progress` saved, whatever is under way; tries up to checkpoint.max_failures times in a row."""
        self.wait()
        while self.saved_step != progress.step:
            if self._failures:
                time.sleep(min(_FINAL_PAUSE_SECONDS * 2**self._failures, _LONGEST_FINAL_PAUSE_SECONDS))
            self.start(progress)
            self.wait()

    def wait_briefly(self, seconds: float) -> None:
        """After an error elsewhere: let a save that is nearly through finish, for at most `seconds`."""
        if self._flight is not None and self._flight.thread is not None:
            self._flight.thread.join(seconds)

    def mark_saved(self, step: int) -> None:
        """The state is that of a checkpoint."""
        self.saved_step = step

    def _write(self, flight: _Flight, state: dict[str, Any]) -> None:
        try:
            self._checkpointer.write(flight.progress, state, self._group)
        except BaseException as error:  # belongs to the main thread
            flight.error = error
        flight.seconds = time.monotonic() - flight.began

    def _succeeded(self, flight: _Flight) -> None:
        self._failures, self.retry_at, self.safe_since = 0, None, flight.began
        self.saved_step = flight.progress.step
        self._report(
            "checkpoint",
            step=flight.progress.step,
            path=self._checkpointer.location(flight.progress.step),
            seconds=round(flight.seconds, 3),
            blocked_seconds=round(flight.blocked_seconds, 3),
        )

    def _failed(self, flight: _Flight, error: SaveFailedError) -> None:
        self._failures += 1
        limit = self._config.max_failures
        if self._failures >= limit:
            raise UserError(
                f"{error}; {self._failures} saves in a row have failed (checkpoint.max_failures {limit}), so this run "
                f"would lose its work; the same command resumes from the last complete checkpoint once that is mended"
            )
        pause = min(_FIRST_RETRY_SECONDS * 2 ** (self._failures - 1), _LONGEST_RETRY_SECONDS)
        self.retry_at = time.monotonic() + pause
        self._report(
            "checkpoint_failed",
            step=flight.progress.step,
            error=str(error),
            failures=self._failures,
            fatal_at=limit,
            next_try="with the next save that is due, at the latest after "
            f"{pause:.0f} s; training goes on, the checkpoints before it are untouched",
        )
