"""Tests of hanging steps: the job exits with the code for a restart and prints the stack of the hanging process."""

from __future__ import annotations

import signal

from machines import Machines

CHANGES = {"train.steps": 2000, "metrics.log_every": 1, "fault.step_timeout_seconds": 2, "checkpoint.every_minutes": 0}


def test_a_hanging_process_ends_all_and_its_stack_is_printed(machines: Machines) -> None:
    machines.changes = CHANGES
    ended = machines.start(2, {1: {"kind": "hang_in_step", "step": 20}})
    assert ended.wait(help_along=False) == [75, 75], ended.log.read_text()[-4000:]
    log = ended.log.read_text()
    assert "rank 1 has been in step 20 for" in log
    assert "(fault.step_timeout_seconds 2)" in log
    assert "injected.py" in log, "the stack must show where the process hangs"
    assert "rank 0 waits in step 20 for another process" in log
    assert log.count("innermost call last") <= 2, "only the hanging process may print its stack"


def test_a_frozen_process_ends_the_others(machines: Machines) -> None:
    machines.changes = CHANGES
    frozen = machines.start(2)
    frozen.wait_for("train", step=20)
    frozen.signal(1, signal.SIGSTOP)
    while frozen.codes()[0] is None:
        pass
    frozen.signal(1, signal.SIGKILL)  # as torchrun does with a process that ignores SIGTERM
    assert frozen.wait(help_along=False) == [75, -9]
    assert "waits in step" in frozen.log.read_text()


def test_a_slow_save_is_not_a_hanging_step(machines: Machines) -> None:
    machines.changes = CHANGES | {"train.steps": 12, "checkpoint.every_steps": 6, "checkpoint.asynchronous": False}
    slow = machines.start(1, {0: {"kind": "slow_writes", "seconds": 0.002}}, fault__step_timeout_seconds=1)
    assert slow.wait() == [0], slow.log.read_text()[-3000:]
    saves = [e["seconds"] for e in slow.events() if e["event"] == "checkpoint"]
    assert min(saves) > 1, "the saves must be slower than the step timeout"
