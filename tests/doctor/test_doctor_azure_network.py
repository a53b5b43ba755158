"""The doctor's check of existing subnets on Azure, against recorded responses of its management API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_answers import Recorded

from infra.clouds.azure.doctor.client import Arm
from infra.clouds.azure.doctor.firewalls import Flow, blocking_rule
from infra.clouds.azure.doctor.networks import existing_network
from infra.clouds.azure.settings import Settings
from infra.findings.model import Context, Finding

Contexts = Callable[..., Context]
GROUP = "/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/hub/providers/Microsoft.Network"
VNET = f"{GROUP}/virtualNetworks/hub"
GATEWAY, ADDRESS, TABLE = f"{GROUP}/natGateways/out", f"{GROUP}/publicIPAddresses/out", f"{GROUP}/routeTables/all"
NSG = f"{GROUP}/networkSecurityGroups/nodes"
IDS = {name: f"{VNET}/subnets/{name}" for name in ("nodes", "netapp", "endpoints")}
LINK = f"{GROUP}/privateDnsZones/privatelink.blob.core.windows.net/virtualNetworkLinks/hub"
RANGES = {"nodes": "10.9.0.0/24", "netapp": "10.9.1.0/28", "endpoints": "10.9.2.0/27"}
EXISTING = {
    "nodes_subnet_id": IDS["nodes"],
    "nodes_cidr": RANGES["nodes"],
    "netapp_subnet_id": IDS["netapp"],
    # Azure ignores the case of ids.
    "endpoints_subnet_id": IDS["endpoints"].replace("/endpoints", "/Endpoints"),
    "outbound_cidr": "203.0.113.10/32",
}
SUBNET_IDS = (EXISTING["nodes_subnet_id"], EXISTING["endpoints_subnet_id"])


class Hub:
    """A VNet with the three subnets that a stack needs; a test breaks a part of it."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.subnets: dict[str, dict[str, Any]] = {name: {"addressPrefix": cidr} for name, cidr in RANGES.items()}
        self.subnets["nodes"]["natGateway"] = {"id": GATEWAY}
        self.subnets["netapp"]["delegations"] = [{"properties": {"serviceName": "Microsoft.Netapp/volumes"}}]
        self.properties: dict[str, Any] = {"addressSpace": {"addressPrefixes": ["10.9.0.0/16"]}}
        self.location = "eastus"
        self.used = dict.fromkeys(RANGES, 0)
        self.links: list[str] = []
        self.actions = self.vnet_actions = ["*"]
        recorded.put(GATEWAY, {"properties": {"publicIpAddresses": [{"id": ADDRESS}]}})
        recorded.put(ADDRESS, {"properties": {"ipAddress": "203.0.113.10"}})

    def serve(self) -> None:
        """Put the hub into the server's responses."""
        listed = [{"id": IDS[name], "name": name, "properties": item} for name, item in self.subnets.items()]
        vnet = {"name": "hub", "location": self.location, "properties": self.properties | {"subnets": listed}}
        self.recorded.put(VNET, vnet)
        limits = {"nodes": 251, "netapp": 11, "endpoints": 27}
        usages = [{"id": IDS[name], "limit": float(limits[name]), "currentValue": float(self.used[name])}
                  for name in RANGES]  # fmt: skip
        self.recorded.put(f"{VNET}/usages", {"value": usages})
        for scope, actions in ((VNET, self.vnet_actions), *((identifier, self.actions) for identifier in SUBNET_IDS)):
            roles = {"value": [{"actions": actions, "notActions": []}]}
            self.recorded.put(f"{scope}/providers/Microsoft.Authorization/permissions", roles)

        def graph(_: Mapping[str, str], body: bytes) -> tuple[int, object]:
            assert f"=~ '{VNET}'" in json.loads(body)["query"]
            return 200, {"data": [{"id": link} for link in self.links]}

        self.recorded.answers["/providers/Microsoft.ResourceGraph/resources"] = graph

    def add_rules(self, subnet: str, *rules: dict[str, Any]) -> None:
        """Give a subnet a security group with these rules of its own."""
        self.subnets[subnet]["networkSecurityGroup"] = {"id": NSG}
        self.recorded.put(NSG, {"properties": {"securityRules": list(rules)}})


