"""The address ranges of a stack on Azure: the VNet, its subnets, pods and services, and which ranges Azure rejects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from ipaddress import IPv4Network
from typing import Literal

from pydantic import Field

from infra.config import checks
from infra.config.problems import Problem, find_unused, fix_by_removing, fix_by_setting
from infra.config.settings import Cidr, NetworkSettings, Section

#: Ranges that AKS reserves; nodes, pods and services must not use them (AKS, network concepts).
_RESERVED = ("169.254.0.0/16", "172.30.0.0/16", "172.31.0.0/16", "192.0.2.0/24")

#: The private DNS zone of each kind of endpoint (Azure Private Link, DNS zone values).
PRIVATE_ZONES: Mapping[str, str] = {
    "blob": "privatelink.blob.core.windows.net",
    "dfs": "privatelink.dfs.core.windows.net",
    "registry": "privatelink.azurecr.io",
    "grafana": "privatelink.grafana.azure.com",
    "amlworkspace": "privatelink.api.azureml.ms",
}

_SUBNET = (
    r"^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\.Network/virtualNetworks/[^/]+/subnets/[^/]+$"
)
_EXAMPLE = (
    "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/network/providers/Microsoft.Network"
    "/virtualNetworks/hub/subnets/"
)


class ExistingNetwork(Section):
    """Three subnets of one VNet outside the stack, which never changes them.

    `nodes_cidr` is the range of the nodes' subnet, which has a NAT gateway with the public address `outbound_cidr`: AKS
    must admit it to a public API server. NetApp's subnet is delegated to Microsoft.NetApp/volumes.
    """

    nodes_subnet_id: str = Field(pattern=f"{_SUBNET}$", examples=[_EXAMPLE + "nodes"])
    nodes_cidr: Cidr
    netapp_subnet_id: str = Field(pattern=f"{_SUBNET}$", examples=[_EXAMPLE + "netapp"])
    endpoints_subnet_id: str = Field(pattern=f"{_SUBNET}$", examples=[_EXAMPLE + "endpoints"])
    outbound_cidr: Cidr = Field(examples=["203.0.113.10/32"])

    @property
    def vnet_id(self) -> str:
        """Return the VNet of the subnets."""
        return self.nodes_subnet_id.rpartition("/subnets/")[0]

    def problems(self, num_nodes: int) -> Iterable[Problem]:
        """Check that the subnets are three of one VNet, and that the nodes' has room."""
        key = "network.existing"
        yield from checks.holds(f"{key}.nodes_cidr", self.nodes_cidr, num_nodes, "the nodes")
        found = {"nodes_subnet_id": self.nodes_subnet_id}
        for name in ("netapp_subnet_id", "endpoints_subnet_id"):
            value = str(getattr(self, name))
            wrong = "another VNet" if value.rpartition("/subnets/")[0].lower() != self.vnet_id.lower() else ""
            wrong = wrong or ("a subnet that is used twice" if value in found.values() else "")
            found[name] = value
            if wrong:
                fix = fix_by_setting(f"{key}.{name}", f"{self.vnet_id}/subnets/<name>")
                yield Problem(f"{key}.{name}", wrong, f"a subnet of its own in {self.vnet_id}", fix, value)


class Network(NetworkSettings):
    """The VNet and its three subnets, the overlay's ranges, and the ranges with access.

    Subnets default to parts of `cidr`: half for nodes, an eighth each for NetApp and private endpoints. Without
    `authorized_cidrs` the API server, the registry and the storage account have only private addresses, and `pulumi up`
    must run inside the VNet (`api_access` inside); AKS cannot make a private cluster public later.
    `proximity_placement` puts the GPU nodes into one data centre. By default it does so for sizes without InfiniBand,
    whose nodes use TCP: an InfiniBand network is in one data centre anyway, and a reservation does not support the
    placement group.
    """

    api_access: Literal["authorized_ranges", "inside"] = "authorized_ranges"
    nodes_cidr: Cidr | None = Field(None, examples=["10.0.0.0/17"])
    netapp_cidr: Cidr | None = Field(None, examples=["10.0.128.0/19"])
    endpoints_cidr: Cidr | None = Field(None, examples=["10.0.160.0/19"])
    pods_cidr: Cidr = "10.244.0.0/16"
    services_cidr: Cidr = "10.245.0.0/16"
    proximity_placement: bool | None = None
    existing: ExistingNetwork | None = None

    @property
    def subnets(self) -> dict[str, str]:
        """Return each subnet's range by its key, given or derived from `cidr`."""
        if self.existing:
            return {"network.nodes_cidr": self.existing.nodes_cidr}
        outer = IPv4Network(self.cidr)
        first_half, eighths = next(outer.subnets()), list(outer.subnets(prefixlen_diff=3))
        return {
            "network.nodes_cidr": self.nodes_cidr or str(first_half),
            "network.netapp_cidr": self.netapp_cidr or str(eighths[4]),
            "network.endpoints_cidr": self.endpoints_cidr or str(eighths[5]),
        }

    def problems(self, num_nodes: int) -> Iterable[Problem]:
        """Yield ranges that Azure or AKS rejects, for a cluster of at most `num_nodes`."""
        if self.existing:
            keys, message = ("cidr", "nodes_cidr", "netapp_cidr", "endpoints_cidr"), "not a key of network.existing"
            yield from find_unused(self, keys, message, prefix="network.")
            yield from self.existing.problems(num_nodes)
            yield from _range_problems(self, num_nodes)
            return
        # An eighth must have room for NetApp's /28, half for the nodes and the five addresses that Azure reserves.
        num_addresses = 128 if self.nodes_cidr else max(128, 2 * (num_nodes + 5))
        purpose = f"{num_nodes} nodes, NetApp and private endpoints"
        too_small = checks.holds("network.cidr", self.cidr, num_addresses, purpose, 0)
        yield from too_small
        if not too_small:
            yield from _subnet_problems(self, num_nodes)
        yield from _range_problems(self, num_nodes)


