"""Whether the subnets of `network.existing` have what the stack needs; the stack never changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from ipaddress import IPv4Network
from typing import Any

from infra.clouds.azure.addresses import PRIVATE_ZONES, ExistingNetwork
from infra.clouds.azure.doctor.causes import EXISTING_NETWORK
from infra.clouds.azure.doctor.client import Arm
from infra.clouds.azure.doctor.firewalls import Flow, blocking_rule
from infra.clouds.azure.settings import Settings
from infra.findings.model import Finding, ok, problem, skipped

_VERSION = "2024-05-01"
_GRAPH = "/providers/Microsoft.ResourceGraph/resources?api-version=2022-10-01"
_LINKS = "microsoft.network/privatednszones/virtualnetworklinks"
_NETAPP = "Microsoft.NetApp/volumes"
#: What `up` does outside the stack's resource group, and where: it gives the control plane a role on the nodes' subnet,
#: puts nodes and endpoints into subnets, and links DNS zones to the VNet.
_ACTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Microsoft.Authorization/roleAssignments/write", ("nodes_subnet_id",)),
    ("Microsoft.Network/virtualNetworks/subnets/join/action", ("nodes_subnet_id", "endpoints_subnet_id")),
    ("Microsoft.Network/virtualNetworks/join/action", ("vnet_id",)),
)
#: The largest prefix of NetApp's subnet: https://learn.microsoft.com/azure/azure-netapp-files/azure-netapp-files-delegate-subnet
_NETAPP_PREFIX = 28
#: Azure's resolver, which knows private zones; other servers must forward to it.
_RESOLVER = "168.63.129.16"
#: A problem and the command that fixes it.
Result = tuple[str, str]


def existing_network(arm: Arm, settings: Settings, *, is_up: bool) -> Finding | list[Finding]:
    """Check the subnets, their room, NAT, rules and DNS; `is_up` leaves out what the stack itself uses."""
    existing = settings.network.existing
    if existing is None:
        return skipped("the stack creates its own network")
    vnet = _find(arm, existing.vnet_id)
    if vnet is None:
        fix = (
            "az network vnet list --output table, then: pulumi config set --path network.existing.nodes_subnet_id <id>"
        )
        return problem(EXISTING_NETWORK, f"no VNet {existing.vnet_id}", fix=fix)
    network = _Network(arm, settings, existing, vnet)
    results = [*network.place_problems()]
    if not results:
        results += [*network.subnet_problems(), *network.outbound_problems(), *network.rule_problems()]
        results += [] if is_up else [*network.range_problems(), *network.room_problems(), *network.new_problems()]
    found = [problem(EXISTING_NETWORK, result, fix=fix) for result, fix in results]
    return found or network.summary()


def _find(arm: Arm, identifier: str) -> Mapping[str, Any] | None:
    """Return a resource, None if it does not exist."""
    from azure.core.exceptions import HttpResponseError

    try:
        return arm.get(identifier, _VERSION)
    except HttpResponseError as error:
        if error.status_code != HTTPStatus.NOT_FOUND:
            raise
        return None


@dataclass(frozen=True)
class _Network:
    """The VNet of a stack; each method yields problems with their fixes."""

    arm: Arm
    settings: Settings
    existing: ExistingNetwork
    vnet: Mapping[str, Any]

    @cached_property
    def subnets(self) -> dict[str, Mapping[str, Any]]:
        """Return the VNet's subnets by their lowercase ids."""
        return {str(item["id"]).lower(): item["properties"] for item in self.vnet["properties"].get("subnets", ())}

    @property
    def ids(self) -> dict[str, str]:
        """Return the ids of the stack's three subnets by the keys' first words."""
        names = ("nodes", "netapp", "endpoints")
        return {name: str(getattr(self.existing, f"{name}_subnet_id")) for name in names}

    def _subnet(self, which: str) -> Mapping[str, Any]:
        """Return one of the three subnets."""
        return self.subnets[self.ids[which].lower()]

    @property
    def ranges(self) -> list[str]:
        """Return the VNet's IPv4 ranges."""
        return [cidr for cidr in self.vnet["properties"]["addressSpace"]["addressPrefixes"] if ":" not in cidr]

    def place_problems(self) -> Iterator[Result]:
        """Yield another location, missing subnets, and a range of the nodes that is not their subnet's."""
        location = str(self.vnet["location"]).lower().replace(" ", "")
        if location != self.settings.location:
            fix = f"another VNet, or: pulumi config set azure-native:location {location}"
            yield f"{self.vnet['name']} is in {location}, the stack in {self.settings.location}", fix
        for which, identifier in self.ids.items():
            if identifier.lower() not in self.subnets:
                key = f"network.existing.{which}_subnet_id"
                listing = "az network vnet subnet list --resource-group <group> --vnet-name"
                fix = f"{listing} {self.vnet['name']}, then: pulumi config set --path {key} <id>"
                yield f"no subnet {_name(identifier)} in {self.vnet['name']}", fix
            elif which == "nodes" and self.existing.nodes_cidr not in (prefixes := _prefixes(self._subnet(which))):
                fix = f"pulumi config set --path network.existing.nodes_cidr {prefixes[0]}"
                yield f"{_name(identifier)} has {', '.join(prefixes)}, not {self.existing.nodes_cidr}", fix

    def subnet_problems(self) -> Iterator[Result]:
        """Yield delegations: NetApp's subnet needs its own, and the others accept none.

        MicrosoftDocs/azure-docs#69774 (nodes, SubnetIsDelegated) and #47048 (private endpoints).
        """
        for which, identifier in self.ids.items():
            services = [item["properties"]["serviceName"] for item in self._subnet(which).get("delegations", ())]
            update = f"az network vnet subnet update --ids {identifier}"
            if which == "netapp" and _NETAPP.lower() not in [service.lower() for service in services]:
                now = f"is delegated to {services[0]}" if services else "has no delegation"
                yield f"{_name(identifier)} {now}, and NetApp needs {_NETAPP}", f"{update} --delegations {_NETAPP}"
            elif which != "netapp" and services:
                result = f"{_name(identifier)} is delegated to {services[0]}, which keeps {which} out"
                yield result, f"a subnet without delegation, or: {update} --remove delegations"

    def outbound_problems(self) -> Iterator[Result]:
        """Yield a missing NAT gateway, a route around it, and addresses that `outbound_cidr` does not admit."""
        subnet, identifier = self._subnet("nodes"), self.existing.nodes_subnet_id
        name, update = _name(identifier), f"az network vnet subnet update --ids {identifier}"
        gateway = subnet.get("natGateway")
        if not gateway:
            yield f"{name} has no NAT gateway, which AKS requires of it", f"{update} --nat-gateway <id>"
            return
        for route in self._default_routes(subnet):
            # A route of the user's own has precedence over a NAT gateway.
            result = f"{name} sends 0.0.0.0/0 to {route['properties']['nextHopType']}, past its NAT gateway"
            yield result, f"az network route-table route delete --ids {route['id']}"
        addresses = self._outbound(str(gateway["id"]))
        outside = [cidr for cidr in addresses if not _within(cidr, self.existing.outbound_cidr)]
        if outside:
            result = f"the nodes leave by {', '.join(outside)} of {_name(gateway['id'])}"
            fix = f"pulumi config set --path network.existing.outbound_cidr {outside[0]}"
            # AKS gets one range, so that a second address would need a prefix.
            fix = fix if len(addresses) == 1 else f"a NAT gateway with one public address or prefix, then: {fix}"
            yield f"{result}, and the API server admits {self.existing.outbound_cidr}", fix

    def _default_routes(self, subnet: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the routes of the subnet's table that lead all traffic elsewhere than to the internet."""
        table = subnet.get("routeTable")
        routes = self.arm.get(table["id"], _VERSION)["properties"].get("routes", ()) if table else ()
        defaults = [route for route in routes if route["properties"]["addressPrefix"] == "0.0.0.0/0"]
        return [route for route in defaults if route["properties"]["nextHopType"] != "Internet"]

    def _outbound(self, gateway: str) -> list[str]:
        """Return the public ranges of a NAT gateway: its addresses and its prefixes."""
        properties = self.arm.get(gateway, _VERSION)["properties"]
        kinds = (("publicIpAddresses", "ipAddress"), ("publicIpPrefixes", "ipPrefix"))
        found = [
            self.arm.get(item["id"], _VERSION)["properties"].get(key)
            for kind, key in kinds
            for item in properties.get(kind) or ()
        ]
        return [str(IPv4Network(cidr)) for cidr in found if cidr and ":" not in cidr]

    def rule_problems(self) -> Iterator[Result]:
        """Yield rules of the subnets' security groups that block nodes and pods, NFS, or the private endpoints.

        The overlay's pods are not in the VNet, which Azure's default rule admits:
        https://learn.microsoft.com/azure/aks/concepts-network-azure-cni-overlay
        """
        nodes, pods = self.existing.nodes_cidr, self.settings.network.pods_cidr
        policies = str(self._subnet("endpoints").get("privateEndpointNetworkPolicies", "Disabled"))
        flows = {
            "nodes": [Flow(nodes, nodes), Flow(nodes, pods), Flow(pods, pods)],
            "netapp": [Flow(nodes, _prefixes(self._subnet("netapp"))[0], 2049)],
            # Without policies a private endpoint ignores the rules.
            "endpoints": [Flow(nodes, _prefixes(self._subnet("endpoints"))[0], 443)]
            if policies in ("Enabled", "NetworkSecurityGroupEnabled")
            else [],
        }
        for which, expected in flows.items():
            group = self._subnet(which).get("networkSecurityGroup")
            if not group or not expected:
                continue
            rules = self.arm.get(group["id"], _VERSION)["properties"].get("securityRules", ())
            blocks = [(flow, rule) for flow in expected if (rule := blocking_rule(rules, flow, self.ranges))]
            for flow, rule in blocks[:1]:
                port = f"port {flow.port}" if flow.port else "all ports"
                result = f"rule {rule} of {_name(group['id'])} blocks {port} from {flow.source} to {flow.destination}"
                yield result, _allow(group["id"], [one for one, _ in blocks])

    def range_problems(self) -> Iterator[Result]:
        """Yield the ranges of pods and services that overlap the VNet or one that is peered with it."""
        peerings = [item["properties"] for item in self.vnet["properties"].get("virtualNetworkPeerings", ())]
        remote = [
            cidr for item in peerings for cidr in (item.get("remoteAddressSpace") or {}).get("addressPrefixes", ())
        ]
        taken = [*self.ranges, *(cidr for cidr in remote if ":" not in cidr)]
        own = {"pods_cidr": self.settings.network.pods_cidr, "services_cidr": self.settings.network.services_cidr}
        for key, cidr in own.items():
            used = [one for one in taken if IPv4Network(one).overlaps(IPv4Network(cidr))]
            if used:
                others = [IPv4Network(one) for one in (*taken, *(other for name, other in own.items() if name != key))]
                blocks = IPv4Network("10.0.0.0/8").subnets(new_prefix=max(9, IPv4Network(cidr).prefixlen))
                free = next((block for block in blocks if not any(block.overlaps(one) for one in others)), "<range>")
                result = f"network.{key} {cidr} overlaps {', '.join(used)} of {self.vnet['name']} or of its peers"
                yield result, f"pulumi config set --path network.{key} {free}"

    def room_problems(self) -> Iterator[Result]:
        """Yield subnets with too few free addresses: pods are in the overlay and take none."""
        usages = self.arm.list_all(f"{self.existing.vnet_id}/usages", _VERSION)
        free = {str(item["id"]).lower(): int(item["limit"] - item["currentValue"]) for item in usages}
        others = self.settings.system.num_nodes + 1  # An upgrade of the system pool adds one node.
        others += 0 if self.settings.network.authorized_cidrs else 1  # The private API server's endpoint.
        # The registry's endpoint has a second address, for its data.
        needed = {"nodes": self.settings.gpu.nodes.max + others, "endpoints": self.settings.num_private_endpoints + 1}
        for which, count in needed.items():
            room = free.get(self.ids[which].lower(), count)
            if room < count:
                result = f"{_name(self.ids[which])} has {room} free addresses, {count} needed for {which}"
                fewer = f", or: pulumi config set --path gpu.nodes.max {max(0, room - others)}"
                yield result, "a larger subnet" + (fewer if which == "nodes" else "")
        size = IPv4Network(_prefixes(self._subnet("netapp"))[0])
        if size.prefixlen > _NETAPP_PREFIX:
            result = f"{_name(self.ids['netapp'])} is {size}, and NetApp needs at least a /{_NETAPP_PREFIX}"
            yield result, "a larger subnet: az network vnet subnet update --address-prefixes <range>"

    def new_problems(self) -> Iterator[Result]:
        """Yield what stops `up` in a VNet of others: missing permissions, and a linked zone of the same name."""
        for action, scopes in _ACTIONS:
            if not all(self.arm.allows(getattr(self.existing, scope), action) for scope in scopes):
                role = "User Access Administrator" if "roleAssignments" in action else "Network Contributor"
                fix = f"az role assignment create --assignee <you> --role '{role}' --scope {self.existing.vnet_id}"
                yield f"these credentials may not do {action} in {self.vnet['name']}", fix
        kinds = ["blob", "dfs", "registry", *(["grafana"] if self.settings.monitoring.managed else [])]
        zones = {PRIVATE_ZONES[kind] for kind in kinds}
        for link in self._linked_zones():
            zone = link.lower().partition("/privatednszones/")[2].partition("/")[0]
            if zone in zones:
                # MicrosoftDocs/azure-aks-docs#212: a VNet cannot be linked to two zones of one name.
                result = f"{self.vnet['name']} has a private zone {zone}, and the stack adds its own"
                yield (
                    result,
                    f"another VNet, or, if nothing uses it: az network private-dns link vnet delete --ids {link}",
                )

    def _linked_zones(self) -> list[str]:
        """Return the links of private DNS zones to the VNet, of all subscriptions that these credentials may read."""
        query = (
            f"resources | where type =~ '{_LINKS}' | where properties.virtualNetwork.id =~ '{self.existing.vnet_id}'"
        )
        return [str(row["id"]) for row in self.arm.post(_GRAPH, {"query": f"{query} | project id"})["data"]]

    def summary(self) -> Finding:
        """Return the finding without problems; DNS servers of one's own get a hint, as they cannot be checked."""
        result = f"{self.vnet['name']} with 3 subnets: NAT, delegation, rules and room"
        servers = (self.vnet["properties"].get("dhcpOptions") or {}).get("dnsServers") or ()
        if not servers:
            return ok(result)
        fix = EXISTING_NETWORK.format_fix({"fix": f"DNS servers that forward private zones to {_RESOLVER}"})
        return Finding("ok", f"{result}; DNS by {', '.join(servers)}", fix, EXISTING_NETWORK.key)


def _name(identifier: str) -> str:
    """Return the last part of an id."""
    return str(identifier).rpartition("/")[2]


def _prefixes(subnet: Mapping[str, Any]) -> list[str]:
    """Return the IPv4 ranges of a subnet."""
    found = subnet.get("addressPrefixes") or [subnet["addressPrefix"]]
    return [str(cidr) for cidr in found if ":" not in cidr]


def _within(cidr: str, outer: str) -> bool:
    """Return whether a range is part of another one."""
    return IPv4Network(cidr).subnet_of(IPv4Network(outer))


def _allow(group: str, flows: list[Flow]) -> str:
    """Return the command that adds a rule for the flows to a security group."""
    sources, destinations = (
        " ".join(sorted({getattr(flow, side) for flow in flows})) for side in ("source", "destination")
    )
    name, of_group = _name(group), group.partition("/resourceGroups/")[2].partition("/")[0]
    protocol, port = ("Tcp", flows[0].port) if flows[0].port else ("'*'", "'*'")
    return (
        f"az network nsg rule create --resource-group {of_group} --nsg-name {name} --name torchrec --priority 100"
        f" --protocol {protocol} --source-address-prefixes {sources} --destination-address-prefixes {destinations}"
        f" --destination-port-ranges {port}"
    )
