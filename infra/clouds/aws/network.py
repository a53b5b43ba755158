"""The VPC: subnets in every zone, one NAT gateway, endpoints for S3 and ECR, and what EFA needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

import pulumi
import pulumi_aws as aws

from infra.clouds.aws.settings import NUM_SUBNET_BLOCKS, Settings

Tags = Mapping[str, str]

#: How many bits each split adds to the prefix of a range.
_SPLIT = NUM_SUBNET_BLOCKS.bit_length() - 1


@dataclass(frozen=True)
class ZoneRanges:
    """The address ranges of one zone: nodes and pods in `private`, the NAT gateway in `public`."""

    private: str
    public: str


def subnet_layout(cidr: str, zones: Sequence[str]) -> dict[str, ZoneRanges]:
    """Return the ranges by zone: an eighth of the VPC for nodes, an eighth of the last eighth for the public subnet.

    A zone added at the end must not move another zone's range, because a moved range replaces every node in it.
    """
    blocks = list(IPv4Network(cidr).subnets(_SPLIT))
    public = list(blocks[-1].subnets(_SPLIT))
    return {zone: ZoneRanges(str(blocks[index]), str(public[index])) for index, zone in enumerate(zones)}


def named(tags: Tags, name: str) -> dict[str, str]:
    """Return the tags with a `Name`, which consoles display."""
    return {**tags, "Name": name}


@dataclass(frozen=True)
class Existing:
    """A resource outside this stack, which never changes or deletes it."""

    id: pulumi.Output[str]


class Network(pulumi.ComponentResource):
    """The network that the nodes run in: its own VPC, or the subnets of `network.existing`.

    `efa_group` and `placement_group` are None where the instance type or the capacity does not use one.
    """

    vpc: aws.ec2.Vpc | Existing
    private_subnets: Mapping[str, aws.ec2.Subnet | Existing]
    efa_group: aws.ec2.SecurityGroup | None
    placement_group: aws.ec2.PlacementGroup | None

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("torchrec-cloud:aws:Network", name, None, opts)
        self._name, self._settings, self._tags = name, settings, settings.labels
        self._child = pulumi.ResourceOptions(parent=self)
        if existing := settings.network.existing:
            self.vpc = Existing(pulumi.Output.from_input(existing.vpc_id))
            self.private_subnets = {
                zone: Existing(pulumi.Output.from_input(subnet)) for zone, subnet in existing.subnets.items()
            }
        else:
            self._create_network()
        self.efa_group = self._create_efa_group() if settings.num_efa_interfaces else None
        self.placement_group = self._create_placement_group() if self._uses_placement_group else None
        self.register_outputs({"vpc_id": self.vpc.id})

    def _create_network(self) -> None:
        """Create the VPC, its subnets, their routes, and the endpoints."""
        self.vpc = self._create_vpc()
        internet = self._create_internet_route()
        public = self._create_subnets("public", "kubernetes.io/role/elb", internet.route_table_id)
        nat = self._create_nat_route(public[self._settings.gpu_zone], internet)
        self.private_subnets = self._create_subnets("private", "kubernetes.io/role/internal-elb", nat.route_table_id)
        self._create_endpoints(nat.route_table_id)

    @property
    def gpu_subnet(self) -> aws.ec2.Subnet | Existing:
        """Return the subnet of the GPU nodes and of the file system."""
        return self.private_subnets[self._settings.gpu_zone]

    @property
    def _uses_placement_group(self) -> bool:
        """Return whether GPU nodes start in a placement group of this stack.

        A reservation was created outside the group, so EC2 never finds capacity for a node that requests both.
        """
        return self._settings.num_efa_interfaces > 0 and self._settings.gpu.capacity in ("on_demand", "spot")

    def _create_vpc(self) -> aws.ec2.Vpc:
        return aws.ec2.Vpc(
            f"{self._name}-vpc",
            cidr_block=self._settings.network.cidr,
            enable_dns_hostnames=True,
            enable_dns_support=True,
            tags=named(self._tags, f"{self._name}-vpc"),
            opts=self._child,
        )

    def _create_internet_route(self) -> aws.ec2.Route:
        """Create the route of the public subnets, which hold only the NAT gateway and load balancers."""
        gateway = aws.ec2.InternetGateway(f"{self._name}-igw", vpc_id=self.vpc.id, tags=self._tags, opts=self._child)
        table = aws.ec2.RouteTable(f"{self._name}-public", vpc_id=self.vpc.id, tags=self._tags, opts=self._child)
        return aws.ec2.Route(
            f"{self._name}-internet",
            route_table_id=table.id,
            destination_cidr_block="0.0.0.0/0",
            gateway_id=gateway.id,
            opts=self._child,
        )

    def _create_nat_route(self, public: aws.ec2.Subnet, internet: aws.ec2.Route) -> aws.ec2.Route:
        """Create the route of the private subnets through one NAT gateway, in the zone of the GPU nodes."""
        # A public address in use blocks the detachment of the internet gateway, so these are destroyed first.
        after = pulumi.ResourceOptions(parent=self, depends_on=[internet])
        address = aws.ec2.Eip(f"{self._name}-nat-ip", domain="vpc", tags=self._tags, opts=after)
        gateway = aws.ec2.NatGateway(
            f"{self._name}-nat",
            allocation_id=address.allocation_id,
            subnet_id=public.id,
            tags=named(self._tags, f"{self._name}-nat"),
            opts=after,
        )
        table = aws.ec2.RouteTable(f"{self._name}-private", vpc_id=self.vpc.id, tags=self._tags, opts=self._child)
        return aws.ec2.Route(
            f"{self._name}-way-out",  # renaming it would replace the route of every node
            route_table_id=table.id,
            destination_cidr_block="0.0.0.0/0",
            nat_gateway_id=gateway.id,
            opts=self._child,
        )

    def _create_subnets(self, kind: str, role: str, table: pulumi.Output[str]) -> dict[str, aws.ec2.Subnet]:
        """Create one subnet in each zone, all on one route table, without public addresses for machines."""
        subnets = {}
        layout = subnet_layout(self._settings.network.cidr, self._settings.zones)
        for zone, ranges in layout.items():
            name = f"{self._name}-{kind}-{zone}"
            subnets[zone] = aws.ec2.Subnet(
                name,
                vpc_id=self.vpc.id,
                availability_zone=zone,
                cidr_block=ranges.public if kind == "public" else ranges.private,
                map_public_ip_on_launch=False,
                tags={**named(self._tags, name), role: "1"},
                opts=self._child,
            )
            aws.ec2.RouteTableAssociation(
                f"{name}-route", subnet_id=subnets[zone].id, route_table_id=table, opts=self._child
            )
        return subnets

    def _create_endpoints(self, table: pulumi.Output[str]) -> None:
        """Create endpoints for S3 and ECR: the NAT gateway would bill datasets, checkpoints and images by the GiB."""
        prefix = f"com.amazonaws.{self._settings.region}"
        aws.ec2.VpcEndpoint(
            f"{self._name}-s3",
            vpc_id=self.vpc.id,
            service_name=f"{prefix}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[table],
            tags=named(self._tags, f"{self._name}-s3"),
            opts=self._child,
        )
        https = aws.ec2.SecurityGroupIngressArgs(
            protocol="tcp", from_port=443, to_port=443, cidr_blocks=[self._settings.network.cidr]
        )
        group = self._create_group("endpoints", "HTTPS from the VPC to interface endpoints", [https], [])
        for service in ("api", "dkr"):
            aws.ec2.VpcEndpoint(
                f"{self._name}-ecr-{service}",
                vpc_id=self.vpc.id,
                service_name=f"{prefix}.ecr.{service}",
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                subnet_ids=[subnet.id for subnet in self.private_subnets.values()],
                security_group_ids=[group.id],
                tags=named(self._tags, f"{self._name}-ecr-{service}"),
                opts=self._child,
            )

    def _create_efa_group(self) -> aws.ec2.SecurityGroup:
        """Create a group that allows all traffic from itself and to itself.

        EFA drops packets whose egress rule names an address range instead of the group:
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html
        """
        to_itself = aws.ec2.SecurityGroupEgressArgs(protocol="-1", from_port=0, to_port=0, self=True)
        from_itself = aws.ec2.SecurityGroupIngressArgs(protocol="-1", from_port=0, to_port=0, self=True)
        return self._create_group("efa", "EFA between GPU nodes", [from_itself], [to_itself])

    def _create_group(
        self,
        kind: str,
        description: str,
        ingress: Sequence[aws.ec2.SecurityGroupIngressArgs],
        egress: Sequence[aws.ec2.SecurityGroupEgressArgs],
    ) -> aws.ec2.SecurityGroup:
        return aws.ec2.SecurityGroup(
            f"{self._name}-{kind}",
            description=description,
            vpc_id=self.vpc.id,
            ingress=list(ingress),
            egress=list(egress),
            revoke_rules_on_delete=True,
            tags=named(self._tags, f"{self._name}-{kind}"),
            opts=self._child,
        )

    def _create_placement_group(self) -> aws.ec2.PlacementGroup:
        """Create the group that places GPU nodes close to each other in the network."""
        return aws.ec2.PlacementGroup(f"{self._name}-gpu", strategy="cluster", tags=self._tags, opts=self._child)
