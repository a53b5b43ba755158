"""The settings of a stack on AWS, their validation, and the costs of everything except its GPU nodes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infra import catalog
from infra.clouds.aws.versions import KubernetesVersion, is_release_of
from infra.config import checks
from infra.config.problems import Problem, find_unused, fix_by_removing, fix_by_setting
from infra.config.settings import (
    Cidr,
    ManagedGpuSettings,
    ManagedStackSettings,
    ManagedStorageSettings,
    NetworkSettings,
    Section,
)
from infra.cost import CostLine

#: A VPC's range is split into this many equal blocks: one for each zone's nodes, the last for all public subnets.
NUM_SUBNET_BLOCKS = 8

#: Addresses that the VPC CNI reserves on one GPU node: two network interfaces of 50 addresses each, one of them warm.
#: https://docs.aws.amazon.com/eks/latest/best-practices/vpc-cni.html
ADDRESSES_PER_NODE = 100

#: The machine of `network.api_access` bastion, and the size of its disk.
BASTION_TYPE, BASTION_VOLUME_GIB = "t3.nano", 8

_WIDEST_VPC = 16
_PRIVATE = tuple(IPv4Network(cidr) for cidr in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_HOURS_PER_MONTH = 730
_LETTERS = "abcdef"
#: IAM allows 64 characters in the name of a role, of which the longest name that the stack derives leaves this many.
_MAX_STACK_NAME = 31
#: Zones in which EKS accepts no subnet of a control plane, by their ids: the letter of a zone differs between accounts.
#: https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html
UNSUPPORTED_ZONES = {"us-east-1": "use1-az3", "us-west-1": "usw1-az2", "ca-central-1": "cac1-az3"}
#: Regions of the commercial and the GovCloud partition; China needs another account and other principals, without EFA.
_REGION = r"^(us|eu|ap|ca|sa|me|af|il|mx)(-gov)?-[a-z]+-\d$"

PrincipalArn = Annotated[
    str,
    Field(pattern=r"^arn:aws[a-z-]*:iam::\d{12}:(role|user)/.+$", examples=["arn:aws:iam::123456789012:role/admin"]),
]


class Gpu(ManagedGpuSettings):
    """The GPU pool; all of its nodes are in one zone, because EFA traffic cannot leave a subnet.

    `zone` defaults to the VPC's first zone; with a capacity block or a reservation, set it to the zone of that.
    """

    reserved: ClassVar[frozenset[str]] = frozenset({"reservation", "capacity_block"})

    instance_type: str = Field(examples=["p4d.24xlarge"])
    capacity: Literal["on_demand", "spot", "reservation", "capacity_block"] = "on_demand"
    zone: str | None = None
    root_volume_gib: int = Field(200, ge=100, le=16384)
    ami_release: str | None = Field(None, examples=["1.35.2-20260714"])

    def problems(self) -> Iterable[Problem]:
        """Yield problems across this section's keys."""
        yield from super().problems()
        if self.nodes.max < 1:
            key = "gpu.nodes.max"
            yield Problem(
                key, "EKS rejects a node group with a maximum of 0 nodes", "at least 1", fix_by_setting(key, 1), 0
            )
        if self.reservation_id and not re.fullmatch(r"cr-[0-9a-f]{8,17}", self.reservation_id):
            key = "gpu.reservation_id"
            allowed = "cr- and 8 to 17 hexadecimal digits, as `aws ec2 describe-capacity-reservations` shows it"
            yield Problem(
                key, "not the id of a reservation", allowed, fix_by_setting(key, "cr-<id>"), self.reservation_id
            )


class ExistingNetwork(Section):
    """A VPC outside the stack, which never changes it, with one private subnet in each of two or more zones.

    The subnets need a default route, such as to a NAT gateway: nodes pull images from public registries.
    """

    vpc_id: str = Field(pattern=r"^vpc-[0-9a-f]{8,17}$", examples=["vpc-0123456789abcdef0"])
    subnets: dict[
        str, Annotated[str, Field(pattern=r"^subnet-[0-9a-f]{8,17}$", examples=["subnet-0123456789abcdef0"])]
    ] = Field(examples=[{"us-west-2a": "subnet-0123456789abcdef0", "us-west-2b": "subnet-0fedcba9876543210"}])


class Network(NetworkSettings):
    """The VPC; `zones` defaults to the region's zones a and b, which the control plane needs, and `gpu.zone`.

    `services_cidr` is the range of Kubernetes services: used only inside the cluster, it must not overlap the VPC. With
    `api_access` bastion the API is private, and Session Manager forwards a port to it through a small machine.
    """

    api_access: Literal["authorized_ranges", "inside", "bastion"] = "authorized_ranges"
    zones: tuple[str, ...] = ()
    services_cidr: Cidr = "172.20.0.0/16"
    existing: ExistingNetwork | None = None


