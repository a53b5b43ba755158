"""Tests of the rules that concern several clouds: autoscaler, drains, generated names."""

from __future__ import annotations

from typing import Any

import engine_clouds
import pytest
import simulated_autoscaler
from engine_world import Refused, Resource, World
from simulated_drains import DRAINS, with_drains
from simulated_jobs import finish_jobs

GROUP, AGENTS, POOL = (
    "aws:eks/nodeGroup:NodeGroup",
    "azure-native:containerservice:AgentPool",
    "gcp:container/nodePool:NodePool",
)
JOB, BUDGET = "kubernetes:kubeflow.org/v1:PyTorchJob", "kubernetes:policy/v1:PodDisruptionBudget"

INPUTS: dict[str, dict[str, Any]] = {
    GROUP: {"scalingConfig": {"minSize": 0, "desiredSize": 0, "maxSize": 2}, "version": "1.34"},
    AGENTS: {"count": 0, "minCount": 0, "maxCount": 2, "orchestratorVersion": "1.34"},
    POOL: {"autoscaling": {"totalMinNodeCount": 0, "totalMaxNodeCount": 2}, "version": "1.34"},
}
VERSION = {GROUP: "version", AGENTS: "orchestratorVersion", POOL: "version"}


@pytest.fixture
def world() -> World:
    """Return a world with an autoscaler that runs."""
    made = World(engine_clouds.rules_of)
    simulated_autoscaler.start(made)
    made.add("kubernetes:helm.sh/v3:Release", "autoscaler", {"chart": "cluster-autoscaler"})
    return made


def add_job(world: World, kind: str = JOB, nodes: int = 2, *devices: str) -> Resource:
    """Add a training job with one pod per node."""
    limits = dict.fromkeys(devices or ("nvidia.com/gpu",), "8")
    template = {"spec": {"containers": [{"resources": {"limits": limits}}]}}
    spec: dict[str, Any] = {"pytorchReplicaSpecs": {"Worker": {"replicas": nodes, "template": template}}}
    if kind != JOB:
        spec = {"parallelism": nodes, "template": template}
    return world.add(kind, "training/run", {"metadata": {"name": "run", "namespace": "training"}, "spec": spec})


@pytest.mark.parametrize("kind", sorted(INPUTS))
def test_the_autoscaler_starts_nodes_for_a_job_and_takes_idle_nodes_back_after_ten_minutes(
    world: World, kind: str
) -> None:
    pool = world.add(kind, "stack-gpu", INPUTS[kind])
    world.clock.advance(30)
    assert simulated_autoscaler.size(pool) == 0
    add_job(world)
    world.clock.advance(2)
    assert simulated_autoscaler.size(pool) == 2
    world.clock.advance(60)
    assert simulated_autoscaler.size(pool) == 2, "nodes of a running job were taken away"
    finish_jobs(world)
    world.clock.advance(9)
    assert simulated_autoscaler.size(pool) == 2
    world.clock.advance(3)
    assert simulated_autoscaler.size(pool) == 0


def test_on_eks_no_autoscaler_runs_before_its_chart_is_installed(world: World) -> None:
    world.resources.clear()
    pool = world.add(GROUP, "stack-gpu", INPUTS[GROUP])
    add_job(world)
    world.clock.advance(30)
    assert simulated_autoscaler.size(pool) == 0


def test_without_capacity_pods_wait(world: World) -> None:
    pool = world.add(GROUP, "stack-gpu", INPUTS[GROUP])
    add_job(world)
    world.faults.nodes_available = 1
    world.clock.advance(5)
    assert simulated_autoscaler.size(pool) == 1


@pytest.mark.parametrize(
    ("kind", "device", "declared"),
    [
        (AGENTS, "rdma/ib", {"tags": {"k8s.io_cluster-autoscaler_node-template_resources_rdma_ib": "8"}}),
        (GROUP, "vpc.amazonaws.com/efa", {}),
    ],
)
def test_an_empty_pool_is_scaled_up_only_for_resources_that_its_tags_declare(
    world: World, kind: str, device: str, declared: dict[str, Any]
) -> None:
    pool = world.add(kind, "stack-gpu", INPUTS[kind])
    pool.computed["resources"] = [{"autoscalingGroups": [{"name": "asg"}]}]
    add_job(world, JOB, 2, "nvidia.com/gpu", device)
    world.clock.advance(5)
    assert simulated_autoscaler.size(pool) == 0
    assert simulated_autoscaler.pending_reasons(world) == [
        f"pod didn't trigger scale-up: 1 Insufficient {device} in stack-gpu"
    ]
    tag = {"key": f"k8s.io/cluster-autoscaler/node-template/resources/{device}", "value": "4"}
    world.add("aws:autoscaling/tag:Tag", "tag", {"autoscalingGroupName": "asg", "tag": tag})
    pool.inputs = {**pool.inputs, **declared}
    world.clock.advance(2)
    assert simulated_autoscaler.size(pool) == 2


@pytest.mark.parametrize("kind", sorted(INPUTS))
@pytest.mark.parametrize(
    ("job", "budget", "blocks"),
    [
        (JOB, {"minAvailable": 2}, True),
        (JOB, {"minAvailable": 1}, False),
        (JOB, {"maxUnavailable": 1}, False),
        (JOB, {"maxUnavailable": 0}, True),
        ("kubernetes:batch/v1:Job", {"maxUnavailable": 1}, True),
        ("kubernetes:batch/v1:Job", {"minAvailable": 0}, False),
    ],
)
def test_an_upgrade_drains_nodes_unless_a_budget_refuses(
    world: World, kind: str, job: str, budget: dict[str, Any], blocks: bool
) -> None:
    rules = with_drains(kind, engine_clouds.Rules())
    old = INPUTS[kind]
    pool = world.add(kind, "stack-gpu", {**old, VERSION[kind]: "1.35"})
    add_job(world, job)
    simulated_autoscaler.resize(pool, 2)
    world.add(BUDGET, "training/run", {"metadata": {"name": "run", "namespace": "training"}, "spec": budget})
    error = DRAINS[kind].error
    if blocks and error:
        with pytest.raises(Refused, match=error.partition(":")[0]):
            rules.on_updated(world, pool, old)
    else:
        rules.on_updated(world, pool, old)
        assert world.log[-1][0] == ("delete-pods" if blocks else "evict")
    assert world.now >= (DRAINS[kind].minutes if blocks else 0)


def test_an_upgrade_of_a_pool_without_a_running_job_drains_nothing(world: World) -> None:
    pool = world.add(AGENTS, "stack-gpu", {**INPUTS[AGENTS], "orchestratorVersion": "1.35"})
    with_drains(AGENTS, engine_clouds.Rules()).on_updated(world, pool, INPUTS[AGENTS])
    assert world.log == []


def test_a_generated_name_must_fit(world: World) -> None:
    policy = {"assumeRolePolicy": "{}"}
    assert world.check("aws:iam/role:Role", policy, "a" * 56) == []
    ((path, reason),) = world.check("aws:iam/role:Role", policy, "a" * 57)
    assert path == "name"
    assert "plus 7 random chars is longer than maximum length 64" in reason
    assert world.check("aws:iam/role:Role", {**policy, "name": "given"}, "a" * 57) == []
