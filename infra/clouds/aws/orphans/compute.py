"""Searches of EC2 and its load balancers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infra import catalog
from infra.clouds.aws.orphans.owner import HOURS_PER_MONTH, Filters, Owner, read_tags, utc
from infra.findings.orphans import Leftover, Search, shell

Item = Mapping[str, Any]
#: ELB describes the tags of at most this many load balancers at once.
_TAGS_AT_ONCE = 20
#: The description of a control plane's network interface begins with this, then has the cluster's name.
_PLANE = "Amazon EKS "


def _no_price(_owner: Owner, _item: Item) -> None:
    """Return no price: the kind is free, or its price depends on use."""


@dataclass(frozen=True)
class _Kind:
    """One kind of EC2 resource: how to list it, which entries are left over, and how to delete one.

    `remove` may use every field of the entry and `region`. `live` marks what the cluster makes itself.
    """

    name: str
    operation: str
    key: str
    id: str
    remove: str
    states: tuple[str, tuple[str, ...]] | None = None
    since: str = ""
    live: bool = False
    usd_per_hour: Callable[[Owner, Item], float | None] = _no_price
    filter_option: str = "Filters"


def _instance_price(owner: Owner, item: Item) -> float | None:
    kind = str(item["InstanceType"])
    row = next((row for row in catalog.instances(owner.settings.cloud) if row.name == kind), None)
    return row.on_demand_usd_per_hour if row else owner.prices["system_nodes"].get(kind)


def _volume_price(owner: Owner, item: Item) -> float | None:
    if item.get("VolumeType") != "gp3":
        return None
    return float(item["Size"]) * owner.prices["root_volume"]["gp3"] / HOURS_PER_MONTH


def _nat_price(owner: Owner, _: Item) -> float:
    return owner.prices["network"]["nat_gateway"]


def _address_price(owner: Owner, _: Item) -> float:
    return owner.prices["network"]["public_ipv4"]


def _endpoint_price(owner: Owner, item: Item) -> float:
    return len(item.get("SubnetIds") or ()) * owner.prices["network"]["interface_endpoint"]


_INSTANCE_STATES = ("instance-state-name", ("pending", "running", "stopping", "stopped"))
_KINDS = (
    _Kind("instance", "describe_instances", "Reservations", "InstanceId",
          "aws ec2 terminate-instances --instance-ids {InstanceId} --region {region}"
          " && aws ec2 wait instance-terminated --instance-ids {InstanceId} --region {region}",
          _INSTANCE_STATES, "LaunchTime", live=True, usd_per_hour=_instance_price),
    _Kind("NAT gateway", "describe_nat_gateways", "NatGateways", "NatGatewayId",
          "aws ec2 delete-nat-gateway --nat-gateway-id {NatGatewayId} --region {region}"
          " && aws ec2 wait nat-gateway-deleted --nat-gateway-ids {NatGatewayId} --region {region}",
          ("state", ("pending", "available")), "CreateTime", filter_option="Filter",
          usd_per_hour=_nat_price),
    _Kind("VPC endpoint", "describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId",
          "aws ec2 delete-vpc-endpoints --vpc-endpoint-ids {VpcEndpointId} --region {region}",
          ("vpc-endpoint-state", ("pendingAcceptance", "pending", "available", "failed")), "CreationTimestamp",
          usd_per_hour=_endpoint_price),
    _Kind("network interface", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId",
          "aws ec2 delete-network-interface --network-interface-id {NetworkInterfaceId} --region {region}",
          ("status", ("available",)), live=True),
    _Kind("volume", "describe_volumes", "Volumes", "VolumeId",
          "aws ec2 delete-volume --volume-id {VolumeId} --region {region}",
          ("status", ("available",)), "CreateTime", live=True, usd_per_hour=_volume_price),
    _Kind("snapshot", "describe_snapshots", "Snapshots", "SnapshotId",
          "aws ec2 delete-snapshot --snapshot-id {SnapshotId} --region {region}", since="StartTime", live=True),
    _Kind("public address", "describe_addresses", "Addresses", "AllocationId",
          "aws ec2 release-address --allocation-id {AllocationId} --region {region}",
          usd_per_hour=_address_price),
    _Kind("subnet", "describe_subnets", "Subnets", "SubnetId",
          "aws ec2 delete-subnet --subnet-id {SubnetId} --region {region}"),
    _Kind("route table", "describe_route_tables", "RouteTables", "RouteTableId",
          "aws ec2 delete-route-table --route-table-id {RouteTableId} --region {region}"),
    _Kind("internet gateway", "describe_internet_gateways", "InternetGateways", "InternetGatewayId",
          "aws ec2 delete-internet-gateway --internet-gateway-id {InternetGatewayId} --region {region}"),
    _Kind("security group", "describe_security_groups", "SecurityGroups", "GroupId",
          "aws ec2 delete-security-group --group-id {GroupId} --region {region}"),
    _Kind("VPC", "describe_vpcs", "Vpcs", "VpcId", "aws ec2 delete-vpc --vpc-id {VpcId} --region {region}"),
    _Kind("launch template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId",
          "aws ec2 delete-launch-template --launch-template-id {LaunchTemplateId} --region {region}",
          since="CreateTime"),
)  # fmt: skip


def searches(owner: Owner) -> list[Search]:
    """Return the searches, load balancers first: they hold interfaces and addresses."""
    balancers = [
        Search("load balancer", lambda: _load_balancers(owner)),
        Search("classic load balancer", lambda: _classic_load_balancers(owner)),
        Search("target group", lambda: _target_groups(owner)),
    ]
    return [*balancers, *(_search(owner, kind) for kind in _KINDS)]


def _search(owner: Owner, kind: _Kind) -> Search:
    return Search(kind.name, lambda: _list(owner, kind))


def _list(owner: Owner, kind: _Kind) -> Iterator[Leftover]:
    """Yield the resources of one kind; an entry that matches two filters is yielded once."""
    seen: set[str] = set()
    for item in _entries(owner, kind):
        name, tags = str(item[kind.id]), read_tags(item.get("Tags") or item.get("TagSet"))
        of_plane = owner.is_cluster(str(item.get("Description", "")).removeprefix(_PLANE))
        if name in seen or not (owner.owns(tags) or of_plane):
            continue
        seen.add(name)
        yield Leftover(
            kind=kind.name,
            id=name,
            remove=_detach(owner, item) + shell(kind.remove, **{**item, "region": owner.region}),
            since=utc(item.get(kind.since)),
            usd_per_hour=kind.usd_per_hour(owner, item),
            of_cluster=kind.live or owner.has_cluster_tag(tags),
        )


def _entries(owner: Owner, kind: _Kind) -> Iterator[Item]:
    """Yield the entries that EC2's filters match: those with a tag, and the control plane's interfaces."""
    groups: list[Filters] = owner.filters()
    if kind.name == "network interface":
        # EKS tags no interface of a control plane: https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html
        groups.append([{"Name": "description", "Values": [_PLANE + name for name in owner.cluster_patterns]}])
    state = [{"Name": kind.states[0], "Values": list(kind.states[1])}] if kind.states else []
    options: dict[str, Any] = {"OwnerIds": ["self"]} if kind.name == "snapshot" else {}
    for filters in groups:
        listed = owner.pages("ec2", kind.operation, kind.key, **{kind.filter_option: [*filters, *state]}, **options)
        for item in listed:
            yield from item["Instances"] if kind.key == "Reservations" else (item,)


def _detach(owner: Owner, item: Item) -> str:
    """Return the commands that detach an internet gateway, which EC2 requires before its deletion."""
    template = "aws ec2 detach-internet-gateway --internet-gateway-id {name} --vpc-id {vpc} --region {region} && "
    name = item.get("InternetGatewayId")
    attached = (item.get("Attachments") or ()) if name else ()
    return "".join(shell(template, name=name, vpc=one["VpcId"], region=owner.region) for one in attached)


def _load_balancers(owner: Owner) -> Iterator[Leftover]:
    """Yield the application and network load balancers that a controller in the cluster made."""
    listed = {str(one["LoadBalancerArn"]): one for one in owner.pages("elbv2", *_LISTS["elbv2"])}
    for arn in _tagged(owner, "elbv2", list(listed)):
        item = listed[arn]
        template = "aws elbv2 delete-load-balancer --load-balancer-arn {arn} --region {region}"
        remove = shell(template, arn=arn, region=owner.region)
        yield Leftover(
            "load balancer", str(item["LoadBalancerName"]), remove, utc(item.get("CreatedTime")),
            owner.prices["load_balancer"]["hour"], of_cluster=True, aliases=(arn,),
        )  # fmt: skip


def _classic_load_balancers(owner: Owner) -> Iterator[Leftover]:
    """Yield the classic load balancers, which a Service of type LoadBalancer gets without a controller."""
    listed = {str(one["LoadBalancerName"]): one for one in owner.pages("elb", *_LISTS["elb"])}
    for name in _tagged(owner, "elb", list(listed)):
        template = "aws elb delete-load-balancer --load-balancer-name {name} --region {region}"
        remove = shell(template, name=name, region=owner.region)
        price = owner.prices["load_balancer"]["hour"]
        since = utc(listed[name].get("CreatedTime"))
        yield Leftover("classic load balancer", name, remove, since, price, of_cluster=True)


def _target_groups(owner: Owner) -> Iterator[Leftover]:
    """Yield the target groups of load balancers."""
    listed = {str(one["TargetGroupArn"]): one for one in owner.pages("elbv2", "describe_target_groups", "TargetGroups")}
    for arn in _tagged(owner, "elbv2", list(listed)):
        template = "aws elbv2 delete-target-group --target-group-arn {arn} --region {region}"
        remove = shell(template, arn=arn, region=owner.region)
        name = str(listed[arn]["TargetGroupName"])
        yield Leftover("target group", name, remove, of_cluster=True, aliases=(arn,))


_LISTS = {
    "elbv2": ("describe_load_balancers", "LoadBalancers"),
    "elb": ("describe_load_balancers", "LoadBalancerDescriptions"),
}
#: The option that names load balancers, and the field of the answer with the name.
_TAG_FIELDS = {"elbv2": ("ResourceArns", "ResourceArn"), "elb": ("LoadBalancerNames", "LoadBalancerName")}


def _tagged(owner: Owner, service: str, names: list[str]) -> Iterator[str]:
    """Yield the load balancers or target groups with a tag of the stack or of its cluster."""
    option, field = _TAG_FIELDS[service]
    for start in range(0, len(names), _TAGS_AT_ONCE):
        answer = owner.clients(service).describe_tags(**{option: names[start : start + _TAGS_AT_ONCE]})
        for one in answer["TagDescriptions"]:
            if owner.owns(read_tags(one["Tags"])):
                yield str(one[field])
