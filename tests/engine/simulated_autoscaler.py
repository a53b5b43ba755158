"""The simulated cluster autoscaler: starts nodes for pending pods of training jobs, and takes idle nodes back.

It runs inside AKS and GKE, and on EKS once the chart `cluster-autoscaler` is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine_values import at, leaves
from engine_world import Inputs, Resource, World
from simulated_jobs import num_pods, requested_resources, training_jobs

#: `scale-down-unneeded-time`: kubernetes/autoscaler, cluster-autoscaler/FAQ.md; AKS and GKE have the same default.
IDLE_MINUTES = 10
_ANY_RESOURCE = None
_RELEASE, _TAG = "kubernetes:helm.sh/v3:Release", "aws:autoscaling/tag:Tag"
_AWS_TEMPLATE = "k8s.io/cluster-autoscaler/node-template/resources/"
_AZURE_TEMPLATE = "k8s.io_cluster-autoscaler_node-template_resources_"
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Pool:
    """Where one cloud keeps the size and the bounds of a pool, and what its autoscaler knows about an empty pool."""

    size: str
    low: str
    high: str
    resources: Callable[[World, Resource], set[str] | None]
    is_running: Callable[[World], bool] = lambda world: True
    is_output: bool = False


def _aws_resources(world: World, pool: Resource) -> set[str]:
    """Return what the tags of the group declare (cluster-autoscaler/cloudprovider/aws/README.md)."""
    groups = {leaf for leaf in leaves(pool.computed) if isinstance(leaf, str)}
    tags = [one.inputs for one in world.of_type(_TAG) if one.inputs["autoscalingGroupName"] in groups]
    return {_GPU, *(tag["tag"]["key"].removeprefix(_AWS_TEMPLATE) for tag in tags)}


def _azure_resources(world: World, pool: Resource) -> set[str]:
    """Return what the machine size and the pool's tags declare.

    `extractAllocatableResourcesFromScaleSet` in cluster-autoscaler/cloudprovider/azure/azure_template.go; a key has
    underscores instead of slashes.
    """
    tags = [key for key in pool.inputs.get("tags") or {} if key.startswith(_AZURE_TEMPLATE)]
    return {_GPU, *(key.removeprefix(_AZURE_TEMPLATE).replace("_", "/", 1) for key in tags)}


def _has_chart(world: World) -> bool:
    return any(release.inputs.get("chart") == "cluster-autoscaler" for release in world.ready(_RELEASE))


POOLS: Mapping[str, Pool] = {
    "aws:eks/nodeGroup:NodeGroup": Pool(
        "scalingConfig.desiredSize", "scalingConfig.minSize", "scalingConfig.maxSize", _aws_resources, _has_chart
    ),
    "azure-native:containerservice:AgentPool": Pool("count", "minCount", "maxCount", _azure_resources),
    "gcp:container/nodePool:NodePool": Pool(
        "nodeCount",
        "autoscaling.totalMinNodeCount",
        "autoscaling.totalMaxNodeCount",
        lambda world, pool: _ANY_RESOURCE,
        is_output=True,
    ),
}


def gpu_pools(world: World) -> list[Resource]:
    """Return the pools of GPU nodes that work."""
    return [pool for pool in world.ready(*POOLS) if "gpu" in pool.name]


def size(pool: Resource) -> int:
    """Return the number of running nodes."""
    kind = POOLS[pool.type]
    found = at(pool.computed if kind.is_output else pool.inputs, kind.size)
    return int(found if found is not None else pool.inputs.get("initialNodeCount") or pool.inputs.get("minCount") or 0)


def resize(pool: Resource, num_nodes: int) -> None:
    """Set the number of running nodes, as a change outside Pulumi does."""
    kind = POOLS[pool.type]
    if kind.is_output:
        # terraform-provider-google warns that a resized pool may read back another initial count.
        pool.computed[kind.size] = num_nodes
        pool.inputs = {**pool.inputs, "initialNodeCount": num_nodes}
    else:
        pool.inputs = _with(pool.inputs, kind.size, num_nodes)


def start(world: World) -> None:
    """Look at pods and nodes once a minute, for ever."""
    idle_since: dict[str, float] = {}

    def look() -> None:
        for pool in gpu_pools(world):
            _scale(world, pool, idle_since)
        world.later(1, look)

    world.later(1, look)


def pending_reasons(world: World) -> list[str]:
    """Return why pods wait for a node that the autoscaler does not start."""
    return [reason for pool in gpu_pools(world) for reason in _obstacles(world, pool)]


def _scale(world: World, pool: Resource, idle_since: dict[str, float]) -> None:
    kind, current = POOLS[pool.type], size(pool)
    low, high = (at(pool.inputs, path) for path in (kind.low, kind.high))
    if high is None or not kind.is_running(world):
        idle_since.pop(pool.id, None)
        return
    needed = max(low or 0, min(high, sum(num_pods(job) for job in training_jobs(world))))
    if needed < current:
        if world.now - idle_since.setdefault(pool.id, world.now) >= IDLE_MINUTES:
            resize(pool, needed)
            world.log.append(("remove-idle", pool.type, pool.name))
        return
    idle_since.pop(pool.id, None)
    limit = world.faults.nodes_available
    needed = needed if limit is None else max(current, min(needed, limit))
    if needed > current and not list(_obstacles(world, pool)):
        resize(pool, needed)
        world.log.append(("add-nodes", pool.type, pool.name))


def _obstacles(world: World, pool: Resource) -> Iterator[str]:
    """Yield what an empty pool's template lacks; a pool with a node uses the node itself."""
    known = POOLS[pool.type].resources(world, pool)
    for job in training_jobs(world) if size(pool) == 0 and known is not None else []:
        for name in sorted(requested_resources(world, job) - (known or set())):
            yield f"pod didn't trigger scale-up: 1 Insufficient {name} in {pool.name}"


def _with(inputs: Inputs, path: str, value: object) -> Inputs:
    """Return a copy of the inputs with another value at a path."""
    key, _, rest = path.partition(".")
    return {**inputs, key: _with(inputs[key], rest, value) if rest else value}
