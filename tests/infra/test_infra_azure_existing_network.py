"""Tests of `network.existing` on Azure: the stack uses the subnets, and creates, changes and deletes none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from azure_stack import AKS, NETAPP_VOLUME, OPEN, POOL, find_problems, parse_settings
from provider_mocks.recording import Recording

Stack = Callable[..., Recording]

VNET = "/subscriptions/s/resourceGroups/network/providers/Microsoft.Network/virtualNetworks/hub"
SUBNETS = {f"{name}_subnet_id": f"{VNET}/subnets/{name}" for name in ("nodes", "netapp", "endpoints")}
IDS = {**SUBNETS, "nodes_cidr": "10.9.0.0/20", "outbound_cidr": "198.51.100.9/32"}
EXISTING: dict[str, object] = {"network.existing": IDS}


@pytest.fixture
def made(stack: Stack) -> Recording:
    return stack("azure", EXISTING | OPEN)


def test_no_part_of_the_network_belongs_to_the_stack(made: Recording) -> None:
    found = {item.type.rpartition(":")[2] for item in made.registrations if ":network:" in item.type}
    assert found <= {"PrivateEndpoint", "PrivateDnsZoneGroup"}, found


def test_nodes_netapp_and_endpoints_are_in_the_existing_subnets(made: Recording) -> None:
    assert made.one(POOL).inputs["vnetSubnetID"] == f"{VNET}/subnets/nodes"
    volume = made.one(NETAPP_VOLUME).inputs
    assert volume["subnetId"] == f"{VNET}/subnets/netapp"
    assert volume["exportPolicy"]["rules"][0]["allowedClients"] == "10.9.0.0/20"
    endpoints = made.of_type("azure-native:network:PrivateEndpoint")
    assert {item.inputs["subnet"]["id"] for item in endpoints} == {f"{VNET}/subnets/endpoints"}


def test_the_api_server_lets_the_nodes_in(made: Recording) -> None:
    ranges = made.one(AKS).inputs["apiServerAccessProfile"]["authorizedIPRanges"]
    assert ranges[-1] == "198.51.100.9/32", "the nodes reach a public API server through their NAT gateway"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cidr": "10.1.0.0/16"}, "network.cidr"),
        ({"existing": {**IDS, "nodes_cidr": "10.9.0.0/30"}}, "network.existing.nodes_cidr"),
        ({"existing": {**IDS, "netapp_subnet_id": IDS["nodes_subnet_id"]}}, "network.existing.netapp_subnet_id"),
        (
            {"existing": {**IDS, "endpoints_subnet_id": IDS["endpoints_subnet_id"].replace("hub", "spoke")}},
            "network.existing.endpoints_subnet_id",
        ),
        ({"pods_cidr": "10.9.0.0/16"}, "network.pods_cidr"),
        ({"pods_cidr": "10.240.0.0/24"}, "network.pods_cidr"),
        ({"services_cidr": "172.30.0.0/20"}, "network.services_cidr"),
    ],
)
def test_what_contradicts_the_existing_network_is_refused(changes: dict[str, object], key: str) -> None:
    parse_settings({"network": {"existing": IDS}})
    assert key in find_problems({"network": {"existing": IDS, **changes}})
