"""Searches of Compute Engine: machines, disks, load balancing and the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from infra import catalog
from infra.clouds.gcp.orphans.owner import HOURS_PER_MONTH, NO_LABELS, Item, Owner, place, utc
from infra.findings.orphans import Leftover, Search, shell


def _no_price(_owner: Owner, _item: Item) -> None:
    """Return no price: the kind is free, or its price depends on use."""


@dataclass(frozen=True)
class _Kind:
    """One kind of resource: its list, what is the stack's, and how to delete one.

    `parts` are the names that Pulumi gives. `by_gke` marks a kind that the cluster makes, `in_network` one whose
    entries are listed if their network has the stack's name. A name alone is another project's as well: what has no
    label is listed without a command.
    """

    name: str
    list: str
    command: str
    parts: tuple[str, ...] = ()
    by_gke: bool = False
    in_network: bool = False
    is_global: bool = False
    has_place: bool = True
    usd_per_hour: Callable[[Owner, Item], float | None] = _no_price


def _instance_price(owner: Owner, item: Item) -> float | None:
    kind = str(item["machineType"]).rpartition("/")[2]
    if item.get("status") in ("TERMINATED", "SUSPENDED"):
        return None
    row = next((row for row in catalog.instances(owner.settings.cloud) if row.name == kind), None)
    return row.on_demand_usd_per_hour if row else owner.prices["system_nodes"].get(kind)


def _disk_price(owner: Owner, item: Item) -> float | None:
    unit = owner.prices["disk"].get(str(item.get("type")).rpartition("/")[2])
    return None if unit is None else int(item["sizeGb"]) * unit / HOURS_PER_MONTH


def _rule_price(owner: Owner, _: Item) -> float:
    return owner.prices["load_balancer"]["forwarding_rule"]


def _address_price(owner: Owner, item: Item) -> float | None:
    is_external = item.get("addressType", "EXTERNAL") == "EXTERNAL"
    return owner.prices["load_balancer"]["unused_address"] if is_external else None


_FABRIC = r"network-fabric\d"
_KINDS = (
    _Kind("instance group", "instanceGroupManagers", "instance-groups managed", by_gke=True),
    _Kind("instance", "instances", "instances", by_gke=True, in_network=True, usd_per_hour=_instance_price),
    _Kind("forwarding rule", "forwardingRules", "forwarding-rules", by_gke=True, in_network=True,
          usd_per_hour=_rule_price),
    _Kind("network endpoint group", "networkEndpointGroups", "network-endpoint-groups", by_gke=True, in_network=True),
    _Kind("address", "addresses", "addresses", by_gke=True, in_network=True, usd_per_hour=_address_price),
    _Kind("disk", "disks", "disks", by_gke=True, usd_per_hour=_disk_price),
    _Kind("snapshot", "snapshots", "snapshots", by_gke=True, is_global=True, has_place=False),
    _Kind("router with NAT", "routers", "routers", ("network-router",), in_network=True),
    _Kind("firewall rule", "firewalls", "firewall-rules", ("network-nodes", "network-webhooks", f"{_FABRIC}-cards"),
          in_network=True, is_global=True, has_place=False),
    _Kind("subnetwork", "subnetworks", "networks subnets", ("network-subnet", f"{_FABRIC}-subnet"), in_network=True),
    _Kind("network", "networks", "networks", ("network-vpc", _FABRIC), is_global=True, has_place=False),
)  # fmt: skip


def searches(owner: Owner) -> list[Search]:
    """Return the searches: machines first, the network last."""
    return [_search(owner, kind) for kind in _KINDS]


def _search(owner: Owner, kind: _Kind) -> Search:
    return Search(kind.name, lambda: _list(owner, kind))


def _list(owner: Owner, kind: _Kind) -> Iterator[Leftover]:
    """Yield the resources of one kind that belong to the stack or its cluster."""
    listed: Iterable[Item] = owner.global_list(kind.list) if kind.is_global else owner.aggregated(kind.list)
    for item in listed:
        name = str(item["name"])
        is_own = bool(kind.parts) and owner.is_named(name, *kind.parts)
        in_network = kind.in_network and owner.is_in_network(item)
        is_labelled = owner.is_of_cluster(item) or owner.has_labels(item.get("labels"))
        if is_own or in_network or is_labelled:
            words = [f"gcloud compute {kind.command} delete", shell("{name}", name=name)]
            words += [place(item)] if kind.has_place else []
            found = Leftover(
                kind=kind.name,
                id=name,
                remove=" ".join([*words, shell("--project {project} --quiet", project=owner.project)]),
                since=utc(item.get("creationTimestamp")),
                usd_per_hour=kind.usd_per_hour(owner, item),
                of_cluster=kind.by_gke or not is_own,
                aliases=(str(item["selfLink"]),),
            )
            yield found if is_labelled else found.without_command(NO_LABELS)
