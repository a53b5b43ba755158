"""How a resource shows that it belongs to a stack: by the stack's tags, or by a tag or name of its cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.clouds.aws import naming
from infra.clouds.aws.doctor.clients import Clients
from infra.clouds.aws.settings import Settings, price_table

HOURS_PER_MONTH = 730
#: The tags by which `settings.labels` names the stack; the others may change while the stack lives.
_NAMING_TAGS = ("project", "stack", "managed-by")
#: The tag of what Kubernetes creates for a cluster, with the cluster's name.
_OWNED = "kubernetes.io/cluster/"

Tags = Mapping[str, str]
Filters = list[dict[str, Any]]


@dataclass(frozen=True)
class Owner:
    """One stack: its clients, tags and the names that its cluster can have."""

    clients: Clients
    settings: Settings

    @property
    def tags(self) -> Tags:
        """Return the tags of every resource that Pulumi creates for the stack."""
        return {key: self.settings.labels[key] for key in _NAMING_TAGS}

    @property
    def region(self) -> str:
        """Return the stack's region."""
        return self.settings.region

    @property
    def prices(self) -> Mapping[str, Mapping[str, float]]:
        """Return the unit prices by section of `prices.toml`."""
        return price_table()

    @property
    def cluster(self) -> str:
        """Return the cluster's name without its suffix, which clusters of earlier versions of this program lack."""
        return naming.base_name(self.settings.project, self.settings.stack)

    @property
    def cluster_patterns(self) -> list[str]:
        """Return the cluster's possible names as EC2's filters match them; `is_cluster` decides."""
        return naming.filter_values(self.cluster)

    def is_cluster(self, name: str) -> bool:
        """Return whether the cluster can have this name; another stack's name may begin with this one's."""
        return naming.is_cluster(self.cluster, name)

    def has_tags(self, tags: Tags) -> bool:
        """Return whether a resource has the stack's tags."""
        return self.tags.items() <= tags.items()

    def has_cluster_tag(self, tags: Tags) -> bool:
        """Return whether the cluster, its network add-on or a controller in it made a resource.

        Tags: https://github.com/aws/amazon-vpc-cni-k8s/pull/1482 and pull/2854 (network interfaces), EKS managed node
        groups (`eks:cluster-name`), the in-tree and the AWS load balancer controller (`elbv2.k8s.aws/cluster`).
        """
        names = [tags.get(key, "") for key in ("cluster.k8s.amazonaws.com/name", "eks:cluster-name")]
        names += [tags.get(key, "") for key in ("aws:eks:cluster-name", "elbv2.k8s.aws/cluster")]
        # A subnet or security group with the value `shared` is only used by the cluster:
        # https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html
        owned = [key for key, value in tags.items() if key.startswith(_OWNED) and value == "owned"]
        names += [key.removeprefix(_OWNED) for key in owned]
        return any(map(self.is_cluster, names))

    def owns(self, tags: Tags) -> bool:
        """Return whether a resource belongs to the stack or its cluster."""
        return self.has_tags(tags) or self.has_cluster_tag(tags)

    def filters(self) -> list[Filters]:
        """Return EC2's filters for the stack's tags, and one for each tag of its cluster."""
        by_value = ("cluster.k8s.amazonaws.com/name", "eks:cluster-name", "aws:eks:cluster-name")
        keys = [f"{_OWNED}{name}" for name in self.cluster_patterns]
        return [
            [{"Name": f"tag:{key}", "Values": [value]} for key, value in self.tags.items()],
            *([{"Name": f"tag:{key}", "Values": self.cluster_patterns}] for key in by_value),
            [{"Name": "tag-key", "Values": keys}],
        ]

    def pages(self, service: str, operation: str, key: str, **options: Any) -> Iterable[Any]:
        """Yield every entry of a list, page by page where AWS has pages."""
        client = self.clients(service)
        if not client.can_paginate(operation):
            yield from getattr(client, operation)(**options)[key]
            return
        for page in client.get_paginator(operation).paginate(**options):
            yield from page[key]


def read_tags(tags: Sequence[Mapping[str, str]] | None) -> dict[str, str]:
    """Return AWS's list of tags as a mapping."""
    return {tag["Key"]: tag["Value"] for tag in tags or ()}


def utc(moment: object) -> str | None:
    """Return a time as AWS reports it in ISO 8601, UTC; None if it reports none."""
    if isinstance(moment, (int, float)):
        moment = datetime.fromtimestamp(moment / 1000, UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%MZ") if isinstance(moment, datetime) else None
