"""The lifecycle of a stack, from the first preview to destroy: once with changes, once with injected faults."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import engine_clouds
import engine_rehearsal
import engine_sdk
import simulated_autoscaler
import simulated_gke
import simulated_registry
from engine_provider import Server
from engine_rehearsal import Phase
from engine_runs import ROOT, Project, Run
from engine_world import LAPTOP, Resource, World
from simulated_jobs import training_jobs

#: A storage size in GiB to which the service resizes the default in place, and one that it refuses.
LARGER_GIB = {"aws": 2400, "azure": 4096, "gcp": 2048, "local": 20}
REFUSED_GIB = {"azure": 1024, "gcp": 10240}

#: The GPU node pool: its type and its name.
POOLS: Mapping[str, tuple[str, str]] = {
    "aws": ("aws:eks/nodeGroup:NodeGroup", "aws-cluster-gpu-nodes"),
    "azure": ("azure-native:containerservice:AgentPool", "azure-gpu"),
    "gcp": ("gcp:container/nodePool:NodePool", "gcp-cluster-gpu"),
}

#: The type of which one deletion is refused.
DELETE_REFUSED = {
    "aws": "aws:ec2/subnet:Subnet",
    "azure": "azure-native:netapp:CapacityPoolVolume",
    "gcp": "gcp:container/nodePool:NodePool",
    "local": "kubernetes:core/v1:Namespace",
}


@dataclass
class Lifecycle:
    """The runs of one stack by their purpose, and what was observed between them."""

    world: World
    runs: dict[str, Run] = field(default_factory=dict)
    logs: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    left: list[tuple[str, str]] = field(default_factory=list)
    num_after_preview: int = -1
    num_nodes_after_scaling: int = -1
    state: str = ""
    state_resources: list[Mapping[str, object]] = field(default_factory=list)
    orphans: dict[str, list[str]] = field(default_factory=dict)
    state_after_destroy: list[Mapping[str, object]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)
    jobs_after_upgrade: list[str] = field(default_factory=list)
    left_again: list[tuple[str, str]] = field(default_factory=list)


def open_project(
    folder: Path, stack: str, kubeconfig: Path, *, authorized: bool = True
) -> tuple[World, Server, Project]:
    """Return a stack that does not exist yet, whose API server lets this machine in, with its own simulated cloud."""
    world, server = engine_clouds.simulate()
    project = Project(folder, stack, server, {"KUBECONFIG": str(kubeconfig)})
    if authorized:
        authorize_laptop(project)
    simulated_registry.builder(world).project = project.work
    return world, server, project


def authorize_laptop(project: Project) -> None:
    """Run the command that `doctor` recommends to a laptop."""
    if project.stack in POOLS:
        project.set("network.authorized_cidrs[0]", f"{LAPTOP}/32")


def run_lifecycle(folder: Path, stack: str, kubeconfig: Path) -> Lifecycle:
    """Run the stack's first life, with changes and an upgrade, then a second one that starts without capacity."""
    world, server, project = open_project(folder, stack, kubeconfig, authorized=False)
    lifecycle = Lifecycle(world)
    lifecycle.runs["doctor"] = engine_rehearsal.run_doctor(project)
    authorize_laptop(project)
    _run(lifecycle, project, "preview", "preview", "cli")
    lifecycle.num_after_preview = len(world.resources)
    _run(lifecycle, project, "up", "up", "automation")
    assert lifecycle.runs["up"].ok, lifecycle.runs["up"].output
    lifecycle.state, lifecycle.state_resources = project.export(), project.resources()
    lifecycle.nodes["pending"] = engine_rehearsal.wait_for_nodes(world)
    _run(lifecycle, project, "again", "up", "cli")
    lifecycle.nodes["idle"] = engine_rehearsal.end_run(world)
    _change_settings(lifecycle, project)
    if stack in POOLS:
        _scale_and_upgrade(lifecycle, project)
    _write_checkpoint(world)
    _run(lifecycle, project, "destroy", "destroy", "cli")
    lifecycle.left = _existing(world)
    _live_again(lifecycle, project)
    _end(lifecycle, project, server)
    return lifecycle


