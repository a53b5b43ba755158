"""A stack's life in the order in which a user meets it, beyond the tests of test_engine_lifecycle.py."""

from __future__ import annotations

import engine_lifecycle
import pytest
from engine_lifecycle import POOLS, Lifecycle

_CLOUDS = sorted(POOLS)


def test_doctor_names_what_a_laptop_lacks_and_how_to_fix_it(lifecycle: Lifecycle, stack: str) -> None:
    run = lifecycle.runs["doctor"]
    assert "Traceback" not in run.output
    assert "to fix" in run.output
    if stack in POOLS:
        assert "network.api_access" in run.output
        assert "pulumi config set --stack" in run.output


@pytest.mark.parametrize("stack", _CLOUDS, indirect=True)
def test_gpu_nodes_follow_the_pods_of_the_job(lifecycle: Lifecycle) -> None:
    assert lifecycle.nodes["up"] == 0, "GPU nodes cost money before the first pod exists"
    assert lifecycle.nodes["pending"] == 2
    assert lifecycle.nodes["again"] == 2, "`up` took nodes from a running job"
    assert lifecycle.nodes["idle"] == 0
    assert lifecycle.nodes["resumed"] == 2


@pytest.mark.parametrize("stack", _CLOUDS, indirect=True)
def test_a_new_minor_version_replaces_nothing_and_lets_the_job_save_before_its_nodes_go(
    lifecycle: Lifecycle, stack: str
) -> None:
    run = lifecycle.runs["upgrade"]
    assert run.ok, run.output
    assert not [step for step in run.changes if step.op not in ("update",)], "an upgrade replaces a part of the stack"
    assert not [entry for entry in lifecycle.logs["upgrade"] if entry[0] == "delete-pods"]
    assert f"{stack}-training-job" in lifecycle.jobs_after_upgrade


@pytest.mark.parametrize("stack", _CLOUDS, indirect=True)
def test_a_pool_without_capacity_is_repaired_by_the_command_that_the_failed_up_printed(
    lifecycle: Lifecycle, stack: str
) -> None:
    failed, recovered = lifecycle.runs["no capacity"], lifecycle.runs["recovery"]
    assert not failed.ok
    assert "Traceback" not in failed.output
    assert recovered.ok, recovered.output
    assert lifecycle.nodes["recovery"] >= 1, f"the GPU pool has no node after: {failed.output}"


def test_the_second_life_leaves_what_the_first_one_kept(lifecycle: Lifecycle) -> None:
    run = lifecycle.runs["destroy again"]
    assert run.ok, run.output
    # EKS recreates the log group of a deleted cluster, minutes after the end of `destroy`.
    first, second = (
        [resource for resource in found if not resource[1].startswith("/aws/eks/")]
        for found in (lifecycle.left, lifecycle.left_again)
    )
    assert second == first
    assert lifecycle.state_after_destroy == []


def test_every_phase_has_resources_and_simulated_minutes(lifecycle: Lifecycle, stack: str) -> None:
    phases = {phase.name: phase for phase in lifecycle.phases}
    assert phases["up"].num_resources > 0
    assert (phases["up"].minutes > 10) == (stack in engine_lifecycle.POOLS), "a cluster takes longer than that"
