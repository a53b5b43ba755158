"""Drains of nodes in upgrades: evictions that a disruption budget refuses until the cloud gives up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine_values import differences, is_below
from engine_world import Inputs, Refused, Resource, Rules, World
from simulated_autoscaler import size
from simulated_jobs import blocking_budget, training_jobs


@dataclass(frozen=True)
class Drain:
    """The inputs whose change drains a pool's nodes, and what happens when a budget refuses for `minutes`.

    Without an error the cloud deletes the pods after that time.
    """

    causes: tuple[str, ...]
    minutes: float
    error: str | None


DRAINS: Mapping[str, Drain] = {
    # docs.aws.amazon.com/eks/latest/userguide/managed-node-update-behavior.html: "If the Pods don't leave the node
    # within 15 minutes and there's no force flag, the upgrade phase fails with a PodEvictionFailure error."
    "aws:eks/nodeGroup:NodeGroup": Drain(
        ("version", "releaseVersion", "launchTemplate.version"), 15, "PodEvictionFailure: Reached max retries"
    ),
    # learn.microsoft.com/azure/aks/upgrade-aks-cluster: the drain timeout is 30 minutes by default;
    # learn.microsoft.com/troubleshoot/azure/azure-kubernetes/create-upgrade-delete/error-code-poddrainfailure.
    "azure-native:containerservice:AgentPool": Drain(
        ("orchestratorVersion",), 30, "UpgradeFailed: PodDrainFailure: Drain node failed when evicting pod: Too many"
    ),
    # cloud.google.com/kubernetes-engine/docs/concepts/node-pool-upgrade-strategies: GKE respects a budget for an hour.
    "gcp:container/nodePool:NodePool": Drain(("version",), 60, None),
}


def with_drains(token: str, rules: Rules) -> Rules:
    """Return the rules of a pool with what its upgrade does to running pods."""
    drain = DRAINS.get(token)
    if drain is None:
        return rules

    def updated(world: World, pool: Resource, old: Inputs) -> None:
        rules.on_updated(world, pool, old)
        if not any(is_below(path, drain.causes) for path in differences(old, pool.inputs)):
            return
        if "gpu" not in pool.name or not size(pool) or not training_jobs(world):
            return
        evict(world, pool, drain)

    return replace(rules, on_updated=updated)


def evict(world: World, pool: Resource, drain: Drain) -> None:
    """Evict the pool's pods, or wait until the cloud gives up on a budget that refuses."""
    budget = blocking_budget(world)
    if budget is None:
        world.log.append(("evict", pool.type, pool.name))
        return
    world.wait(drain.minutes)
    if drain.error:
        raise Refused(f"{drain.error}: cannot evict pod as it would violate the pod's disruption budget {budget}")
    world.log.append(("delete-pods", pool.type, pool.name))
