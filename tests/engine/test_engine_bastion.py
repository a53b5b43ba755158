"""`network.api_access: bastion` under the real engine, from a laptop that no API server admits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_lifecycle import open_project
from engine_runs import Project, Run
from engine_world import World
from tunnel_ends import certificate, serve_api, write_programs

HOST = "aws-cluster-eks.gr7.us-west-2.eks.amazonaws.com"
MACHINE = "aws:ec2/instance:Instance"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path) -> Iterator[tuple[World, Project]]:
    """Yield a new stack for all tests of this module, with an API server behind a fake Session Manager."""
    folder = tmp_path_factory.mktemp("bastion")
    pem, authority = certificate(folder, HOST)
    world, _, project = open_project(folder, "aws", kubeconfig, authorized=False)
    world.authority = authority
    project.set("network.api_access", "bastion")
    path = f"{write_programs(folder)}{os.pathsep}{project.environment['PATH']}"
    with serve_api(pem) as port:
        project.environment |= {"PATH": path, "AWS_CALLS": str(folder / "calls"), "API_PORT": str(port)}
        project.environment["AWS_NOT_READY"] = "1"  # the agent of a new machine registers after its creation
        yield world, project


def assert_ok(run: Run) -> None:
    assert run.ok, run.output


def objects(world: World) -> set[str]:
    """Return the objects in the cluster."""
    return {f"{one.type} {one.id}" for one in world.resources.values() if one.type.startswith("kubernetes:")}


def calls(project: Project) -> list[list[str]]:
    """Return the commands that opened a session."""
    path = Path(project.environment["AWS_CALLS"])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_preview_of_a_new_stack_opens_no_tunnel(opened: tuple[World, Project]) -> None:
    _, project = opened
    assert_ok(project.run("preview"))
    assert calls(project) == []


def test_up_reaches_the_private_api_through_the_machine(opened: tuple[World, Project]) -> None:
    world, project = opened
    assert_ok(project.run("up"))
    (machine,) = world.of_type(MACHINE)
    sessions = calls(project)
    assert len(sessions) == 2, "the first one was refused, as the machine's agent had not started yet"
    assert sessions[-1][sessions[-1].index("--target") + 1] == machine.id
    assert objects(world)


def test_a_second_up_changes_nothing(opened: tuple[World, Project]) -> None:
    _, project = opened
    run = project.run("up")
    assert_ok(run)
    assert run.changes == []


def test_another_way_to_the_api_replaces_no_object(opened: tuple[World, Project]) -> None:
    world, project = opened
    before = objects(world)
    project.set("network.api_access", "authorized_ranges")
    project.set("network.authorized_cidrs[0]", f"{world.machine}/32")
    run = project.run("up")
    assert_ok(run)
    assert not [step for step in run.changes if step.type.startswith("kubernetes:")]
    assert objects(world) == before
    assert not world.of_type(MACHINE)


def test_the_tunnel_stays_open_until_replaced_objects_are_deleted(opened: tuple[World, Project]) -> None:
    world, project = opened
    before = objects(world)
    project.pulumi("config", "rm", "--stack", "aws", "--path", "network.authorized_cidrs")
    project.set("network.api_access", "bastion")
    project.set("trainer.data.seed", 7)
    run = project.run("up")
    assert_ok(run)
    replaced = {step.name for step in run.of_op("create-replacement")}
    assert replaced == {"aws-training-config", "aws-training-job"}, "only what the seed changes"
    assert "aws-training-config" in {step.name for step in run.of_op("delete-replaced")}, (
        "after the program's last line"
    )
    assert len(objects(world)) == len(before)


def test_destroy_keeps_the_tunnel_until_the_last_object_is_deleted(opened: tuple[World, Project]) -> None:
    world, project = opened
    assert_ok(project.run("destroy", "live_stack"))
    assert not objects(world)
    assert not world.of_type(MACHINE, "aws:ec2/vpc:Vpc", "aws:eks/cluster:Cluster")
