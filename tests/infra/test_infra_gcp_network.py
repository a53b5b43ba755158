"""Google Cloud: firewall rules, address ranges and NAT."""

from __future__ import annotations

from gcp_stack import CLUSTER, FIREWALL, POOL, Stack
from provider_mocks.recording import Recording


def test_only_nodes_and_pods_reach_the_nodes(a3: Recording) -> None:
    rules = {item.name: item.inputs for item in a3.of_type(FIREWALL)}
    assert rules["gcp-network-nodes"]["sourceRanges"] == ["10.0.0.0/16", "10.64.0.0/14"]
    assert {allow["protocol"] for allow in rules["gcp-network-nodes"]["allows"]} == {"tcp", "udp", "icmp"}
    assert len(rules) == 6, "nodes, webhooks and one for each of the four further networks"
    for rule in rules.values():
        assert all(source.startswith(("10.", "172.16.")) for source in rule["sourceRanges"])
        assert rule["targetTags"] == ["gcp-network-node"]
    assert all(pool.inputs["nodeConfig"]["tags"] == ["gcp-network-node"] for pool in a3.of_type(POOL))


def test_the_control_plane_reaches_the_operators_webhooks(stack: Stack) -> None:
    recording = stack("gcp")
    rule = recording.one(FIREWALL, "gcp-network-webhooks").inputs
    plane = recording.one(CLUSTER).inputs["privateClusterConfig"]["masterIpv4CidrBlock"]
    assert rule["sourceRanges"] == [plane]
    assert "9443" in rule["allows"][0]["ports"], (
        "GKE opens only 443 and 10250; an unreachable webhook rejects every job"
    )


def test_pods_and_services_have_secondary_ranges_of_the_subnet(stack: Stack) -> None:
    recording = stack("gcp")
    subnet = recording.one("gcp:compute/subnetwork:Subnetwork").inputs
    secondary = {item["rangeName"]: item["ipCidrRange"] for item in subnet["secondaryIpRanges"]}
    policy = recording.one(CLUSTER).inputs["ipAllocationPolicy"]
    assert secondary[policy["clusterSecondaryRangeName"]] == "10.64.0.0/14"
    assert secondary[policy["servicesSecondaryRangeName"]] == "10.80.0.0/20"
    assert subnet["privateIpGoogleAccess"] is True, "otherwise checkpoints go through NAT and are billed there"


def test_nodes_reach_the_internet_through_cloud_nat(stack: Stack) -> None:
    recording = stack("gcp")
    nat = recording.one("gcp:compute/routerNat:RouterNat")
    assert nat.inputs["subnetworks"] == [{"name": "gcp-network-subnet-id", "sourceIpRangesToNats": ["ALL_IP_RANGES"]}]
    for pool in recording.of_type(POOL):
        assert recording.needs(pool, nat), "a node without internet access cannot pull an image"
