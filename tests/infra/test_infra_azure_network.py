"""Azure: subnets, firewalls, outbound traffic and placement groups."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from azure_stack import (
    AKS,
    FIREWALL,
    NETAPP_VOLUME,
    PLACEMENT,
    POOL,
    RESERVED,
    SUBNET,
    TRIAL,
    Stack,
    parse_settings,
    subnet,
)


def test_only_netapps_subnet_is_delegated(stack: Stack) -> None:
    recording = stack("azure")
    delegated = {
        item.name: [one["serviceName"] for one in item.inputs.get("delegations", [])]
        for item in recording.of_type(SUBNET)
    }
    assert delegated == {
        "azure-network-nodes-subnet": [],
        "azure-network-netapp-subnet": ["Microsoft.NetApp/volumes"],
        "azure-network-endpoints-subnet": [],
    }
    assert recording.one(NETAPP_VOLUME).inputs["subnetId"] == "azure-network-netapp-subnet-id"


def test_the_subnets_of_an_existing_stack_keep_their_ranges(stack: Stack) -> None:
    found = {item.name: item.inputs["addressPrefix"] for item in stack("azure").of_type(SUBNET)}
    assert found == {
        "azure-network-nodes-subnet": "10.0.0.0/17",
        "azure-network-netapp-subnet": "10.0.128.0/19",
        "azure-network-endpoints-subnet": "10.0.160.0/19",
    }, "a changed range replaces its subnet and everything in it"


def test_every_subnet_has_a_firewall_that_blocks_the_internet(stack: Stack) -> None:
    recording = stack("azure")
    assert all(item.inputs["networkSecurityGroup"] for item in recording.of_type(SUBNET))
    rules = [rule for item in recording.of_type(FIREWALL) for rule in item.inputs["securityRules"]]
    inward = [rule for rule in rules if rule["access"] == "Allow" and rule["direction"] == "Inbound"]
    sources = {
        source
        for rule in inward
        for source in [rule.get("sourceAddressPrefix"), *rule.get("sourceAddressPrefixes", [])]
        if source
    }
    assert sources == {"10.0.0.0/17", "10.244.0.0/16", "VirtualNetwork"}


def test_pods_on_different_nodes_reach_each_other(stack: Stack) -> None:
    (rule,) = stack("azure").one(FIREWALL, "azure-network-nodes-nsg").inputs["securityRules"]
    assert "10.244.0.0/16" in rule["sourceAddressPrefixes"], (
        "Azure's default rule admits only the VNet, which excludes the overlay's addresses"
    )


def test_only_nodes_reach_netapp_and_only_by_nfs(stack: Stack) -> None:
    recording = stack("azure")
    allowed, denied = recording.one(FIREWALL, "azure-network-netapp-nsg").inputs["securityRules"]
    assert (allowed["sourceAddressPrefix"], allowed["destinationPortRange"]) == ("10.0.0.0/17", "2049")
    assert (denied["access"], denied["sourceAddressPrefix"], denied["priority"]) == ("Deny", "*", 4096)
    (export,) = recording.one(NETAPP_VOLUME).inputs["exportPolicy"]["rules"]
    assert export["allowedClients"] == "10.0.0.0/17"


def test_root_writes_to_netapp_only_if_pods_run_as_root(stack: Stack) -> None:
    def root_access(overrides: dict[str, str]) -> bool:
        (export,) = stack("azure", overrides).one(NETAPP_VOLUME).inputs["exportPolicy"]["rules"]
        return bool(export["hasRootAccess"])

    assert root_access({"gpu.instance_type": "Standard_ND96isr_H100_v5"})
    assert not root_access({"gpu.instance_type": "Standard_NC4as_T4_v3"})


def test_nodes_have_no_public_address_and_use_the_nat_gateway(stack: Stack) -> None:
    recording = stack("azure")
    cluster = recording.one(AKS).inputs
    pools = [cluster["agentPoolProfiles"][0], recording.one(POOL).inputs]
    assert [pool["enableNodePublicIP"] for pool in pools] == [False, False]
    assert cluster["networkProfile"]["outboundType"] == "userAssignedNATGateway"
    assert subnet(recording, "nodes").inputs["natGateway"]["id"] == "azure-network-nat-id"
    assert all(item.inputs["defaultOutboundAccess"] is False for item in recording.of_type(SUBNET))


def test_subnets_of_one_vnet_are_created_one_after_another(stack: Stack) -> None:
    recording = stack("azure")
    assert recording.needs(subnet(recording, "netapp"), subnet(recording, "nodes")), "Azure rejects two at a time"
    assert recording.needs(subnet(recording, "endpoints"), subnet(recording, "netapp"))


@pytest.mark.parametrize(("overrides", "groups"), [({}, 0), (TRIAL, 1), (RESERVED, 0)])
def test_nodes_on_tcp_get_a_placement_group_unless_they_are_reserved(
    stack: Stack, overrides: Mapping[str, object], groups: int
) -> None:
    recording = stack("azure", overrides)
    assert len(recording.of_type(PLACEMENT)) == groups
    assert ("proximityPlacementGroupID" in recording.one(POOL).inputs) is bool(groups)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("size", ["Standard_ND96asr_v4", "Standard_NC4as_T4_v3"])
def test_a_placement_group_can_be_enabled_or_disabled(size: str, chosen: bool) -> None:
    settings = parse_settings({"gpu": {"instance_type": size}, "network": {"proximity_placement": chosen}})
    assert settings.proximity_placement is chosen
