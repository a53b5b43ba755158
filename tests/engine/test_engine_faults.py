"""Each stack with the real engine and failing clouds: a second `up` converges, `destroy` leaves nothing."""

from __future__ import annotations

from engine_lifecycle import Lifecycle


def test_a_failed_create_ends_the_run_and_names_the_resource_and_the_cause(faults: Lifecycle) -> None:
    runs = {name: run for name, run in faults.runs.items() if name.startswith("create-")}
    assert len(runs) >= 8
    for name, run in runs.items():
        assert not run.ok, f"{name}: a create failed but the run succeeded"
        assert "InsufficientInstanceCapacity" in run.output, f"{name} hides the cause: {run.output}"
        assert "Traceback" not in run.output, f"{name} shows a stack trace: {run.output}"


def test_after_every_fault_the_state_contains_everything_that_exists(faults: Lifecycle) -> None:
    assert faults.orphans, "no fault was checked"
    assert {name: left for name, left in faults.orphans.items() if left} == {}, "these resources would still cost money"


def test_a_lost_connection_fails_only_its_own_run(faults: Lifecycle) -> None:
    assert not faults.runs["lost"].ok
    assert faults.runs["converged"].ok, faults.runs["converged"].output


def test_the_next_up_converges(faults: Lifecycle) -> None:
    assert faults.runs["converged"].ok, faults.runs["converged"].output
    assert faults.runs["preview"].ok, faults.runs["preview"].output
    assert faults.runs["preview"].changes == [], "the stack has not converged"


def test_a_refused_deletion_is_reported_and_the_next_destroy_leaves_nothing(faults: Lifecycle) -> None:
    refused = faults.runs["refused"]
    assert not refused.ok
    assert "the service is busy, try again" in refused.output
    assert faults.runs["destroy"].ok, faults.runs["destroy"].output
    # EKS itself creates the log group of a deleted cluster again; `destroy` ends by naming it.
    left = [resource for resource in faults.left_again if not resource[1].startswith("/aws/eks/")]
    assert left == [], "storage.on_destroy is delete: nothing may remain"
    assert faults.state_after_destroy == []
