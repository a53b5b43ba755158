"""A process that is told to go saves what is worth it, goes within its time, and asks for a restart."""

from __future__ import annotations

import signal
import time

from machines import Machines

SLOW = {"kind": "slow_steps", "seconds": 0.05}
LONG = {"train.steps": 2000, "metrics.log_every": 1, "checkpoint.every_minutes": 0}


def test_a_signal_to_one_process_of_two_saves_the_step_on_which_both_agree(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 0}
    running = machines.start(2, {0: SLOW, 1: SLOW})
    running.wait_for("train", step=3)
    running.signal(1)
    assert running.wait(help_along=False) == [75, 75], running.log.read_text()[-3000:]
    (gone,) = (e for e in running.events() if e["event"] == "preempted")
    assert gone["saved_now"]
    assert gone["saved_step"] == gone["step"], "the save is of an older step: work is lost"
    resumed = machines.start(1, train__steps=gone["step"] + 1)
    assert resumed.wait() == [0]
    assert resumed.resumed_at() == gone["step"]


def test_a_save_that_is_young_enough_is_not_made_again(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 1000}
    running = machines.start(2, {0: SLOW, 1: SLOW})
    running.wait_for("train", step=3)
    running.signal(0)
    assert running.wait(help_along=False) == [75, 75]
    (gone,) = (e for e in running.events() if e["event"] == "preempted")
    assert not gone["saved_now"], "training has just begun, so there was nothing to lose"
    assert not (machines.folder / "a" / "checkpoints").exists()


def test_a_second_signal_stops_at_once(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 0, "fault.grace_seconds": 60}
    running = machines.start(1, {0: {"kind": "slow_writes", "seconds": 5.0}})
    running.wait_for("train", step=3)
    running.signal(0)
    time.sleep(1.5)  # signals within a second count as one: a launcher passes on what the kernel delivered already
    running.signal(0)
    assert running.wait(help_along=False) == [143]
    assert "a second SIGTERM: stopping at once" in running.log.read_text()


def test_a_process_is_gone_when_its_grace_is_over(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 0, "fault.grace_seconds": 1}
    running = machines.start(1, {0: {"kind": "slow_writes", "seconds": 5.0}})
    running.wait_for("train", step=3)
    running.signal(0)
    assert running.wait(help_along=False) == [75]
    assert "was not done 1 s after SIGTERM (fault.grace_seconds)" in running.log.read_text()
    following = machines.start(1, train__steps=4)
    assert following.wait() == [0]
    assert [e for e in following.events() if e["event"] == "resume"] == [], "it resumed from a save that was cut off"


def test_a_signal_while_a_process_beside_it_is_dead_ends_the_rest_within_seconds(machines: Machines) -> None:
    machines.changes = LONG | {"fault.grace_seconds": 60}
    running = machines.start(2, {0: {"kind": "hang_in_step", "step": 5}})
    running.wait_for("train", step=3)
    running.signal(1, signal.SIGKILL)
    while running.codes()[1] is None:
        time.sleep(0.01)
    began = time.monotonic()
    running.signal(0)
    assert running.wait(help_along=False) == [75, -9]
    assert time.monotonic() - began < 30, "a restart must not wait for a grace period that nobody needs"


def test_a_signal_in_the_middle_of_an_evaluation_does_not_wait_for_its_end(machines: Machines) -> None:
    long = {"train.eval_every": 4, "data.eval_samples": 48 * 4000, "train.eval_batch_size": 48}
    machines.changes = LONG | long | {"fault.save_if_older_seconds": 0, "fault.grace_seconds": 80}
    running = machines.start(2, {0: SLOW, 1: SLOW})
    running.wait_for("train", step=4)
    time.sleep(1)
    running.signal(1)
    assert running.wait(help_along=False) == [75, 75], running.log.read_text()[-3000:]
    events = running.events()
    assert not [e for e in events if e["event"] == "eval"], "a quality of a part of the samples"
    (gone,) = (e for e in events if e["event"] == "preempted")
    assert (gone["step"], gone["saved_step"]) == (4, 4)
    resumed = machines.start(2, train__steps=6, train__eval_every=0, data__eval_samples=96)
    assert resumed.wait() == [0, 0]
    assert resumed.resumed_at() == 4
