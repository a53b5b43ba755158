"""What the real engine does on AWS when the autoscaler, EKS or another program changes things behind its back."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated_autoscaler
from engine_lifecycle import POOLS, open_project
from engine_runs import Project, Run
from engine_world import World

GROUP, NAME = POOLS["aws"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path) -> tuple[World, Project]:
    """Return a new stack for all tests of this module: each continues from the state that the last one left."""
    with pytest.MonkeyPatch.context() as patch:
        # These tests choose the number of nodes themselves.
        patch.setattr(simulated_autoscaler, "start", lambda world: None)
        world, _, project = open_project(tmp_path_factory.mktemp("aws"), "aws", kubeconfig)
    project.set("gpu.nodes.min", 1)
    project.set("gpu.nodes.max", 4)
    return world, project


def assert_ok(run: Run) -> None:
    assert run.ok, run.output


def scaling(world: World) -> dict[str, int]:
    """Return the size of the GPU node group as EKS has it."""
    (group,) = [one for one in world.of_type(GROUP) if one.name == NAME]
    found: dict[str, int] = group.inputs["scalingConfig"]
    return found


def autoscale(world: World, num_nodes: int) -> None:
    """Set the number of nodes as the cluster-autoscaler does."""
    (group,) = [one for one in world.of_type(GROUP) if one.name == NAME]
    group.inputs = {**group.inputs, "scalingConfig": {**scaling(world), "desiredSize": num_nodes}}


def test_a_further_administrator_who_creates_the_cluster_is_refused_before_any_resource(
    opened: tuple[World, Project],
) -> None:
    world, project = opened
    project.set("cluster.admin_role_arns[0]", "arn:aws:iam::123456789012:user/someone")
    run = project.run("up")
    assert not run.ok
    assert "pulumi config rm --path 'cluster.admin_role_arns[0]'" in run.output
    assert not world.of_type("aws:eks/cluster:Cluster", "aws:kms/key:Key")
    # Further administrators take part in all tests below.
    project.set("cluster.admin_role_arns[0]", "arn:aws:iam::123456789012:role/ops")
    project.set("cluster.admin_role_arns[1]", "arn:aws:iam::123456789012:user/ann")


def test_a_group_without_capacity_is_never_reported_as_created_and_is_replaced(opened: tuple[World, Project]) -> None:
    world, project = opened
    world.faults.nodes_available = 0
    first = project.run("up", "live_stack")
    (urn,) = [one["urn"] for one in project.resources() if one["urn"].endswith(f"::{NAME}")]
    assert not first.ok
    assert f"python -m infra up --stack aws --replace '{urn}'" in first.output
    world.faults.nodes_available = None
    second = project.run("up")
    assert not second.ok, "the engine updates a failed group without changes, so this `up` reports a dead group as fine"
    assert "CREATE_FAILED and will never start a node. Fix the cause" in second.output
    assert f"--replace '{urn}'" in second.output
    project.pulumi("up", "--yes", "--skip-preview", "--stack", "aws", "--replace", urn)
    assert scaling(world) == {"minSize": 1, "desiredSize": 1, "maxSize": 4}


def test_an_administrator_removed_from_the_list_leaves_the_others_alone(opened: tuple[World, Project]) -> None:
    world, project = opened
    project.pulumi("config", "rm", "--stack", "aws", "--path", "cluster.admin_role_arns[0]")
    run = project.run("up")
    assert_ok(run)
    (entry,) = world.of_type("aws:eks/accessEntry:AccessEntry")
    assert entry.inputs["principalArn"].endswith("user/ann")
    assert not run.of_op("create-replacement"), "EKS refuses a second entry for a principal"


def test_a_raised_minimum_starts_the_missing_nodes(opened: tuple[World, Project]) -> None:
    world, project = opened
    project.set("gpu.nodes.min", 2)
    assert_ok(project.run("up"))
    assert scaling(world) == {"minSize": 2, "desiredSize": 2, "maxSize": 4}


def test_changed_bounds_leave_the_running_nodes_alone(opened: tuple[World, Project]) -> None:
    world, project = opened
    autoscale(world, 3)
    project.set("gpu.nodes.min", 1)
    project.set("gpu.nodes.max", 6)
    assert_ok(project.run("up"))
    assert scaling(world) == {"minSize": 1, "desiredSize": 3, "maxSize": 6}, "`up` stopped nodes of a running job"


def test_the_autoscaler_causes_no_change_in_the_next_up(opened: tuple[World, Project]) -> None:
    world, project = opened
    autoscale(world, 5)
    run = project.run("up")
    assert_ok(run)
    assert run.changes == []
    assert scaling(world)["desiredSize"] == 5


def test_a_maximum_below_the_running_nodes_is_refused_before_any_change(opened: tuple[World, Project]) -> None:
    world, project = opened
    project.set("gpu.nodes.max", 4)
    run = project.run("up")
    assert not run.ok
    assert "gpu.nodes.max is lower than the number of running GPU nodes: got 4; allowed: 5 or more" in run.output
    assert run.changes == []
    assert scaling(world)["desiredSize"] == 5


CLUSTER, ADDON, LOGS = "aws:eks/cluster:Cluster", "aws:eks/addon:Addon", "aws:cloudwatch/logGroup:LogGroup"


def test_a_downgrade_is_refused_before_any_change(opened: tuple[World, Project]) -> None:
    _, project = opened
    project.set("gpu.nodes.max", 6)
    project.set("cluster.kubernetes_version", "1.34")
    run = project.run("up")
    assert not run.ok
    assert "EKS cannot downgrade a cluster: got cluster.kubernetes_version 1.34, running 1.35" in run.output
    assert run.changes == []


def test_an_upgrade_moves_the_control_plane_then_addons_then_nodes(opened: tuple[World, Project]) -> None:
    world, project = opened
    project.set("cluster.kubernetes_version", "1.36")
    before = len(world.log)
    run = project.run("up")
    assert_ok(run)
    assert not run.of_op("create-replacement", "replace", "delete-replaced")
    assert {one.inputs["addonVersion"] for one in world.of_type(ADDON)} == {"v1.36.0-eksbuild.1"}, (
        "an add-on without a version keeps the one of its creation"
    )
    assert {one.inputs["version"] for one in world.of_type(GROUP, CLUSTER)} == {"1.36"}
    order = [name for verb, _, name in world.log[before:] if verb == "update"]
    plane, cni, nodes = "aws-cluster-eks-eksCluster", "aws-cluster-vpc-cni", "aws-cluster-system-nodes"
    assert order.index(plane) < order.index(cni) < order.index(nodes) < order.index(NAME)
    assert scaling(world)["desiredSize"] == 5, "an upgrade must not change the number of nodes"
    assert project.run("up").changes == []


def test_a_destroyed_stack_comes_up_again_under_another_cluster_name(opened: tuple[World, Project]) -> None:
    world, project = opened
    (old,) = [one.id for one in world.of_type(CLUSTER)]
    assert_ok(project.run("destroy"))
    world.clock.advance(5)
    assert [one.id for one in world.of_type(LOGS)] == [f"/aws/eks/{old}/cluster"], "EKS writes its last lines of log"
    assert_ok(project.run("up"))
    (new,) = [one.id for one in world.of_type(CLUSTER)]
    assert new != old
