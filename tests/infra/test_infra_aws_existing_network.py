"""Tests of `network.existing` on AWS: the stack uses the VPC, and creates, changes and deletes nothing of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from aws_stack import EKS, GROUP, LUSTRE, NODES, settings_of
from provider_mocks.recording import Recording

from infra.config.problems import SettingsError

Stack = Callable[..., Recording]

VPC = "vpc-0123456789abcdef0"
SUBNETS = {"us-west-2b": "subnet-0000000000000000b", "us-west-2c": "subnet-0000000000000000c"}
EXISTING: dict[str, object] = {"network.existing": {"vpc_id": VPC, "subnets": SUBNETS}}
#: What belongs to the network's owner.
OWNED = ("vpc:Vpc", "subnet:Subnet", "natGateway", "internetGateway", "eip:Eip", "routeTable", "route:", "vpcEndpoint")


@pytest.fixture
def made(stack: Stack) -> Recording:
    return stack("aws", EXISTING)


def test_no_part_of_the_network_belongs_to_the_stack(made: Recording) -> None:
    found = [item.type for item in made.registrations if item.type.startswith("aws:ec2/")]
    assert not [token for token in found if token.removeprefix("aws:ec2/").startswith(OWNED)], found


def test_cluster_nodes_and_storage_are_in_the_existing_subnets(made: Recording) -> None:
    eks = made.one(EKS).inputs
    assert (eks["vpcId"], eks["privateSubnetIds"]) == (VPC, list(SUBNETS.values()))
    assert made.one(LUSTRE).inputs["subnetIds"] == SUBNETS["us-west-2b"], "the first zone is that of the GPU nodes"
    assert made.one(NODES, "aws-cluster-gpu-nodes").inputs["subnetIds"] == [SUBNETS["us-west-2b"]]


def test_the_security_groups_are_still_the_stacks_own(made: Recording) -> None:
    assert {item.inputs["vpcId"] for item in made.of_type(GROUP)} == {VPC}


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        ({"network.cidr": "10.1.0.0/16"}, "network.cidr", "not a key of network.existing"),
        ({"network.zones": ["us-west-2a", "us-west-2b"]}, "network.zones", "not a key of network.existing"),
        ({"network.existing.subnets": {"us-west-2a": "subnet-01234567"}}, "network.existing.subnets", "needs two"),
        ({"network.existing.subnets": {}}, "network.existing.subnets", "needs two"),
        ({"network.existing.vpc_id": "my-vpc"}, "network.existing.vpc_id", "vpc-0123456789abcdef0"),
        ({"gpu.zone": "us-west-2a"}, "gpu.zone", "us-west-2b | us-west-2c"),
    ],
)
def test_what_contradicts_the_existing_network_is_refused(overrides: dict[str, object], key: str, text: str) -> None:
    with pytest.raises(SettingsError) as error:
        settings_of(EXISTING | overrides)
    [problem] = [problem for problem in error.value.problems if problem.key == key]
    assert text in str(problem)


def test_the_network_is_paid_for_elsewhere() -> None:
    names = [line.what for line in settings_of(EXISTING).cost_lines(1)]
    assert "NAT gateway" not in names