def _change_settings(lifecycle: Lifecycle, project: Project) -> None:
    """Change one setting after the other, alternating between CLI and Automation API."""
    stack = project.stack
    project.set("trainer.data.seed", 7)
    _run(lifecycle, project, "seed", "up", "automation")
    lifecycle.nodes["resumed"] = engine_rehearsal.wait_for_nodes(lifecycle.world)
    if stack in ("aws", "azure"):
        project.set("job.env.NCCL_DEBUG", "WARN")
        _run(lifecycle, project, "environment", "up", "automation")
    project.set("gpu.nodes.max", 4)
    _run(lifecycle, project, "nodes", "up", "automation")
    project.set("storage.size_gib", LARGER_GIB[stack])
    _run(lifecycle, project, "grow", "up", "automation")
    _run(lifecycle, project, "refresh", "refresh", "cli")
    if stack in REFUSED_GIB:
        project.set("storage.size_gib", REFUSED_GIB[stack])
        _run(lifecycle, project, "refused", "up", "automation")
        project.set("storage.size_gib", LARGER_GIB[stack])


def _scale_and_upgrade(lifecycle: Lifecycle, project: Project) -> None:
    """Let the autoscaler grow the pool, then upgrade Kubernetes while the job runs."""
    world, stack = lifecycle.world, project.stack
    _autoscale(world, stack)
    _run(lifecycle, project, "refresh-scaled", "refresh", "live_stack" if stack == "azure" else "automation")
    _run(lifecycle, project, "scaled", "up", "automation")
    lifecycle.num_nodes_after_scaling = simulated_autoscaler.size(_gpu_pool(world, stack))
    project.set("cluster.kubernetes_version", engine_rehearsal.NEXT_VERSION)
    _run(lifecycle, project, "upgrade", "up", "cli")
    lifecycle.jobs_after_upgrade = [job.name for job in training_jobs(world)]


def _live_again(lifecycle: Lifecycle, project: Project) -> None:
    """Run `up` once more, on clouds without capacity at first, and destroy everything."""
    project.set("storage.on_destroy", "delete")
    if project.stack in POOLS:
        project.set("gpu.nodes.min", 1)
        lifecycle.world.faults.nodes_available = 0
        _run(lifecycle, project, "no capacity", "up", "live_stack")
        lifecycle.world.faults.nodes_available = None
        failed = lifecycle.runs["no capacity"]
        _record(lifecycle, "recovery", lambda: engine_rehearsal.recover(project, failed))
    else:
        _run(lifecycle, project, "up again", "up", "automation")
    _run(lifecycle, project, "destroy again", "destroy", "cli")


