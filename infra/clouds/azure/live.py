"""Reads from the cluster what the settings cannot say: the number of running GPU nodes."""

from __future__ import annotations

import pulumi
from pulumi_azure_native import containerservice


def num_nodes(
    bounds: tuple[int, int],
    pool: str,
    stack: str,
    group: pulumi.Input[str],
    cluster: containerservice.ManagedCluster,
) -> pulumi.Output[int]:
    """Return the number of nodes that a request about an autoscaled pool must name.

    AKS requires the number in every request (Azure/azure-service-operator#3220), and refuses another one than the
    running one (terraform-provider-azurerm#4543). `ignore_changes` would send the stored one with the next change of
    any other property. So `up` updates the pool after the autoscaler has changed it, which moves no node.
    """
    found = containerservice.get_managed_cluster_output(
        resource_group_name=group,
        resource_name=cluster.name,
        opts=pulumi.InvokeOutputOptions(parent=cluster, depends_on=[cluster]),
    )
    return found.agent_pool_profiles.apply(
        lambda profiles: plan_num_nodes(
            bounds, next((one.count for one in profiles or () if one.name == pool), None), stack
        )
    )


def plan_num_nodes(bounds: tuple[int, int], live: int | None, stack: str) -> int:
    """Return the running number of nodes, the minimum if there is no pool; raise RunError if it exceeds the maximum.

    A minimum above the running number is the autoscaler's business (azure-cli-extensions#1606).
    """
    low, high = bounds
    if live is None:
        return low
    if live > high:
        raise pulumi.RunError(
            f"stack {stack!r}: gpu.nodes.max is lower than the number of running GPU nodes: got {high}; allowed: "
            f"{live} or more. Fix: pulumi config set --path gpu.nodes.max {live}, or stop the job and wait until the "
            f"nodes are gone: python -m workloads stop --stack {stack}"
        )
    return live
