"""What a stack goes through: once from nothing to nothing with changes in between, once with a fault at every turn."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import engine_clouds
import engine_sdk
from engine_provider import Server
from engine_runs import ROOT, Project, Run
from engine_world import World

Thing = tuple[str, str]

#: A size of shared storage that the service makes out of the default one in place, and one that it does not.
GROWN = {"aws": 2400, "azure": 4096, "gcp": 2048, "local": 20}
REFUSED = {"azure": 1024, "gcp": 10240}

#: The pool of GPU nodes, and where its autoscaler writes how many there are.
POOLS: Mapping[str, tuple[str, str]] = {
    "aws": ("aws:eks/nodeGroup:NodeGroup", "aws-cluster-gpu-nodes"),
    "azure": ("azure-native:containerservice:AgentPool", "azure-gpu"),
    "gcp": ("gcp:container/nodePool:NodePool", "gcp-cluster-gpu"),
}

#: The type whose deletion is refused once.
STUBBORN = {
    "aws": "aws:ec2/subnet:Subnet",
    "azure": "azure-native:netapp:CapacityPoolVolume",
    "gcp": "gcp:container/nodePool:NodePool",
    "local": "kubernetes:core/v1:Namespace",
}


@dataclass
class Story:
    """The runs of one stack by what they were for, and what was to be seen between them."""

    world: World
    runs: dict[str, Run] = field(default_factory=dict)
    logs: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    left: list[Thing] = field(default_factory=list)
    num_after_preview: int = -1
    state: str = ""
    state_resources: list[Mapping[str, object]] = field(default_factory=list)
    orphans: dict[str, list[str]] = field(default_factory=dict)
    state_after_destroy: list[Mapping[str, object]] = field(default_factory=list)


def open_project(folder: Path, stack: str, kubeconfig: Path) -> tuple[World, Server, Project]:
    """A stack that does not exist yet, with a cloud of its own."""
    world, server = engine_clouds.simulate()
    return world, server, Project(folder, stack, server, {"KUBECONFIG": str(kubeconfig)})


def whole_life(folder: Path, stack: str, kubeconfig: Path) -> Story:
    """Preview, up, changes of every sort, refresh, destroy; CLI and Automation API take turns."""
    world, server, project = open_project(folder, stack, kubeconfig)
    story = Story(world)
    _run(story, project, "preview", "preview", "cli")
    story.num_after_preview = len(world.things)
    _run(story, project, "up", "up", "automation")
    story.state, story.state_resources = project.export(), project.resources()
    _run(story, project, "again", "up", "cli")
    project.set("trainer.data.seed", 7)
    _run(story, project, "seed", "up", "automation")
    project.set("gpu.nodes.max", 4)
    _run(story, project, "nodes", "up", "automation")
    project.set("storage.size_gib", GROWN[stack])
    _run(story, project, "grow", "up", "automation")
    _run(story, project, "refresh", "refresh", "cli")
    if stack in REFUSED:
        project.set("storage.size_gib", REFUSED[stack])
        _run(story, project, "refused", "up", "automation")
        project.set("storage.size_gib", GROWN[stack])
    if stack in ("aws", "azure"):
        _autoscale(story.world, stack)
        _run(story, project, "refresh-scaled", "refresh", "ours" if stack == "azure" else "automation")
        _run(story, project, "scaled", "up", "automation")
    _write_checkpoint(world)
    _run(story, project, "destroy", "destroy", "cli")
    _end(story, project, server)
    return story


def life_with_faults(folder: Path, stack: str, kubeconfig: Path, positions: Sequence[int]) -> Story:
    """Every run but the last fails where it is told to: at these creates, by a lost connection, at a deletion."""
    world, server, project = open_project(folder, stack, kubeconfig)
    story = Story(world)
    project.set("storage.on_destroy", "delete")
    for position in positions:
        created = sum(verb == "create" for verb, _, _ in world.log)
        world.faults.fail_create = max(1, position - created)
        driver = "cli" if position == positions[0] else "automation"
        _run(story, project, f"create-{position}", "up", driver)
        story.orphans[f"create-{position}"] = orphans(world, project)
        if position == positions[len(positions) // 2]:
            world.faults.lose_create = 2
            _run(story, project, "lost", "up", "automation")
            _restart(server)
            story.orphans["lost"] = orphans(world, project)
    world.faults.fail_create, world.faults.delay_seconds = None, 0.2
    _run(story, project, "converged", "up", "cli")
    world.faults.delay_seconds = 0.0
    _run(story, project, "preview", "preview", "automation")
    _write_checkpoint(world)
    world.faults.refuse_delete.add(STUBBORN[stack])
    _run(story, project, "refused", "destroy", "cli")
    _run(story, project, "destroy", "destroy", "ours")
    _end(story, project, server)
    return story


def orphans(world: World, project: Project) -> list[str]:
    """What exists and is not in the state, which is what a bill shows after everything is destroyed."""
    known = {str(resource.get("id")) for resource in project.resources()}
    return [f"{thing.type} {thing.name}" for thing in world.things.values() if thing.id not in known]


def num_creates(stack: str) -> int:
    """Resources that a cloud makes for the stack, by its golden list and by what its remote components make."""
    return sum(engine_clouds.COMPONENT_CHILDREN.get(token, 1) for token in _golden_types(stack))


def load_sdks(stack: str) -> None:
    """Import what the stack's program will: the SDKs load their parts when first used, which two threads must not do.

    A module that another thread is still filling has no such class yet.
    """
    importlib.import_module("pulumi_kubernetes.meta.v1")
    for token in _golden_types(stack):
        engine_sdk.arguments_of(token)


def _golden_types(stack: str) -> list[str]:
    golden = (ROOT / "tests/infra/golden" / f"{stack}.txt").read_text().splitlines()
    return [line.partition("  ")[0] for line in golden if not line.startswith(("torchrec-cloud:", "pulumi:providers"))]


def spread(total: int, num: int = 8) -> list[int]:
    """The first, the last, and positions between them at equal distances."""
    return sorted({1 + round(index * (total - 1) / (num - 1)) for index in range(num)})


def _run(story: Story, project: Project, name: str, verb: str, driver: str) -> None:
    before = len(story.world.log)
    story.runs[name] = project.run(verb, driver)  # type: ignore[arg-type]
    story.logs[name] = story.world.log[before:]


def _restart(server: Server) -> None:
    """The provider comes back with all that it had made."""
    assert server.killed.wait(60), "the connection was not lost: fewer creates were left than the fault waits for"
    server.start()


def _autoscale(world: World, stack: str) -> None:
    """Somebody waits for nodes: the autoscaler brings all that it may."""
    token, name = POOLS[stack]
    pool = next(thing for thing in world.of_type(token) if thing.name == name)
    if stack == "aws":
        pool.inputs = {**pool.inputs, "scalingConfig": {**pool.inputs["scalingConfig"], "desiredSize": 4}}
    else:
        pool.inputs = {**pool.inputs, "count": 4}


def _write_checkpoint(world: World) -> None:
    """A run wrote something into the bucket, which Pulumi knows nothing of."""
    kinds = {
        "aws:s3/bucket:Bucket": "aws:s3/bucketObjectv2:BucketObjectv2",
        "gcp:storage/bucket:Bucket": "gcp:storage/bucketObject:BucketObject",
    }
    for token, kind in kinds.items():
        for bucket in world.of_type(token):
            name = bucket.computed.get("bucket") or bucket.computed["name"]
            world.add(kind, f"{name}/checkpoints/default/checkpoints/step-1", {"bucket": name})


def _end(story: Story, project: Project, server: Server) -> None:
    story.left = sorted((thing.type, thing.name) for thing in story.world.things.values())
    story.state_after_destroy = project.resources()
    threading.Thread(target=server.kill).start()
