"""Reads from the account what the settings cannot say: its zones, a stack's cluster, the size of its GPU nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.clouds.aws import naming
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


def find_version(base_name: str) -> str | None:
    """Return the Kubernetes version of the stack's control plane, None before the first `up`."""
    for name in _find_clusters(base_name):
        cluster = aws.eks.get_cluster(name=name)
        if cluster.status != "DELETING":
            return cluster.version
    return None


def find_scaling(cluster_base_name: str, group: str) -> Scaling | None:
    """Return the size of the node group with this logical name, None before the first `up`.

    The cluster is called `cluster_base_name`, with or without a suffix; Pulumi appends 7 digits to the group's name.
    """
    for cluster in _find_clusters(cluster_base_name):
        names = aws.eks.get_node_groups(cluster_name=cluster).names
        for name in (name for name in names if re.fullmatch(rf"{re.escape(group)}-[0-9a-f]{{7}}", name)):
            found = aws.eks.get_node_group(cluster_name=cluster, node_group_name=name)
            if found.status != "DELETING" and found.scaling_configs:
                scaling = found.scaling_configs[0]
                return Scaling(scaling.min_size, scaling.desired_size, scaling.max_size)
    return None


def addon_version(addon: str, kubernetes_version: str) -> str:
    """Return the version of an add-on that EKS installs by default with this Kubernetes version.

    An add-on without a version keeps the one of its creation through every upgrade of the control plane. EKS changes
    the default now and then, and the next `up` follows: infra/UPGRADE.md, "Upgrades that the cloud starts".
    """
    return aws.eks.get_addon_version(addon_name=addon, kubernetes_version=kubernetes_version).version


def require_possible_upgrade(stack: str, running: str, requested: str) -> None:
    """Raise RunError unless EKS can go from the running to the requested version: the same, or the next minor one.

    https://docs.aws.amazon.com/eks/latest/userguide/update-cluster.html
    """
    now, then = (int(version.partition(".")[2]) for version in (running, requested))
    if then in (now, now + 1):
        return
    what = "EKS cannot downgrade a cluster" if then < now else "EKS upgrades one minor version at a time"
    next_version = running if then < now else f"1.{now + 1}"
    raise pulumi.RunError(
        f"stack {stack!r}: {what}: got cluster.kubernetes_version {requested}, running {running}; allowed: "
        f"{running} | 1.{now + 1}. Fix: pulumi config set --path cluster.kubernetes_version {next_version}"
    )


def require_unlisted_creator(stack: str, admins: Sequence[str]) -> None:
    """Raise RunError if one of the further administrators is the principal that creates the cluster.

    EKS gives the creator an entry (pulumi-eks: `bootstrapClusterCreatorAdminPermissions`) and refuses a second one:
    https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2968
    """
    if not admins:
        return
    caller = aws.get_caller_identity().arn
    for index, arn in enumerate(admins):
        if _is_session_of(caller, arn):
            raise pulumi.RunError(
                f"stack {stack!r}: this principal creates the cluster, so it is an administrator already, and EKS "
                f"refuses a second entry: got cluster.admin_role_arns[{index}] {arn}; allowed: other principals. "
                f"Fix: pulumi config rm --path 'cluster.admin_role_arns[{index}]'"
            )


def _is_session_of(caller: str, principal: str) -> bool:
    """Return whether a caller is this user, or a session of this role, whose name is unique in an account.

    A session's ARN lacks the path of its role: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    """
    *_, account, resource = caller.split(":", 5)
    kind, _, name = resource.partition("/")
    if kind != "assumed-role":
        return caller == principal
    *_, owner, listed = principal.split(":", 5)
    return (owner, listed.partition("/")[0], listed.rpartition("/")[2]) == (account, "role", name.partition("/")[0])


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


def _find_clusters(base_name: str) -> list[str]:
    """Return the clusters that the stack has, of which one may be in deletion."""
    return [name for name in aws.eks.get_clusters().names if naming.is_cluster(base_name, name)]