def _subnet_problems(network: Network, num_nodes: int) -> Iterable[Problem]:
    """Yield problems of the configured subnets; the suggested range is free and inside the VNet."""
    ranges = network.subnets
    needs = {
        "network.nodes_cidr": (num_nodes, "the nodes"),
        "network.netapp_cidr": (8, "NetApp, which needs at least a /28"),
        "network.endpoints_cidr": (8, "the private endpoints"),
    }
    given = {key: cidr for key, cidr in ranges.items() if getattr(network, key.removeprefix("network."))}
    for key, cidr in given.items():
        others = {name: other for name, other in ranges.items() if name != key}
        problems = [*checks.inside(key, cidr, "network.cidr", network.cidr), *checks.holds(key, cidr, *needs[key])]
        problems += _overlaps(key, cidr, others)
        if problems:
            prefix = min(IPv4Network(cidr).prefixlen, _prefix(needs[key][0] + 5))
            ranges[key], problem = _move(problems[0], prefix, network.cidr, others.values())
            yield problem


def _range_problems(network: Network, num_nodes: int) -> Iterable[Problem]:
    """Yield problems among the ranges of the VNet, of an existing one only the nodes', the pods and the services."""
    pods, services, existing = "network.pods_cidr", "network.services_cidr", network.existing
    outer = {"network.existing.nodes_cidr": existing.nodes_cidr} if existing else {"network.cidr": network.cidr}
    ranges = outer | {pods: network.pods_cidr, services: network.services_cidr}
    purpose = f"a /24 for each of {num_nodes} nodes"
    size_problems = {pods: checks.holds(pods, network.pods_cidr, 256 * num_nodes, purpose, 0)}
    for number, (key, cidr) in enumerate(list(ranges.items())):
        earlier = dict(list(ranges.items())[:number])
        problems = [*_reserved(key, cidr), *_overlaps(key, cidr, earlier), *size_problems.get(key, ())]
        if problems and existing and key in outer:
            # The range is that of a subnet, which another value does not move.
            yield replace(problems[0], fix=fix_by_setting(key.replace("nodes_cidr", "nodes_subnet_id"), "<another>"))
        elif problems:
            prefix = min(IPv4Network(cidr).prefixlen, _prefix(256 * num_nodes) if key == pods else 32)
            others = [other for name, other in ranges.items() if name != key]
            ranges[key], problem = _move(problems[0], prefix, "10.0.0.0/8", others)
            yield problem


def _prefix(num_addresses: int) -> int:
    """Return the longest prefix with at least `num_addresses`."""
    return 32 - (num_addresses - 1).bit_length()


def _overlaps(key: str, cidr: str, others: Mapping[str, str]) -> list[Problem]:
    """Return a problem of `key` for each range that it overlaps."""
    return [problem for name, other in others.items() for problem in checks.disjoint({name: other, key: cidr})]


def _move(problem: Problem, prefix: int, outer: str, taken: Iterable[str]) -> tuple[str, Problem]:
    """Return the first free range of this size within `outer`, and the problem with it as its fix.

    Ranges are moved one after the other, each avoiding the previous fixes, which would overlap otherwise.
    """
    used = [IPv4Network(cidr) for cidr in taken]
    within = IPv4Network(outer)
    candidates = within.subnets(new_prefix=prefix) if prefix >= within.prefixlen else iter(())
    free = next((one for one in candidates if not any(one.overlaps(network) for network in used)), None)
    if free is None:
        return str(problem.value), replace(problem, fix=fix_by_removing(problem.key))
    return str(free), replace(problem, fix=fix_by_setting(problem.key, free))


def _reserved(key: str, cidr: str) -> list[Problem]:
    """Return a problem for each reserved range of AKS that is used; the caller adds the fix."""
    used = [reserved for reserved in _RESERVED if IPv4Network(reserved).overlaps(IPv4Network(cidr))]
    return [Problem(key, f"overlaps {reserved}, which AKS reserves", "another range", "", cidr) for reserved in used]
