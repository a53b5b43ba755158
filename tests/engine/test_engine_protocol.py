"""Facts about the real engine on which the simulation relies, shown by programs of one resource."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_provider import Provider, Server
from engine_runs import Project
from engine_world import Inputs, PartlyCreated, Refused, Resource, Rules, World

#: A type that loads quickly; its rules stand for those of an EKS node group.
GROUP = "aws:sqs/queue:Queue"
PROGRAM = """
import pulumi
import pulumi_aws as aws

aws.sqs.Queue("group", delay_seconds=1)
"""


@pytest.fixture
def capacity() -> list[bool]:
    """Return the answers of the cloud to the creates to come: whether there is capacity."""
    return [False]


@pytest.fixture
def world(capacity: list[bool]) -> World:
    """Return a world in which a create without capacity fails after the object exists."""

    def created(world: World, resource: Resource) -> None:
        if capacity and not capacity.pop(0):
            raise PartlyCreated("NodeCreationFailure: InsufficientInstanceCapacity", "CREATE_FAILED")

    def updated(world: World, resource: Resource, inputs: Inputs) -> None:
        if resource.status == "BUSY":
            raise Refused("PodEvictionFailure: Reached max retries")

    return World(lambda token: Rules(on_created=created, on_update=updated, create_minutes=lambda inputs: 3.0))


@pytest.fixture
def project(world: World, tmp_path: Path, kubeconfig: Path) -> Iterator[Project]:
    """Return a stack with one resource."""
    server = Server(Provider(world, {}, {}))
    project = Project(tmp_path, "aws", server, {})
    project.replace_program(PROGRAM)
    yield project
    server.kill()


def _group(project: Project) -> dict[str, object]:
    (found,) = [resource for resource in project.resources() if resource["type"] == GROUP]
    return found


def test_a_failed_create_stays_in_the_state_and_the_next_up_succeeds_over_the_failed_object(
    world: World, project: Project
) -> None:
    first = project.run("up")
    assert not first.ok
    assert "InsufficientInstanceCapacity" in first.output
    assert _group(project)["initErrors"] == ["NodeCreationFailure: InsufficientInstanceCapacity"]
    second = project.run("up")
    assert second.ok, second.output
    assert [(step.op, step.name) for step in second.changes] == [("update", "group")]
    assert world.log == [("create", GROUP, "group")], "the bridge asks the cloud for an update without changes"
    assert [one.status for one in world.of_type(GROUP)] == ["CREATE_FAILED"], "an empty update repaired the group"
    assert "initErrors" not in _group(project)
    assert project.run("up").changes == [], "the engine has forgotten the failure"


def test_a_refresh_forgets_a_failed_create(world: World, project: Project) -> None:
    assert not project.run("up").ok
    assert project.run("refresh").ok
    assert project.run("up").changes == []
    assert [one.status for one in world.of_type(GROUP)] == ["CREATE_FAILED"]


def test_a_refused_update_counts_as_done_until_a_refresh(world: World, capacity: list[bool], project: Project) -> None:
    capacity.clear()
    assert project.run("up").ok
    (group,) = world.of_type(GROUP)
    group.status = "BUSY"
    project.replace_program(PROGRAM.replace("delay_seconds=1", "delay_seconds=2"))
    refused = project.run("up")
    assert not refused.ok
    assert "PodEvictionFailure" in refused.output
    group.status = "ACTIVE"
    assert project.run("up").ok
    assert group.inputs["delaySeconds"] == 1, "the bridge has no difference to send"
    assert project.run("refresh").ok
    assert [step.op for step in project.run("up").changes] == ["update"]
    assert group.inputs["delaySeconds"] == 2


def test_a_replacement_removes_the_failed_object(world: World, project: Project) -> None:
    assert not project.run("up").ok
    project.pulumi("up", "--yes", "--skip-preview", "--replace", str(_group(project)["urn"]))
    assert [one.status for one in world.of_type(GROUP)] == ["ACTIVE"]
