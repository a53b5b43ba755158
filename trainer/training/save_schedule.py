"""The decision when a run saves a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from trainer.config import TrainConfig
from trainer.runtime.vote import Ballot


class SaverState(Protocol):
    """What the schedule reads from the saver."""

    started_step: int
    """The step of the newest save that was started."""
    saved_step: int | None
    """The step of the newest complete save."""
    safe_since: float
    """When the saved state was copied, or training began, by time.monotonic."""
    retry_at: float | None
    """When to retry a failed save, by time.monotonic."""

    @property
    def pending(self) -> bool:
        """Whether a save was started and not yet waited for; the same on all processes."""

    @property
    def busy(self) -> bool:
        """Whether this process is still writing."""


class SaveSchedule:
    """Decides after which steps a run saves.

    A save is due by checkpoint.every_steps, by checkpoint.every_minutes, to retry a failed save, or after a spot notice
    that recommends one. All processes must save after the same step, although clocks and notices differ between them.
    So these reasons go into a ballot, and every decision depends only on the step and on the votes of all processes.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        is_main: bool,
        saver: SaverState,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoint, self._fault = config.checkpoint, config.fault
        self._total_steps, self._is_main = total_steps, is_main
        self._saver, self._now = saver, now
        self._requested = False  # on this process, and not yet voted
        self._due = False  # on all processes, and not yet started

    def request_save(self) -> None:
        """Request a save as soon as possible; called from any thread."""
        self._requested = True

    def ballot(self, step: int, stop: bool) -> Ballot:
        """Return the votes of this process after `step`."""
        requested, self._requested = self._requested, False
        return Ballot(
            step=step,
            stop=stop,
            save_first=self._is_main and self._seconds_unsaved() > self._fault.save_if_older_seconds,
            due=requested or (self._is_main and self._is_due_by_clock()),
            writing=self._saver.busy,
        )

    def is_written(self, votes: Ballot) -> bool:
        """Return whether the pending save has ended on all processes."""
        return self._saver.pending and votes.step >= self._saver.started_step and not votes.writing

    def record(self, votes: Ballot) -> None:
        """Remember a save that became due; votes from before the newest save started do not count."""
        self._due |= votes.due and votes.step > self._saver.started_step

    def should_start(self, step: int) -> bool:
        """Return whether to start a save after `step`; one that is due waits while another is pending."""
        every = self._checkpoint.every_steps
        self._due |= bool(every) and step % every == 0
        if not self._due or self._saver.pending or step >= self._total_steps:
            return False
        self._due = False
        return True

    def should_save_before_stop(self, step: int, votes: Ballot) -> bool:
        """Return whether to save before all processes stop after `step`."""
        return votes.save_first and self._saver.saved_step != step

    def _seconds_unsaved(self) -> float:
        """Return how many seconds of work a kill would lose."""
        return self._now() - self._saver.safe_since

    def _is_due_by_clock(self) -> bool:
        if self._saver.retry_at is not None:
            return self._now() >= self._saver.retry_at
        every = self._checkpoint.every_minutes
        return bool(every) and self._seconds_unsaved() >= 60 * every
