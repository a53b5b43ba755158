"""SIGTERM: a process saves if needed, exits within its grace period, and requests a restart."""

from __future__ import annotations

import signal
import time

from machines import Machines

SLOW = {"kind": "slow_steps", "seconds": 0.05}
LONG = {"train.steps": 2000, "metrics.log_every": 1, "checkpoint.every_minutes": 0}


def test_a_signal_to_one_of_two_processes_saves_the_step_on_which_both_agree(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 0}
    running = machines.start(2, {0: SLOW, 1: SLOW})
    running.wait_for("train", step=3)
    running.signal(1)
    assert running.wait(help_along=False) == [75, 75], running.log.read_text()[-3000:]
    (preempted,) = (e for e in running.events() if e["event"] == "preempted")
    assert preempted["saved_now"]
    assert preempted["saved_step"] == preempted["step"], "the save is of an older step: work is lost"
    resumed = machines.start(1, train__steps=preempted["step"] + 1)
    assert resumed.wait() == [0]
    assert resumed.resumed_at() == preempted["step"]


def test_a_recent_save_is_not_repeated_before_a_stop(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 1000}
    running = machines.start(2, {0: SLOW, 1: SLOW})
    running.wait_for("train", step=3)
    running.signal(0)
    assert running.wait(help_along=False) == [75, 75]
    (preempted,) = (e for e in running.events() if e["event"] == "preempted")
    assert not preempted["saved_now"], "training has just begun, so there was nothing to lose"
    assert not (machines.folder / "a" / "checkpoints").exists()


def test_a_second_signal_ends_the_process_at_once(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 0, "fault.grace_seconds": 60}
    running = machines.start(1, {0: {"kind": "slow_writes", "seconds": 5.0}})
    running.wait_for("train", step=3)
    running.signal(0)
    time.sleep(
        1.5
    )  # signals within a second count as one, because a launcher forwards what the kernel already delivered
    running.signal(0)
    assert running.wait(help_along=False) == [143]
    assert "a second SIGTERM: stopping at once" in running.log.read_text()


def test_a_process_exits_when_its_grace_period_ends(machines: Machines) -> None:
    machines.changes = LONG | {"fault.save_if_older_seconds": 0, "fault.grace_seconds": 1}
    running = machines.start(1, {0: {"kind": "slow_writes", "seconds": 5.0}})
    running.wait_for("train", step=3)
    running.signal(0)
    assert running.wait(help_along=False) == [75]
    assert "was not done 1 s after SIGTERM (fault.grace_seconds)" in running.log.read_text()
    following = machines.start(1, train__steps=4)
    assert following.wait() == [0]
    assert [e for e in following.events() if e["event"] == "resume"] == [], "it resumed from an incomplete save"


def test_a_signal_after_the_death_of_a_sibling_ends_the_process_within_seconds(machines: Machines) -> None:
    machines.changes = LONG | {"fault.grace_seconds": 60}
    running = machines.start(2, {0: {"kind": "hang_in_step", "step": 5}})
    running.wait_for("train", step=3)
    running.signal(1, signal.SIGKILL)
    while running.codes()[1] is None:
        time.sleep(0.01)
    began = time.monotonic()
    running.signal(0)
    assert running.wait(help_along=False) == [75, -9]
    assert time.monotonic() - began < 30, "a restart must not wait for a grace period without use"


def test_a_signal_during_an_evaluation_interrupts_it(machines: Machines) -> None:
    long = {"train.eval_every": 4, "data.eval_samples": 48 * 4000, "train.eval_batch_size": 48}
    machines.changes = LONG | long | {"fault.save_if_older_seconds": 0, "fault.grace_seconds": 80}
    running = machines.start(2, {0: SLOW, 1: SLOW})
    running.wait_for("train", step=4)
    time.sleep(1)
    running.signal(1)
    assert running.wait(help_along=False) == [75, 75], running.log.read_text()[-3000:]
    events = running.events()
    assert not [e for e in events if e["event"] == "eval"], "it reported the quality of some samples only"
    (preempted,) = (e for e in events if e["event"] == "preempted")
    assert (preempted["step"], preempted["saved_step"]) == (4, 4)
    resumed = machines.start(2, train__steps=6, train__eval_every=0, data__eval_samples=96)
    assert resumed.wait() == [0, 0]
    assert resumed.resumed_at() == 4