def run_with_faults(folder: Path, stack: str, kubeconfig: Path, positions: Sequence[int]) -> Lifecycle:
    """Run `up` and `destroy` with failing creates at these positions, a lost connection and a refused deletion."""
    world, server, project = open_project(folder, stack, kubeconfig)
    lifecycle = Lifecycle(world)
    project.set("storage.on_destroy", "delete")
    for position in positions:
        created = sum(verb == "create" for verb, _, _ in world.log)
        world.faults.fail_create = max(1, position - created)
        driver = "cli" if position == positions[0] else "automation"
        _run(lifecycle, project, f"create-{position}", "up", driver)
        lifecycle.orphans[f"create-{position}"] = find_orphans(world, project)
        if position == positions[len(positions) // 2]:
            world.faults.lose_create = 2
            _run(lifecycle, project, "lost", "up", "automation")
            _restart(server)
            lifecycle.orphans["lost"] = find_orphans(world, project)
    world.faults.fail_create, world.faults.delay_seconds = None, 0.2
    _run(lifecycle, project, "converged", "up", "cli")
    world.faults.delay_seconds = 0.0
    _run(lifecycle, project, "preview", "preview", "automation")
    _write_checkpoint(world)
    world.faults.refuse_delete.add(DELETE_REFUSED[stack])
    _run(lifecycle, project, "refused", "destroy", "cli")
    _run(lifecycle, project, "destroy", "destroy", "live_stack")
    _end(lifecycle, project, server)
    return lifecycle


def find_orphans(world: World, project: Project) -> list[str]:
    """List what exists but is not in the state: it would still cost money after `destroy`."""
    known = {str(resource.get("id")) for resource in project.resources()}
    return [f"{resource.type} {resource.name}" for resource in world.resources.values() if resource.id not in known]


def num_creates(stack: str) -> int:
    """Return the number of creates, from the golden list and the children of remote components."""
    return sum(engine_clouds.NUM_COMPONENT_CHILDREN.get(token, 1) for token in _golden_types(stack))


def load_sdks(stack: str) -> None:
    """Import the modules that the stack's program uses, before threads run it.

    The SDKs load modules at first use. A class is missing from a module that another thread is still importing.
    """
    importlib.import_module("pulumi_kubernetes.meta.v1")
    for token in _golden_types(stack):
        engine_sdk.arguments_of(token)


def _golden_types(stack: str) -> list[str]:
    golden = (ROOT / "tests/infra/golden" / f"{stack}.txt").read_text().splitlines()
    return [line.partition("  ")[0] for line in golden if not line.startswith(("torchrec-cloud:", "pulumi:providers"))]


def spread_positions(total: int, num: int = 8) -> list[int]:
    """Return evenly spaced positions from the first to the last."""
    return sorted({1 + round(index * (total - 1) / (num - 1)) for index in range(num)})


def _run(lifecycle: Lifecycle, project: Project, name: str, verb: str, driver: str) -> None:
    _record(lifecycle, name, lambda: project.run(verb, driver))  # type: ignore[arg-type]


def _record(lifecycle: Lifecycle, name: str, operation: Callable[[], Run]) -> None:
    """Run an operation, and record what it changed and how long it took."""
    world = lifecycle.world
    before, start = len(world.log), world.now
    run = operation()
    lifecycle.runs[name], lifecycle.logs[name] = run, world.log[before:]
    lifecycle.phases.append(Phase(name, len(world.resources), world.now - start, run.seconds))
    lifecycle.nodes[name] = engine_rehearsal.num_gpu_nodes(world)


def _restart(server: Server) -> None:
    """Restart the provider with everything it had created."""
    assert server.killed.wait(60), "the connection was not lost: too few creates were left to reach the fault"
    server.start()


def _gpu_pool(world: World, stack: str) -> Resource:
    """Return the stack's pool of GPU nodes."""
    token, name = POOLS[stack]
    return next(resource for resource in world.of_type(token) if resource.name == name)


def _autoscale(world: World, stack: str) -> None:
    """Scale the GPU pool to its maximum, as the autoscaler does when pods are pending."""
    pool = _gpu_pool(world, stack)
    if stack == "gcp":
        # The first Saturday, whose maintenance window is open by default.
        world.clock.advance(6 * 24 * 60)
        simulated_gke.autoscale(pool, 4)
    elif stack == "aws":
        pool.inputs = {**pool.inputs, "scalingConfig": {**pool.inputs["scalingConfig"], "desiredSize": 4}}
    else:
        pool.inputs = {**pool.inputs, "count": 4}


def _write_checkpoint(world: World) -> None:
    """Put an object into the bucket that Pulumi does not manage."""
    kinds = {
        "aws:s3/bucket:Bucket": "aws:s3/bucketObjectv2:BucketObjectv2",
        "gcp:storage/bucket:Bucket": "gcp:storage/bucketObject:BucketObject",
    }
    for token, kind in kinds.items():
        for bucket in world.of_type(token):
            name = bucket.computed.get("bucket") or bucket.computed["name"]
            world.add(kind, f"{name}/checkpoints/default/checkpoints/step-1", {"bucket": name})


def _end(lifecycle: Lifecycle, project: Project, server: Server) -> None:
    lifecycle.left_again = _existing(lifecycle.world)
    lifecycle.state_after_destroy = project.resources()
    threading.Thread(target=server.kill).start()


def _existing(world: World) -> list[tuple[str, str]]:
    return sorted((resource.type, resource.name) for resource in world.resources.values())
