"""`network.existing` under the real engine: no step concerns the user's network, and `destroy` leaves it as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from engine_lifecycle import open_project
from engine_runs import Run
from engine_world import World

VPC = "vpc-0123456789abcdef0"
SUBNETS = {"us-west-2a": "subnet-0000000000000000a", "us-west-2b": "subnet-0000000000000000b"}
VNET = "/subscriptions/s/resourceGroups/network/providers/Microsoft.Network/virtualNetworks/hub"

#: The keys below `network.existing`.
KEYS: Mapping[str, Mapping[str, str]] = {
    "aws": {"vpc_id": VPC, **{f"subnets.{zone}": subnet for zone, subnet in SUBNETS.items()}},
    "azure": {
        **{f"{name}_subnet_id": f"{VNET}/subnets/{name}" for name in ("nodes", "netapp", "endpoints")},
        "nodes_cidr": "10.9.0.0/20",
        "outbound_cidr": "198.51.100.9/32",
    },
    "gcp": {"network": "shared", "subnetwork": "gpus", "pods_range": "pods", "services_range": "services"},
}
#: Types of the network that belongs to its owner.
OWNED: Mapping[str, tuple[str, ...]] = {
    "aws": ("Vpc", "Subnet", "NatGateway", "InternetGateway", "Eip", "RouteTable", "Route", "VpcEndpoint"),
    "azure": ("VirtualNetwork", "Subnet", "NatGateway", "NetworkSecurityGroup", "RouteTable", "PublicIPAddress"),
    "gcp": ("Network", "Subnetwork", "Router", "RouterNat", "GlobalAddress", "Route"),
}


def assert_leaves_network(run: Run, cloud: str) -> None:
    """Assert that a run succeeded without a step, not even a read, on a part of a network."""
    assert run.ok, run.output
    assert run.changes
    kinds = {step.type.rpartition(":")[2] for step in run.steps if not step.type.startswith("torchrec-cloud:")}
    assert kinds.isdisjoint(OWNED[cloud])


def add_network(world: World) -> dict[str, dict[str, object]]:
    """Add the user's VPC with its subnets, and return their inputs."""
    world.add("aws:ec2/vpc:Vpc", VPC, {"cidrBlock": "10.9.0.0/16"})
    for index, (zone, subnet) in enumerate(SUBNETS.items()):
        block = f"10.9.{16 * index}.0/20"
        world.add("aws:ec2/subnet:Subnet", subnet, {"vpcId": VPC, "availabilityZone": zone, "cidrBlock": block})
    return network_of(world)


def network_of(world: World) -> dict[str, dict[str, object]]:
    """Return the inputs of each VPC and subnet."""
    return {one.id: dict(one.inputs) for one in world.of_type("aws:ec2/vpc:Vpc", "aws:ec2/subnet:Subnet")}


@pytest.mark.parametrize("cloud", ["azure", "gcp"])
def test_a_preview_plans_no_part_of_the_network(tmp_path: Path, kubeconfig: Path, cloud: str) -> None:
    _, server, project = open_project(tmp_path, cloud, kubeconfig)
    for key, value in KEYS[cloud].items():
        project.set(f"network.existing.{key}", value)
    assert_leaves_network(project.run("preview", "automation"), cloud)
    server.kill()


def test_a_whole_life_leaves_the_network_as_it_was(tmp_path: Path, kubeconfig: Path) -> None:
    world, server, project = open_project(tmp_path, "aws", kubeconfig)
    before = add_network(world)
    for key, value in KEYS["aws"].items():
        project.set(f"network.existing.{key}", value)
    assert_leaves_network(project.run("up", "automation"), "aws")
    (nodes,) = (one for one in world.of_type("aws:eks/nodeGroup:NodeGroup") if one.name == "aws-cluster-gpu-nodes")
    assert set(nodes.inputs["subnetIds"]) <= set(SUBNETS.values())
    assert network_of(world) == before
    assert_leaves_network(project.run("destroy"), "aws")
    assert network_of(world) == before
    (vpc,) = world.of_type("aws:ec2/vpc:Vpc")
    assert {one.id for one in world.resources.values() if one.refers_to(vpc)} == set(SUBNETS.values())
    server.kill()
