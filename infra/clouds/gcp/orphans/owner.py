"""How a resource shows that it belongs to a stack: by labels, by the network it is in, or by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.clouds.gcp.doctor.client import Rest
from infra.clouds.gcp.settings import Settings, price_table
from infra.findings.orphans import shell

HOURS_PER_MONTH = 730

Item = Mapping[str, Any]
#: Why a resource has no command; stacks of one name in two projects of Pulumi have resources of the same names.
NO_LABELS = "no labels show whose it is"
_NAMING_LABELS = ("project", "stack", "managed-by")
#: GKE labels nodes, disks of claims and load balancers with the cluster's name.
_CLUSTER_LABEL = "goog-k8s-cluster-name"
#: Pulumi adds seven hexadecimal digits to a name.
_SUFFIX = "-[0-9a-f]{7}"


@dataclass(frozen=True)
class Owner:
    """One stack, and the client of its project."""

    rest: Rest
    settings: Settings

    @property
    def project(self) -> str:
        """Return the project's id."""
        return self.settings.gcp_project

    @property
    def prices(self) -> Mapping[str, Mapping[str, float]]:
        """Return the unit prices by section of `prices.toml`."""
        return price_table()

    def has_labels(self, labels: Mapping[str, str] | None) -> bool:
        """Return whether a resource has the stack's labels, or the label of its cluster."""
        found = labels or {}
        named = all(found.get(key) == self.settings.labels[key] for key in _NAMING_LABELS)
        return named or self.is_cluster(found.get(_CLUSTER_LABEL, ""))

    def is_cluster(self, name: str) -> bool:
        """Return whether the cluster can have this name."""
        return re.fullmatch(rf"{re.escape(self.settings.stack)}-cluster{_SUFFIX}", name) is not None

    def is_of_cluster(self, item: Item) -> bool:
        """Return whether GKE made a resource for the cluster: by its label, without one by a name after the cluster."""
        cluster = (item.get("labels") or {}).get(_CLUSTER_LABEL)
        if cluster is not None:
            return self.is_cluster(cluster)
        pattern = rf"gke-{re.escape(self.settings.stack)}-cluster{_SUFFIX}(-.*)?"
        return re.fullmatch(pattern, str(item["name"])) is not None

    def is_named(self, name: str, *parts: str) -> bool:
        """Return whether Pulumi can have created a resource of this name for a part of the stack."""
        pattern = rf"{re.escape(self.settings.stack)}-({'|'.join(parts)}){_SUFFIX}"
        return re.fullmatch(pattern, name) is not None

    def is_in_network(self, item: Item) -> bool:
        """Return whether a resource is in a network that Pulumi created for the stack."""
        network = str(item.get("network") or "").rpartition("/")[2]
        return self.is_named(network, "network-vpc", r"network-fabric\d")

    def aggregated(self, kind: str) -> Iterator[Item]:
        """Yield the resources of Compute Engine of one kind, in all zones and regions and global ones."""
        path = f"compute/v1/projects/{self.project}/aggregated/{kind}"
        for _, part in self.rest.list_all("compute", path, "items"):
            yield from part.get(kind, ())

    def global_list(self, kind: str) -> Iterator[Item]:
        """Yield the global resources of Compute Engine of one kind."""
        yield from self.rest.list_all("compute", f"compute/v1/projects/{self.project}/global/{kind}", "items")


def place(item: Item) -> str:
    """Return the option that names a resource's zone or region, or that it is global."""
    for key in ("zone", "region"):
        if item.get(key):
            return shell(f"--{key} {{place}}", place=str(item[key]).rpartition("/")[2])
    return "--global"


def utc(moment: object) -> str | None:
    """Return one of Google's times in ISO 8601, UTC, without seconds; None if there is none."""
    if not moment:
        return None
    parsed = datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
    return parsed.astimezone(UTC).strftime("%Y-%m-%dT%H:%MZ")
