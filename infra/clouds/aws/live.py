"""Reads from the account what the settings cannot say: its zones, a stack's cluster, the size of its GPU nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.clouds.aws.settings import UNSUPPORTED_ZONES, Settings


@dataclass(frozen=True)
class Scaling:
    """The bounds and the number of nodes of a node group."""

    num_min: int
    num_desired: int
    num_max: int


def require_supported_zones(settings: Settings) -> None:
    """Raise RunError if EKS accepts no control plane in one of the zones, before any resource is created."""
    unsupported = UNSUPPORTED_ZONES.get(settings.region)
    if unsupported is None:
        return
    for index, zone in enumerate(settings.zones):
        if aws.get_availability_zone(name=zone).zone_id == unsupported:
            raise pulumi.RunError(
                f"stack {settings.stack!r}: EKS supports no cluster in this zone: got {zone} ({unsupported}); allowed: "
                f"the other zones of {settings.region}. Fix: pulumi config set --path 'network.zones[{index}]' <zone>; "
                f"the names and ids of your zones: aws ec2 describe-availability-zones --region {settings.region}"
            )


def cluster_exists(name: str) -> bool:
    """Return whether the account has a cluster of this name in the stack's region."""
    return name in aws.eks.get_clusters().names


def find_scaling(cluster_base_name: str, group: str) -> Scaling | None:
    """Return the size of the node group with this logical name, None before the first `up`.

    The cluster is called `cluster_base_name`, with or without a suffix; Pulumi appends 7 digits to the group's name.
    """
    clusters = _matching(aws.eks.get_clusters().names, rf"{re.escape(cluster_base_name)}(-[0-9a-f]{{8}})?")
    for cluster in clusters:
        names = aws.eks.get_node_groups(cluster_name=cluster).names
        for name in _matching(names, rf"{re.escape(group)}-[0-9a-f]{{7}}"):
            found = aws.eks.get_node_group(cluster_name=cluster, node_group_name=name)
            if found.status != "DELETING" and found.scaling_configs:
                scaling = found.scaling_configs[0]
                return Scaling(scaling.min_size, scaling.desired_size, scaling.max_size)
    return None


def plan_scaling(bounds: tuple[int, int], start: int, live: Scaling | None, stack: str) -> tuple[Scaling, bool]:
    """Return the size to register, and whether the engine must ignore its number of nodes.

    The cluster-autoscaler owns the number of nodes after the first `up`. An update of a bound sends the number, too:
    `expandNodegroupScalingConfig` in terraform-provider-aws, internal/service/eks/node_group.go. It must then be the
    running number and not the one in the state, or EKS stops nodes of a running job.
    """
    low, high = bounds
    if live is None or bounds == (live.num_min, live.num_max):
        return Scaling(low, start, high), True
    if live.num_desired > high:
        raise pulumi.RunError(
            f"stack {stack!r}: gpu.nodes.max is lower than the number of running GPU nodes: got {high}; allowed: "
            f"{live.num_desired} or more. Fix: pulumi config set --path gpu.nodes.max {live.num_desired}, or stop the "
            f"job and wait until the nodes are gone: python -m workloads stop --stack {stack}"
        )
    return Scaling(low, max(low, live.num_desired), high), False


def _matching(names: Sequence[str], pattern: str) -> list[str]:
    return [name for name in names if re.fullmatch(pattern, name)]