def rule(name: str, access: str, source: str, destination: str, port: str = "*", priority: int = 200) -> dict[str, Any]:
    """Return one inbound rule as Azure lists it."""
    properties = {
        "priority": priority, "direction": "Inbound", "access": access, "protocol": "*",
        "sourceAddressPrefix": source, "sourcePortRange": "*", "destinationPortRange": port,
        "destinationAddressPrefixes": [destination],
    }  # fmt: skip
    return {"name": name, "properties": properties}


@pytest.fixture
def hub(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return a hub without any problem."""
    import azure.identity

    def credential(**_: object) -> Any:
        token = SimpleNamespace(token="a-token", expires_on=4_000_000_000)
        return SimpleNamespace(get_token=lambda *_, **__: token)

    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", credential)
    return Hub(recorded)


def check(
    context: Contexts, hub: Hub, settings: Mapping[str, object] | None = None, *, is_up: bool = False
) -> list[Finding]:
    """Return the findings about a stack in this hub."""
    hub.serve()
    parsed = context("azure", {"network.existing": EXISTING, **(settings or {})}).settings
    assert isinstance(parsed, Settings)
    found = existing_network(Arm(hub.recorded.url, lambda: "unused"), parsed, is_up=is_up)
    return found if isinstance(found, list) else [found]


def test_subnets_with_everything_that_a_stack_needs_are_ok(hub: Hub, context: Contexts) -> None:
    [found] = check(context, hub)
    assert (found.status, found.result) == ("ok", "hub with 3 subnets: NAT, delegation, rules and room"), found


def test_a_stack_with_its_own_network_skips_the_check(hub: Hub, context: Contexts) -> None:
    settings = context("azure").settings
    assert isinstance(settings, Settings)
    found = existing_network(Arm(hub.recorded.url, lambda: "unused"), settings, is_up=False)
    assert isinstance(found, Finding)
    assert found.status == "skipped"


def test_a_vnet_that_does_not_exist_is_a_problem(hub: Hub, context: Contexts) -> None:
    hub.serve()
    hub.recorded.answers.pop(VNET)
    parsed = context("azure", {"network.existing": EXISTING}).settings
    assert isinstance(parsed, Settings)
    found = existing_network(Arm(hub.recorded.url, lambda: "unused"), parsed, is_up=False)
    assert isinstance(found, Finding)
    assert (found.status, found.result) == ("problem", f"no VNet {VNET}")


def test_location_subnets_and_range_must_be_those_of_the_settings(hub: Hub, context: Contexts) -> None:
    hub.location = "West Europe"
    hub.subnets["nodes"]["addressPrefixes"] = ["10.9.8.0/22"]
    del hub.subnets["endpoints"]
    results = [item.result for item in check(context, hub)]
    assert results == [
        "hub is in westeurope, the stack in eastus",
        "nodes has 10.9.8.0/22, not 10.9.0.0/24",
        "no subnet Endpoints in hub",
    ]


@pytest.mark.parametrize(
    ("subnet", "services", "result", "fix"),
    [
        ("netapp", [], "netapp has no delegation, and NetApp needs Microsoft.NetApp/volumes", "--delegations"),
        ("netapp", ["Microsoft.Sql/x"], "netapp is delegated to Microsoft.Sql/x, and NetApp needs", "--delegations"),
        ("nodes", ["Microsoft.ContainerService/managedClusters"], "which keeps nodes out", "--remove delegations"),
        ("endpoints", ["Microsoft.Web/serverFarms"], "which keeps endpoints out", "--remove delegations"),
    ],
)
def test_only_the_subnet_of_netapp_is_delegated(
    hub: Hub, context: Contexts, subnet: str, services: list[str], result: str, fix: str
) -> None:
    hub.subnets[subnet]["delegations"] = [{"properties": {"serviceName": service}} for service in services]
    [found] = check(context, hub)
    assert result in found.result
    assert fix in found.fix


def test_nodes_need_a_nat_gateway(hub: Hub, context: Contexts) -> None:
    del hub.subnets["nodes"]["natGateway"]
    [found] = check(context, hub)
    assert found.fix == f"az network vnet subnet update --ids {IDS['nodes']} --nat-gateway <id>"


def test_a_route_to_a_firewall_goes_around_the_nat_gateway(hub: Hub, context: Contexts) -> None:
    hub.subnets["nodes"]["routeTable"] = {"id": TABLE}
    route = {"addressPrefix": "0.0.0.0/0", "nextHopType": "VirtualAppliance"}
    private = {"addressPrefix": "10.0.0.0/8", "nextHopType": "VirtualAppliance"}
    routes = [{"id": f"{TABLE}/routes/{index}", "properties": item} for index, item in enumerate((private, route))]
    hub.recorded.put(TABLE, {"properties": {"routes": routes}})
    [found] = check(context, hub)
    assert found.result == "nodes sends 0.0.0.0/0 to VirtualAppliance, past its NAT gateway"
    assert found.fix == f"az network route-table route delete --ids {TABLE}/routes/1"


def test_the_api_server_must_admit_every_address_of_the_nat_gateway(hub: Hub, context: Contexts) -> None:
    prefix = f"{GROUP}/publicIPPrefixes/more"
    hub.recorded.put(
        GATEWAY, {"properties": {"publicIpAddresses": [{"id": ADDRESS}], "publicIpPrefixes": [{"id": prefix}]}}
    )
    hub.recorded.put(prefix, {"properties": {"ipPrefix": "198.51.100.0/31"}})
    [found] = check(context, hub)
    assert found.result == "the nodes leave by 198.51.100.0/31 of out, and the API server admits 203.0.113.10/32"
    assert found.fix.startswith("a NAT gateway with one public address or prefix")
    hub.recorded.put(GATEWAY, {"properties": {"publicIpPrefixes": [{"id": prefix}]}})
    [found] = check(context, hub)
    assert found.fix == "pulumi config set --path network.existing.outbound_cidr 198.51.100.0/31"


def test_pods_of_the_overlay_need_a_rule_because_they_are_not_in_the_vnet(hub: Hub, context: Contexts) -> None:
    hub.add_rules("nodes")
    [found] = check(context, hub)
    assert found.result == "rule DenyAllInBound of nodes blocks all ports from 10.9.0.0/24 to 10.244.0.0/16"
    assert (
        "--source-address-prefixes 10.244.0.0/16 10.9.0.0/24 --destination-address-prefixes 10.244.0.0/16" in found.fix
    )
    pods = rule("pods", "Allow", "*", "10.244.0.0/16")
    hub.add_rules("nodes", pods)
    assert check(context, hub)[0].status == "ok"


def test_rules_must_admit_nfs_and_the_private_endpoints(hub: Hub, context: Contexts) -> None:
    hub.add_rules("netapp", rule("only-ssh", "Deny", "*", "*"))
    assert "rule only-ssh of nodes blocks port 2049 from 10.9.0.0/24 to 10.9.1.0/28" in check(context, hub)[0].result
    hub.add_rules("netapp", rule("only-ssh", "Deny", "*", "*"), rule("nfs", "Allow", "10.9.0.0/16", "*", "2049", 100))
    hub.subnets["endpoints"] |= {"networkSecurityGroup": {"id": NSG}, "privateEndpointNetworkPolicies": "Enabled"}
    [found] = check(context, hub)
    assert "rule only-ssh of nodes blocks port 443" in found.result
    hub.subnets["endpoints"]["privateEndpointNetworkPolicies"] = "Disabled"
    assert check(context, hub)[0].status == "ok", "without policies a private endpoint ignores the rules"


@pytest.mark.parametrize(
    ("rules", "blocked_by"),
    [
        ([], ""),
        ([rule("web", "Deny", "Internet", "*")], ""),
        ([rule("part", "Deny", "10.9.0.128/25", "*", "2000-3000")], "part"),
        ([rule("later", "Deny", "*", "*", "*", 300), rule("first", "Allow", "VirtualNetwork", "*")], ""),
        ([rule("all", "Deny", "*", "*"), rule("half", "Allow", "10.9.0.0/25", "*", "*", 100)], "all"),
        ([rule("other-port", "Deny", "*", "*", "2048")], ""),
    ],
)
def test_the_first_rule_that_matches_decides(rules: list[dict[str, Any]], blocked_by: str) -> None:
    flow = Flow("10.9.0.0/24", "10.9.1.0/28", 2049)
    assert blocking_rule(rules, flow, ["10.9.0.0/16"]) == blocked_by


def test_pods_and_services_must_not_overlap_the_vnet_or_its_peers(hub: Hub, context: Contexts) -> None:
    peer = {"remoteAddressSpace": {"addressPrefixes": ["10.245.0.0/17"]}}
    hub.properties["virtualNetworkPeerings"] = [{"properties": peer}]
    [found] = check(context, hub)
    assert found.result.startswith("network.services_cidr 10.245.0.0/16 overlaps 10.245.0.0/17 of hub")
    assert found.fix == "pulumi config set --path network.services_cidr 10.0.0.0/16"


def test_each_subnet_needs_room(hub: Hub, context: Contexts) -> None:
    hub.used = {"nodes": 249, "endpoints": 24, "netapp": 0}
    hub.subnets["netapp"]["addressPrefix"] = "10.9.1.0/29"
    found = check(context, hub)
    assert [item.result for item in found] == [
        "nodes has 2 free addresses, 6 needed for nodes",
        "Endpoints has 3 free addresses, 5 needed for endpoints",
        "netapp is 10.9.1.0/29, and NetApp needs at least a /28",
    ]
    assert found[0].fix == "a larger subnet, or: pulumi config set --path gpu.nodes.max 0"
    public = {"network.api_access": "authorized_ranges", "network.authorized_cidrs": ["198.51.100.7/32"]}
    assert "5 needed for nodes" in check(context, hub, public)[0].result, "a private API server takes one more"
    assert check(context, hub, is_up=True)[0].status == "ok", "the stack itself uses the addresses"


def test_a_linked_zone_of_the_same_name_is_a_problem(hub: Hub, context: Contexts) -> None:
    hub.links = [LINK, LINK.replace("blob.core", "queue.core")]
    [found] = check(context, hub)
    assert "hub has a private zone privatelink.blob.core.windows.net, and the stack adds its own" in found.result
    assert found.fix.endswith(f"az network private-dns link vnet delete --ids {LINK}")


def test_a_reader_of_the_hub_may_not_join_it(hub: Hub, context: Contexts) -> None:
    hub.actions = ["*/read", "Microsoft.Network/*"]
    [found] = check(context, hub)
    assert "Microsoft.Authorization/roleAssignments/write in hub" in found.result
    assert "--role 'User Access Administrator'" in found.fix
    hub.actions, hub.vnet_actions = ["*"], ["*/read"]
    [found] = check(context, hub)
    assert "virtualNetworks/join/action in hub" in found.result, "a role on subnets does not admit a link of a zone"
    assert f"--role 'Network Contributor' --scope {VNET}" in found.fix


def test_other_dns_servers_get_a_hint(hub: Hub, context: Contexts) -> None:
    hub.properties["dhcpOptions"] = {"dnsServers": ["10.1.0.4"]}
    [found] = check(context, hub)
    assert found.status == "ok"
    assert "168.63.129.16" in found.fix
