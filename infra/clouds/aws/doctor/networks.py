"""Whether the VPC of `network.existing` has what the stack's nodes need; the stack never changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.clouds.aws.doctor.causes import EXISTING_NETWORK
from infra.clouds.aws.doctor.clients import Clients
from infra.clouds.aws.settings import ADDRESSES_PER_NODE, ExistingNetwork, Settings
from infra.findings.model import Finding, ok, problem, skipped

#: What a default route of a private subnet may lead to; a machine without a public address cannot use an internet
#: gateway.
_WAYS_OUT = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId", "VpcPeeringConnectionId")
_DNS = {"enableDnsSupport": "EnableDnsSupport", "enableDnsHostnames": "EnableDnsHostnames"}


def existing_network(clients: Clients, settings: Settings, *, is_up: bool) -> Finding | list[Finding]:
    """Check DNS, subnets, their room, and their NAT route; `is_up` leaves out the room that the stack itself uses."""
    existing = settings.network.existing
    if existing is None:
        return skipped("the stack creates its own network")
    ec2 = clients("ec2")
    subnets = {str(item["SubnetId"]): item for item in _find(ec2, "subnet", list(existing.subnets.values()))}
    if not _find(ec2, "vpc", [existing.vpc_id]):
        fix = "pulumi config set --path network.existing.vpc_id <id>; aws ec2 describe-vpcs"
        return problem(EXISTING_NETWORK, f"no VPC {existing.vpc_id} in {settings.region}", fix=fix)
    results = [*_dns_problems(ec2, existing), *_subnet_problems(existing, subnets)]
    if not results:
        results += _route_problems(ec2, existing)
    if not is_up and not results:
        results += _room_problems(settings, existing, subnets)
    found = [problem(EXISTING_NETWORK, result, fix=fix) for result, fix in results]
    return found or ok(f"{existing.vpc_id} with {len(subnets)} subnets: DNS, room and a NAT route")


def _find(ec2: Any, kind: str, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return those of the VPCs or subnets that exist."""
    pages = ec2.get_paginator(f"describe_{kind}s").paginate(Filters=[{"Name": f"{kind}-id", "Values": list(ids)}])
    return [item for page in pages for item in page[f"{kind.title() if kind == 'subnet' else 'Vpc'}s"]]


def _dns_problems(ec2: Any, existing: ExistingNetwork) -> Iterator[tuple[str, str]]:
    """Yield DNS settings that are off: the private endpoint of EKS and the names of FSx need both."""
    for attribute, key in _DNS.items():
        answer = ec2.describe_vpc_attribute(VpcId=existing.vpc_id, Attribute=attribute)
        if not answer[key]["Value"]:
            option = "--enable-dns-support" if attribute == "enableDnsSupport" else "--enable-dns-hostnames"
            fix = f"aws ec2 modify-vpc-attribute --vpc-id {existing.vpc_id} {option}"
            yield f"{attribute} of {existing.vpc_id} is off, and EKS requires it", fix


def _subnet_problems(existing: ExistingNetwork, subnets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield subnets that do not exist, or that are in another VPC or zone."""
    for zone, name in existing.subnets.items():
        key = f"network.existing.subnets.{zone}"
        found = subnets.get(name)
        if found is None:
            yield f"no subnet {name}", f"pulumi config set --path {key} <id>; aws ec2 describe-subnets"
        elif found["VpcId"] != existing.vpc_id:
            yield f"{name} is in {found['VpcId']}, not in {existing.vpc_id}", f"pulumi config set --path {key} <id>"
        elif found["AvailabilityZone"] != zone:
            actual = found["AvailabilityZone"]
            fix = f"pulumi config rm --path {key}; pulumi config set --path network.existing.subnets.{actual} {name}"
            yield f"{name} is in {actual}, not in {zone}", fix


def _route_problems(ec2: Any, existing: ExistingNetwork) -> Iterator[tuple[str, str]]:
    """Yield subnets without a default route; endpoints of AWS do not suffice, as charts pull from public registries."""
    of_vpc = [{"Name": "vpc-id", "Values": [existing.vpc_id]}]
    tables = [one for page in ec2.get_paginator("describe_route_tables").paginate(Filters=of_vpc)
              for one in page["RouteTables"]]  # fmt: skip
    for name in existing.subnets.values():
        if not _has_way_out(_table_of(tables, name)):
            result = f"{name} has no default route to a NAT or transit gateway, through which nodes pull images"
            fix = "aws ec2 create-route --destination-cidr-block 0.0.0.0/0 --route-table-id <id> --nat-gateway-id <id>"
            yield result, fix


def _table_of(tables: Sequence[Mapping[str, Any]], subnet: str) -> Mapping[str, Any]:
    """Return the route table of a subnet: its own, else the VPC's main one."""
    links = [(link, table) for table in tables for link in table.get("Associations", [])]
    own = [table for link, table in links if link.get("SubnetId") == subnet]
    main = [table for link, table in links if link.get("Main")]
    return next(iter([*own, *main]), {})


def _has_way_out(table: Mapping[str, Any]) -> bool:
    """Return whether a table has a default route that a machine without a public address can use."""
    defaults = [route for route in table.get("Routes", []) if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    return any(route.get(key) for route in defaults for key in _WAYS_OUT)


def _room_problems(
    settings: Settings, existing: ExistingNetwork, subnets: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield the subnet of the GPU nodes if it lacks addresses for `gpu.nodes.max` and all system nodes."""
    name = existing.subnets[settings.gpu_zone]
    needed = (settings.gpu.nodes.max + settings.system.num_nodes) * ADDRESSES_PER_NODE
    free = int(subnets[name]["AvailableIpAddressCount"])
    if free < needed:
        most = max(0, free // ADDRESSES_PER_NODE - settings.system.num_nodes)
        result = f"{name} has {free} free addresses, {needed} needed for gpu.nodes.max and their pods"
        yield result, f"a larger subnet, or pulumi config set --path gpu.nodes.max {most}"
