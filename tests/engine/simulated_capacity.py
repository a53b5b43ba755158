"""Pools of AKS and GKE whose nodes have no capacity; simulated_aws.py has those of EKS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine_world import ACTIVE, Inputs, PartlyCreated, Resource, Rules, World
from simulated_autoscaler import size


@dataclass(frozen=True)
class Shortage:
    """The error of a pool without capacity, the pool's status, and whether a later update starts its nodes."""

    error: str
    status: str
    is_repaired: bool


SHORTAGES: Mapping[str, Shortage] = {
    # learn.microsoft.com/troubleshoot/azure/azure-kubernetes/error-codes/zonalallocation-allocationfailed-error; every
    # update of a failed pool reconciles it.
    "azure-native:containerservice:AgentPool": Shortage(
        "Code=AllocationFailed: Allocation failed. We do not have sufficient capacity for the requested VM size",
        "Failed",
        True,
    ),
    # terraform-provider-google, resource_container_node_pool.go: "Common cause for that is GCE_STOCKOUT [...] but in
    # fact nodepool will be created so we have to capture that in state".
    "gcp:container/nodePool:NodePool": Shortage(
        'NodePool was created in the error state "ERROR": [GCE_STOCKOUT]: the zone does not have enough resources',
        "ERROR",
        False,
    ),
}


def with_capacity(token: str, rules: Rules) -> Rules:
    """Return the rules of a pool whose nodes start only if the cloud has them."""
    shortage = SHORTAGES.get(token)
    if shortage is None:
        return rules

    def check(world: World, pool: Resource) -> None:
        available = world.faults.nodes_available
        if "gpu" in pool.name and available is not None and size(pool) > available:
            raise PartlyCreated(shortage.error, shortage.status)

    def created(world: World, pool: Resource) -> None:
        rules.on_created(world, pool)
        check(world, pool)

    def updated(world: World, pool: Resource, old: Inputs) -> None:
        rules.on_updated(world, pool, old)
        if shortage.is_repaired:
            check(world, pool)
            pool.status = ACTIVE

    return replace(rules, on_created=created, on_updated=updated)