class KubernetesCluster(Section):
    """The control plane.

    With `support` standard EKS upgrades a version at the end of its support; with extended it stays, at a higher price.
    `admin_role_arns` are further principals with administrator rights; the creator has them, and `up` refuses it here.
    """

    kubernetes_version: KubernetesVersion = "1.35"
    support: Literal["standard", "extended"] = "standard"
    admin_role_arns: tuple[PrincipalArn, ...] = ()


class System(Section):
    """The nodes for everything except training: operators, dashboards, DNS."""

    instance_type: str = Field("m6i.xlarge", examples=["m6i.xlarge"])
    num_nodes: int = Field(2, ge=2, le=20)
    root_volume_gib: int = Field(100, ge=30, le=16384)
    ami_release: str | None = Field(None, examples=["1.35.2-20260714"])


class Storage(ManagedStorageSettings):
    """FSx for Lustre, linked to the bucket: its size, and its throughput for each TiB."""

    throughput_mb_per_second_per_tib: Literal[125, 250, 500, 1000] = 250


class Monitoring(Section):
    """CloudWatch metrics and logs, and how long logs are kept."""

    cloudwatch: bool = True
    log_retention_days: Literal[1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731] = 30


class Settings(ManagedStackSettings):
    """All keys of a stack on AWS."""

    provider_keys: ClassVar[Mapping[str, str]] = {"region": "aws:region"}

    region: str = Field(pattern=_REGION, examples=["us-west-2"])
    gpu: Gpu
    network: Network = Network()
    cluster: KubernetesCluster = KubernetesCluster()
    system: System = System()
    storage: Storage = Storage()
    monitoring: Monitoring = Monitoring()

    @property
    def work_folder(self) -> str:
        """Return a folder inside the mirror of the bucket, the only place where the trainer's user can own a folder."""
        return f"{self.bucket_folder}/work"

    @property
    def bucket_folder(self) -> str:
        """Return the folder where FSx mirrors the bucket's folder of the same name."""
        return "datasets"

    @property
    def zones(self) -> tuple[str, ...]:
        """Return the VPC's zones; a third one for GPU nodes comes last, so that it does not move the other ranges."""
        if self.network.existing:
            return tuple(self.network.existing.subnets)
        if self.network.zones:
            return self.network.zones
        default = (f"{self.region}a", f"{self.region}b")
        return default if self.gpu.zone in (None, *default) else (*default, self.gpu_zone)

    @property
    def gpu_zone(self) -> str:
        """Return the zone of the GPU nodes, the shared storage and the NAT gateway."""
        return self.gpu.zone or next(iter(self.zones), f"{self.region}a")

    @property
    def num_nodes_at_start(self) -> int:
        """Return the number of GPU nodes that `up` starts: those that are paid for anyway.

        Pending pods start all others. Nodes that nothing uses yet cost money, are removed by the autoscaler after ten
        minutes, and their missing capacity would fail the whole `up`.
        """
        return self.gpu.nodes.desired if self.gpu.capacity in self.gpu.reserved else self.gpu.nodes.min

    @property
    def partition(self) -> str:
        """Return the partition, which is the second part of every ARN."""
        return "aws-us-gov" if self.region.startswith("us-gov-") else "aws"

    @property
    def num_efa_interfaces(self) -> int:
        """Return the number of EFA network cards of one GPU node, 0 for an unknown type."""
        row = self._instance
        return row.num_network_cards if row and row.fabric == "EFA" else 0

    @property
    def _instance(self) -> catalog.InstanceType | None:
        """Return the GPU nodes' row of the catalog, None for an unknown type, which `problems` reports."""
        rows = catalog.instances(self.cloud)
        return next((row for row in rows if row.name == self.gpu.instance_type), None)

    def problems(self) -> Iterable[Problem]:
        """Yield problems across sections."""
        yield from super().problems()
        yield from self._zone_problems()
        if self.network.existing:
            yield from self._existing_problems(self.network.existing)
        else:
            yield from self._address_problems()
        yield from checks.one_of("system.instance_type", self.system.instance_type, price_table()["system_nodes"])
        yield from _lustre_problems(self.storage.size_gib)
        yield from self._name_problems()
        yield from self._release_problems()
        if self.gpu.capacity == "capacity_block" and self._instance and not self.num_efa_interfaces:
            allowed = "on_demand | spot | reservation, or a type with EFA"
            message = f"capacity blocks are not sold for {self.gpu.instance_type}"
            fix = fix_by_setting("gpu.capacity", "on_demand")
            yield Problem("gpu.capacity", message, allowed, fix, self.gpu.capacity)

    def _zone_problems(self) -> Iterable[Problem]:
        """Check that there are at least two different zones of this region, with the GPU nodes' zone among them."""
        zones = self.network.zones
        for index, zone in enumerate(zones):
            key, letter = f"network.zones[{index}]", _LETTERS[index % len(_LETTERS)]
            for problem in checks.zone_in_region(key, zone, self.region):
                yield replace(problem, fix=fix_by_setting(key, f"{self.region}{letter}"))
            if zone in zones[:index]:
                yield Problem(key, "a zone that is listed twice", "each zone once", fix_by_removing(key), zone)
        if len(zones) == 1:
            other = "a" if zones[0] == f"{self.region}b" else "b"
            fix = fix_by_setting("network.zones[1]", f"{self.region}{other}")
            yield Problem(
                "network.zones", "only one zone", "2 to 6 zones, because the control plane needs two", fix, zones
            )
        if len(zones) > NUM_SUBNET_BLOCKS - 2:
            fix = fix_by_removing(f"network.zones[{len(zones) - 1}]")
            yield Problem("network.zones", "too many zones", "2 to 6 zones", fix, zones)
        if self.gpu.zone:
            yield from checks.zone_in_region("gpu.zone", self.gpu.zone, self.region)
            yield from checks.one_of("gpu.zone", self.gpu.zone, set(self.zones))

    def _existing_problems(self, existing: ExistingNetwork) -> Iterable[Problem]:
        """Check that the subnets are in two zones of this region or more, and that no key describes another network."""
        yield from find_unused(self, ("network.cidr", "network.zones"), "not a key of network.existing")
        key, zones = "network.existing.subnets", list(existing.subnets)
        for zone in zones:
            for problem in checks.zone_in_region(f"{key}.{zone}", zone, self.region):
                yield replace(problem, fix=fix_by_removing(f"{key}.{zone}"))
        if len(zones) < 2:
            other = "b" if zones == [f"{self.region}a"] else "a"
            fix = fix_by_setting(f"{key}.{self.region}{other}", "subnet-<id>")
            message = f"{len(zones)} zones, and the control plane needs two"
            yield Problem(key, message, "a private subnet in each of two zones or more", fix, existing.subnets)

    def _address_problems(self) -> Iterable[Problem]:
        """Check that AWS accepts the ranges, that they do not overlap, and that they have room for the nodes."""
        vpc, services = IPv4Network(self.network.cidr), IPv4Network(self.network.services_cidr)
        yield from checks.disjoint({"network.cidr": str(vpc), "network.services_cidr": str(services)})
        if not _WIDEST_VPC <= vpc.prefixlen <= 28:
            fix = fix_by_setting("network.cidr", f"{vpc.network_address}/{_WIDEST_VPC}")
            yield Problem("network.cidr", "a size that a VPC cannot have", "/16 to /28", fix, str(vpc))
            return
        if not (12 <= services.prefixlen <= 24 and _is_private(services)):
            key, allowed = "network.services_cidr", "a private range of /12 to /24"
            fix = fix_by_setting(key, "172.20.0.0/16")
            yield Problem(key, "a range that EKS rejects", allowed, fix, str(services))
        yield from self._room_problems(vpc)

    def _room_problems(self, vpc: IPv4Network) -> Iterable[Problem]:
        """Check that one zone's subnet has room for all GPU nodes and, in the worst case, all system nodes."""
        needed = (self.gpu.nodes.max + self.system.num_nodes) * ADDRESSES_PER_NODE
        usable = vpc.num_addresses // NUM_SUBNET_BLOCKS - 5
        if usable >= needed:
            return
        message = f"{usable} usable addresses in each zone's subnet, {needed} needed for the nodes and their pods"
        prefix = 32 - (needed + 4).bit_length() - (NUM_SUBNET_BLOCKS - 1).bit_length()
        if prefix >= _WIDEST_VPC:
            wider = IPv4Network((int(vpc.network_address), prefix), strict=False)
            fix = fix_by_setting("network.cidr", wider)
            yield Problem("network.cidr", message, f"/{prefix} or wider", fix, str(vpc))
            return
        most = (2 ** (32 - _WIDEST_VPC) // NUM_SUBNET_BLOCKS - 5) // ADDRESSES_PER_NODE - self.system.num_nodes
        key = "gpu.nodes.max"
        allowed = f"at most {most}, in a /{_WIDEST_VPC}"
        yield Problem(key, message, allowed, fix_by_setting(key, most), self.gpu.nodes.max)

    def _release_problems(self) -> Iterable[Problem]:
        """Check that the AMI releases are of the cluster's Kubernetes version."""
        version = self.cluster.kubernetes_version
        for key, release in (("gpu", self.gpu.ami_release), ("system", self.system.ami_release)):
            name = f"{key}.ami_release"
            if release and not is_release_of(release, version):
                allowed = f"{version}.<patch>-<date>, as https://github.com/awslabs/amazon-eks-ami/releases lists them"
                message = f"not an AMI release of Kubernetes {version}"
                yield Problem(name, message, allowed, fix_by_removing(name), release)

    def _name_problems(self) -> Iterable[Problem]:
        """Check the stack's name and the tags against the rules of AWS."""
        allowed = f"letters, digits and hyphens, {_MAX_STACK_NAME} at most, because names of roles begin with it"
        yield from checks.stack_name(self.stack, "AWS", r"[A-Za-z0-9][A-Za-z0-9-]*", _MAX_STACK_NAME, allowed)
        for key in self.tags.extra:
            if key.lower().startswith("aws:"):
                name = f'tags.extra["{key}"]'
                yield Problem(name, "a key that AWS reserves", "a key without aws:", fix_by_removing(name), key)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[CostLine]:
        """Return the costs of the GPU nodes and of everything else that is billed by the hour, used or not."""
        prices, num_system = price_table(), self.system.num_nodes
        volumes_gib = num_system * self.system.root_volume_gib + num_gpu_nodes * self.gpu.root_volume_gib
        lustre = prices["lustre"][str(self.storage.throughput_mb_per_second_per_tib)]
        return (
            *super().cost_lines(num_gpu_nodes),
            CostLine("EKS control plane", 1, prices["control_plane"][self.cluster.support]),
            CostLine(f"system node {self.system.instance_type}", num_system, self._system_price),
            *self._network_lines(prices["network"]),
            CostLine("GiB of root volumes", volumes_gib, _hourly(prices["root_volume"]["gp3"])),
            CostLine("GiB of FSx for Lustre", self.storage.size_gib, _hourly(lustre)),
            CostLine("KMS key", 1, _hourly(prices["key"]["kms"])),
            *self._bastion_lines(prices),
        )

    def _network_lines(self, prices: Mapping[str, float]) -> Sequence[CostLine]:
        """Return the costs of the stack's own network; an existing one is paid for elsewhere."""
        if self.network.existing:
            return ()
        return (
            CostLine("NAT gateway", 1, prices["nat_gateway"]),
            CostLine("public IPv4 address", 1, prices["public_ipv4"]),
            CostLine("interface endpoint", 2 * len(self.zones), prices["interface_endpoint"]),
        )

    def _bastion_lines(self, prices: Mapping[str, Mapping[str, float]]) -> Sequence[CostLine]:
        """Return the costs of the bastion, if there is one."""
        if self.network.api_access != "bastion":
            return ()
        volume = BASTION_VOLUME_GIB * _hourly(prices["root_volume"]["gp3"])
        return (CostLine(f"bastion {BASTION_TYPE} with its volume", 1, prices["bastion"][BASTION_TYPE] + volume),)

    @property
    def _system_price(self) -> float:
        """Return the price of a system node in USD per hour; `problems` rejects a type without a price."""
        return price_table()["system_nodes"].get(self.system.instance_type, 0.0)


def _lustre_problems(size_gib: int) -> Iterable[Problem]:
    """Check that the size is 1200 GiB or a multiple of 2400 GiB, and suggest the next larger size."""
    if size_gib == 1200 or size_gib % 2400 == 0:
        return []
    nearest = 1200 if size_gib < 1200 else -(-size_gib // 2400) * 2400
    return checks.size_step("storage.size_gib", size_gib, "1200, 2400 or a multiple of 2400", nearest)


def _is_private(network: IPv4Network) -> bool:
    return any(network.subnet_of(private) for private in _PRIVATE)


def _hourly(usd_per_month: float) -> float:
    return usd_per_month / _HOURS_PER_MONTH


@cache
def price_table() -> Mapping[str, Mapping[str, float]]:
    """Return the numbers of `prices.toml` by section, without dates and sources."""
    sections = tomllib.loads((Path(__file__).parent / "prices.toml").read_text())
    return {
        name: {key: float(value) for key, value in rows.items() if isinstance(value, (int, float))}
        for name, rows in sections.items()
    }
