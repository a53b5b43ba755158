"""Save in the background: a step waits only for a copy of the state, one save runs at a time, failures are retried."""

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
from trainer.storage.retry import RetryPolicy

# How long processes wait for a slow writer; gloo reports a process that died at once.
_SAVE_TIMEOUT = timedelta(hours=2)
# Delays until the next save after a failed one: during training, and at the end of a run.
_RETRY = RetryPolicy(first_delay_seconds=60, max_delay_seconds=600, jitter=0)
_FINAL_RETRY = RetryPolicy(first_delay_seconds=1, max_delay_seconds=30, jitter=0)

_log = logging.getLogger("trainer.checkpoint")
Report = Callable[..., None]


@dataclass
class _RunningSave:
    """A save that was started and whose outcome is not reported yet."""

    progress: Progress
    began: float
    blocked_seconds: float
    seconds: float = 0.0
    thread: threading.Thread | None = None
    error: BaseException | None = None


class Saver:
    """Saves one run; reports the events `checkpoint` and `checkpoint_failed`.

    All processes call its methods together; `busy` is about this process only.
    """

    def __init__(self, checkpointer: Checkpointer, config: CheckpointConfig, report: Report) -> None:
        self._checkpointer, self._config, self._report = checkpointer, config, report
        self._group = new_gloo_group(_SAVE_TIMEOUT)
        self._snapshot = Snapshot()
        self._running: _RunningSave | None = None
        self._failures = 0
        self.retry_at: float | None = None  # when to retry a failed save, by time.monotonic
        self.safe_since = time.monotonic()  # when the saved state was copied, or training began
        self._warned = False
        self.saved_step: int | None = None
        self.started_step = -1

    @property
    def busy(self) -> bool:
        """Return whether this process is still writing."""
        return self._running is not None and self._running.thread is not None and self._running.thread.is_alive()

    @property
    def pending(self) -> bool:
        """Return whether a save was started and not yet waited for; the same on all processes."""
        return self._running is not None

    def reserve(self) -> None:
        """Allocate the memory for copies in a background thread, if this run saves during training."""
        if self._config.asynchronous and (self._config.every_steps or self._config.every_minutes):
            state = self._checkpointer.state()
            threading.Thread(target=self._reserve, args=(state,), daemon=True).start()

    def _reserve(self, state: dict[str, Any]) -> None:
        try:
            self._snapshot.reserve(state)
        except (MemoryError, RuntimeError):
            return  # the first save fails in the same way and logs it

    def start(self, progress: Progress) -> None:
        """Save the current state; return once it is copied (or written, without checkpoint.asynchronous)."""
        assert self._running is None, "one save at a time"
        began = time.monotonic()
        self.started_step = progress.step
        state = self._checkpointer.state()
        copied = self._copy(state) if self._config.asynchronous else None
        save = self._running = _RunningSave(progress, began, time.monotonic() - began)
        if copied is not None:
            save.thread = threading.Thread(target=self._write, args=(save, copied), name="checkpoint", daemon=True)
            save.thread.start()
            return
        self._write(save, state)
        save.blocked_seconds = time.monotonic() - began
        if not self._config.asynchronous:
            self.wait()

    def _copy(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return a copy of the state, or None if this process has too little memory.

        Without a copy it writes immediately. The others write in the background and wait for it at their next step.
        """
        try:
            return self._snapshot.take(state)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise the latter
            if not self._warned:
                _log.warning(
                    "too little memory for a copy of the state (%s), so saves block training. Fix: give the process "
                    "more memory, or set --checkpoint.asynchronous false",
                    " ".join(str(error).split())[:200],
                )
            self._warned = True
            return None

    def wait(self) -> None:
        """Wait for the running save and report it; raise UserError after checkpoint.max_failures in a row."""
        save = self._running
        if save is None:
            return
        if save.thread is not None:
            save.thread.join()
        self._running = None
        if save.error is None:
            self._report_success(save)
        elif isinstance(save.error, SaveFailedError):
            self._report_failure(save, save.error)
        else:
            raise save.error

    def finish(self, progress: Progress) -> None:
        """Save `progress` after the running save; try up to checkpoint.max_failures times in a row."""
        self.wait()
        while self.saved_step != progress.step:
            if self._failures:
                time.sleep(_FINAL_RETRY.delay_seconds(self._failures))
            self.start(progress)
            self.wait()

    def wait_briefly(self, seconds: float) -> None:
        """Give the running save at most `seconds` to finish, after an error elsewhere."""
        if self._running is not None and self._running.thread is not None:
            self._running.thread.join(seconds)

    def mark_saved(self, step: int) -> None:
        """Record that the state was loaded from the checkpoint of a step."""
        self.saved_step = step

    def _write(self, save: _RunningSave, state: dict[str, Any]) -> None:
        try:
            self._checkpointer.write(save.progress, state, self._group)
        except BaseException as error:  # raised by `wait` in the main thread
            save.error = error
        save.seconds = time.monotonic() - save.began

    def _report_success(self, save: _RunningSave) -> None:
        self._failures, self.retry_at, self.safe_since = 0, None, save.began
        self.saved_step = save.progress.step
        self._report(
            "checkpoint",
            step=save.progress.step,
            path=self._checkpointer.location(save.progress.step),
            seconds=round(save.seconds, 3),
            blocked_seconds=round(save.blocked_seconds, 3),
        )

    def _report_failure(self, save: _RunningSave, error: SaveFailedError) -> None:
        self._failures += 1
        limit = self._config.max_failures
        if self._failures >= limit:
            raise UserError(
                f"{error}; {self._failures} saves in a row have failed (checkpoint.max_failures {limit}), so the run "
                f"ends before it loses more work. Fix: solve that, then run the same command, which resumes from the "
                f"last complete checkpoint"
            )
        delay = _RETRY.delay_seconds(self._failures)
        self.retry_at = time.monotonic() + delay
        self._report(
            "checkpoint_failed",
            step=save.progress.step,
            error=str(error),
            failures=self._failures,
            fatal_at=limit,
            next_try=f"with the next save that is due, at the latest after {delay:.0f} s; training continues, and "
            f"older checkpoints are unchanged",
        )
