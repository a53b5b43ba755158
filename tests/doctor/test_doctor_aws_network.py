"""The doctor's check of an existing VPC, against moto's server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest
import urllib3

from infra.clouds.aws.doctor.clients import open_clients
from infra.clouds.aws.doctor.networks import existing_network
from infra.clouds.aws.settings import Settings
from infra.findings.model import Context, Finding

Contexts = Callable[..., Context]
ZONES = ("us-west-2a", "us-west-2b")


class Vpc:
    """A VPC in moto with two private subnets that route to a NAT gateway."""

    def __init__(self, prefix: int = 20) -> None:
        self.ec2 = boto3.client("ec2", region_name="us-west-2")
        self.id = self.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        for name in ("EnableDnsSupport", "EnableDnsHostnames"):
            self.ec2.modify_vpc_attribute(VpcId=self.id, **{name: {"Value": True}})
        self.subnets = {
            zone: self.ec2.create_subnet(
                VpcId=self.id, AvailabilityZone=zone, CidrBlock=f"10.9.{16 * index}.0/{prefix}"
            )["Subnet"]["SubnetId"]
            for index, zone in enumerate(ZONES)
        }
        self.table = self.ec2.create_route_table(VpcId=self.id)["RouteTable"]["RouteTableId"]
        for subnet in self.subnets.values():
            self.ec2.associate_route_table(RouteTableId=self.table, SubnetId=subnet)

    def add_nat(self) -> None:
        """Route the subnets to the internet through a NAT gateway."""
        address = self.ec2.allocate_address(Domain="vpc")["AllocationId"]
        gateway = self.ec2.create_nat_gateway(SubnetId=self.subnets[ZONES[0]], AllocationId=address)["NatGateway"]
        self.ec2.create_route(
            RouteTableId=self.table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=gateway["NatGatewayId"]
        )


@pytest.fixture(autouse=True)
def account(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up an empty account in the environment."""
    for key, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": server,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(key, value)
    urllib3.request("POST", f"{server}/moto-api/reset", timeout=60)


def check(context: Contexts, vpc: Vpc, *, subnets: dict[str, str] | None = None, vpc_id: str = "") -> list[Finding]:
    """Return the findings about a stack in this VPC."""
    existing: dict[str, Any] = {"vpc_id": vpc_id or vpc.id, "subnets": subnets or vpc.subnets}
    settings = context("aws", {"network.existing": existing}).settings
    assert isinstance(settings, Settings)
    found = existing_network(open_clients("us-west-2"), settings, is_up=False)
    return found if isinstance(found, list) else [found]


def test_a_vpc_with_dns_room_and_nat_is_ok(context: Contexts) -> None:
    vpc = Vpc()
    vpc.add_nat()
    [found] = check(context, vpc)
    assert found.status == "ok", found


def test_endpoints_of_aws_do_not_replace_a_way_out_to_public_registries(context: Contexts) -> None:
    vpc = Vpc()
    for service in ("ec2", "ecr.api", "ecr.dkr", "eks", "eks-auth", "s3", "sts"):
        vpc.ec2.create_vpc_endpoint(VpcId=vpc.id, ServiceName=f"com.amazonaws.us-west-2.{service}")
    found = check(context, vpc)
    assert [item.status for item in found] == ["problem", "problem"]
    assert "no default route to a NAT or transit gateway" in found[0].result


def test_an_internet_gateway_is_no_way_out_for_a_machine_without_a_public_address(context: Contexts) -> None:
    vpc = Vpc()
    gateway = vpc.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    vpc.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc.id)
    vpc.ec2.create_route(RouteTableId=vpc.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    assert check(context, vpc)[0].status == "problem"


def test_missing_dns_names_are_a_problem_with_the_command(context: Contexts) -> None:
    vpc = Vpc()
    vpc.add_nat()
    vpc.ec2.modify_vpc_attribute(VpcId=vpc.id, EnableDnsHostnames={"Value": False})
    [found] = check(context, vpc)
    assert found.fix == f"aws ec2 modify-vpc-attribute --vpc-id {vpc.id} --enable-dns-hostnames"


def test_too_few_addresses_are_a_problem(context: Contexts) -> None:
    vpc = Vpc(prefix=24)
    vpc.add_nat()
    [found] = check(context, vpc)
    assert "free addresses, 400 needed" in found.result
    assert found.fix.endswith("pulumi config set --path gpu.nodes.max 0")


def test_a_subnet_of_another_zone_is_a_problem(context: Contexts) -> None:
    vpc = Vpc()
    vpc.add_nat()
    swapped = {ZONES[0]: vpc.subnets[ZONES[1]], ZONES[1]: vpc.subnets[ZONES[0]]}
    found = check(context, vpc, subnets=swapped)
    assert [item.result.rpartition(" is in ")[2] for item in found] == [
        "us-west-2b, not in us-west-2a",
        "us-west-2a, not in us-west-2b",
    ]


def test_a_vpc_that_does_not_exist_is_a_problem(context: Contexts) -> None:
    [found] = check(context, Vpc(), vpc_id="vpc-00000000")
    assert "no VPC vpc-00000000 in us-west-2" in found.result
