"""The save schedule: saves by steps and by the clock, after a failure or a spot notice, and before a stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from small_jobs import tiny

from trainer.runtime.vote import Ballot
from trainer.training.save_schedule import SaveSchedule

TOTAL_STEPS = 10


@dataclass
class FakeSaver:
    """The facts that a saver keeps, set by the test."""

    started_step: int = -1
    saved_step: int | None = None
    safe_since: float = 0.0
    retry_at: float | None = None
    pending: bool = False
    busy: bool = False


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def schedule(
    saver: FakeSaver | None = None, clock: Clock | None = None, is_main: bool = True, **changes: Any
) -> SaveSchedule:
    """Return a schedule that saves by nothing unless `changes` set it; `__` stands for a dot."""
    options = {"checkpoint.every_minutes": 0} | {name.replace("__", "."): value for name, value in changes.items()}
    return SaveSchedule(tiny(options), TOTAL_STEPS, is_main, saver or FakeSaver(), clock or Clock())


def test_saves_start_after_every_n_steps_but_not_after_the_last() -> None:
    by_steps = schedule(checkpoint__every_steps=5)
    assert [step for step in range(1, TOTAL_STEPS + 1) if by_steps.should_start(step)] == [5]


def test_without_an_interval_no_save_starts() -> None:
    never = schedule()
    assert not any(never.should_start(step) for step in range(1, TOTAL_STEPS + 1))


def test_a_due_save_waits_for_the_pending_one() -> None:
    saver = FakeSaver(pending=True, started_step=2)
    by_steps = schedule(saver, checkpoint__every_steps=4)
    assert not by_steps.should_start(4)
    saver.pending = False
    assert by_steps.should_start(5), "the save of step 4 was forgotten"
    assert not by_steps.should_start(6), "one due save started twice"


def test_rank_0_votes_for_a_save_when_its_interval_has_passed() -> None:
    clock, saver = Clock(), FakeSaver()
    by_clock = schedule(saver, clock, checkpoint__every_minutes=2)
    clock.now = 119
    assert not by_clock.ballot(1, stop=False).due
    clock.now = 120
    assert by_clock.ballot(2, stop=False).due
    saver.safe_since = 100
    assert not by_clock.ballot(3, stop=False).due, "the interval starts with the newest save"


def test_clocks_of_other_ranks_do_not_vote() -> None:
    clock = Clock()
    other = schedule(clock=clock, is_main=False, checkpoint__every_minutes=2)
    clock.now = 1000
    ballot = other.ballot(1, stop=False)
    assert not ballot.due
    assert not ballot.save_first


@pytest.mark.parametrize("every_minutes", [0, 60])
def test_a_failed_save_is_due_at_its_retry_time_whatever_the_interval(every_minutes: int) -> None:
    clock, saver = Clock(), FakeSaver(retry_at=60)
    retried = schedule(saver, clock, checkpoint__every_minutes=every_minutes)
    clock.now = 59
    assert not retried.ballot(1, stop=False).due
    clock.now = 60
    assert retried.ballot(2, stop=False).due


def test_a_spot_notice_on_any_rank_votes_once_for_a_save() -> None:
    noticed = schedule(is_main=False)
    noticed.request_save()
    assert noticed.ballot(1, stop=False).due
    assert not noticed.ballot(2, stop=False).due


def test_votes_for_a_save_start_one_on_every_rank() -> None:
    other = schedule(is_main=False)
    other.record(Ballot(step=3, due=True))
    assert other.should_start(4)
    assert not other.should_start(5)


def test_votes_from_before_the_newest_save_do_not_start_another() -> None:
    saved = schedule(FakeSaver(started_step=4))
    saved.record(Ballot(step=4, due=True))
    assert not saved.should_start(5), "a vote is one step old: this one asked for the save of step 4"
    saved.record(Ballot(step=5, due=True))
    assert saved.should_start(6)


def test_votes_recorded_during_an_evaluation_are_kept_for_the_next_step() -> None:
    evaluating = schedule()
    evaluating.record(Ballot(step=3, due=True))
    evaluating.record(Ballot(step=3))
    assert evaluating.should_start(4)


@pytest.mark.parametrize(
    ("votes", "written"),
    [
        (Ballot(step=4), True),
        (Ballot(step=5), True),
        (Ballot(step=5, writing=True), False),
        (Ballot(step=3), False),
    ],
)
def test_a_pending_save_is_written_when_a_later_vote_shows_no_writer(votes: Ballot, written: bool) -> None:
    assert schedule(FakeSaver(pending=True, started_step=4)).is_written(votes) is written


def test_nothing_is_written_when_no_save_is_pending() -> None:
    assert not schedule(FakeSaver(started_step=4)).is_written(Ballot(step=9))


def test_a_process_that_still_writes_says_so_in_its_ballot() -> None:
    assert schedule(FakeSaver(pending=True, busy=True), is_main=False).ballot(1, stop=False).writing


def test_a_ballot_carries_the_step_and_the_stop_request() -> None:
    ballot = schedule().ballot(7, stop=True)
    assert (ballot.step, ballot.stop) == (7, True)


@pytest.mark.parametrize(("seconds", "save_first"), [(30, False), (31, True)])
def test_a_stop_saves_first_when_the_last_save_is_too_old(seconds: int, save_first: bool) -> None:
    clock = Clock()
    stopping = schedule(clock=clock, fault__save_if_older_seconds=30)
    clock.now = seconds
    votes = stopping.ballot(3, stop=True)
    assert votes.save_first is save_first
    assert stopping.should_save_before_stop(4, votes) is save_first


def test_a_stop_does_not_save_its_step_twice() -> None:
    assert not schedule(FakeSaver(saved_step=4)).should_save_before_stop(4, Ballot(step=3, save_first=True))
