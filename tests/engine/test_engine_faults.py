"""Each stack by the real engine on clouds that fail: `up` again converges, and `destroy` leaves nothing."""

from __future__ import annotations

from engine_lifecycle import Story


def test_a_failed_create_ends_the_run_and_names_the_resource_and_the_cause(faults: Story) -> None:
    runs = {name: run for name, run in faults.runs.items() if name.startswith("create-")}
    assert len(runs) >= 8
    for name, run in runs.items():
        assert not run.ok, f"{name}: a resource was not made and the run said nothing"
        assert "InsufficientInstanceCapacity" in run.output, f"{name} hides the cause: {run.output}"
        assert "Traceback" not in run.output, f"{name} shows a stack trace: {run.output}"


def test_after_every_fault_the_state_knows_all_that_exists(faults: Story) -> None:
    assert faults.orphans, "no fault was looked at"
    assert {name: left for name, left in faults.orphans.items() if left} == {}, "these would stay on the bill"


def test_a_lost_connection_fails_the_run_and_not_the_next_one(faults: Story) -> None:
    assert not faults.runs["lost"].ok
    assert faults.runs["converged"].ok, faults.runs["converged"].output


def test_up_again_converges(faults: Story) -> None:
    assert faults.runs["converged"].ok, faults.runs["converged"].output
    assert faults.runs["preview"].ok, faults.runs["preview"].output
    assert faults.runs["preview"].changes == [], "something is still not as it should be"


def test_a_refused_deletion_is_told_and_the_next_destroy_leaves_nothing(faults: Story) -> None:
    refused = faults.runs["refused"]
    assert not refused.ok
    assert "the service is busy, try again" in refused.output
    assert faults.runs["destroy"].ok, faults.runs["destroy"].output
    assert faults.left == [], "storage.on_destroy is delete: nothing may stay"
    assert faults.state_after_destroy == []
