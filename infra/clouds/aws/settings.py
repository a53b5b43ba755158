"""What a stack on AWS configures, the mistakes it can make, and what it costs beside its GPU nodes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from infra import catalog
from infra.config import checks
from infra.config.problems import Problem, fix_by_removing, fix_by_setting
from infra.config.settings import (
    Cidr,
    ManagedGpuSettings,
    ManagedStackSettings,
    ManagedStorageSettings,
    NetworkSettings,
    Section,
)
from infra.cost import CostLine

#: A VPC's range is cut into this many equal blocks: one for each zone's nodes, the last for what faces the internet.
NUM_SUBNET_BLOCKS = 8

#: Addresses that the VPC CNI may hold on one GPU node: two network interfaces of 50 addresses each, one of them warm.
#: https://docs.aws.amazon.com/eks/latest/best-practices/vpc-cni.html
ADDRESSES_PER_NODE = 100

_WIDEST_VPC = 16
_PRIVATE = tuple(IPv4Network(cidr) for cidr in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_HOURS_PER_MONTH = 730
_LETTERS = "abcdef"
#: Regions of the commercial and the GovCloud partition; China has another account, other principals and no EFA type.
_REGION = r"^(us|eu|ap|ca|sa|me|af|il|mx)(-gov)?-[a-z]+-\d$"

#: YAML reads an unquoted 1.35 as a number.
KubernetesVersion = Annotated[Literal["1.34", "1.35", "1.36"], BeforeValidator(str)]
PrincipalArn = Annotated[
    str,
    Field(pattern=r"^arn:aws[a-z-]*:iam::\d{12}:(role|user)/.+$", examples=["arn:aws:iam::123456789012:role/admin"]),
]


class Gpu(ManagedGpuSettings):
    """The GPU pool; all of its nodes are in one zone, because EFA does not leave a subnet.

    `zone` unset means the VPC's first. A capacity block or a reservation is in one zone: name that one.
    """

    reserved: ClassVar[frozenset[str]] = frozenset({"reservation", "capacity_block"})

    instance_type: str = Field(examples=["p4d.24xlarge"])
    capacity: Literal["on_demand", "spot", "reservation", "capacity_block"] = "on_demand"
    zone: str | None = None
    root_volume_gib: int = Field(200, ge=100, le=16384)

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from super().problems()
        if self.nodes.max < 1:
            key = "gpu.nodes.max"
            yield Problem(key, "EKS refuses a node group of at most 0 nodes", "at least 1", fix_by_setting(key, 1), 0)
        if self.reservation_id and not re.fullmatch(r"cr-[0-9a-f]{8,17}", self.reservation_id):
            key = "gpu.reservation_id"
            legal = "cr- and 8 to 17 hexadecimal digits, as `aws ec2 describe-capacity-reservations` shows it"
            yield Problem(
                key, "not the id of a reservation", legal, fix_by_setting(key, "cr-<id>"), self.reservation_id
            )


class Network(NetworkSettings):
    """The VPC. `zones` unset means the region's zones a and b, which the control plane needs, and `gpu.zone`.

    `services_cidr` is where Kubernetes puts its services: addresses of the cluster only, yet never those of the VPC.
    """

    zones: tuple[str, ...] = ()
    services_cidr: Cidr = "172.20.0.0/16"


class KubernetesCluster(Section):
    """The control plane. `support` standard lets EKS upgrade a version that ages out, extended pays to stay on it.

    `admin_role_arns` are further principals with administrator rights; whoever creates the cluster has them anyway.
    """

    kubernetes_version: KubernetesVersion = "1.35"
    support: Literal["standard", "extended"] = "standard"
    admin_role_arns: tuple[PrincipalArn, ...] = ()


class System(Section):
    """The nodes that run everything but training: operators, dashboards, DNS."""

    instance_type: str = Field("m6i.xlarge", examples=["m6i.xlarge"])
    num_nodes: int = Field(2, ge=2, le=20)
    root_volume_gib: int = Field(100, ge=30, le=16384)


class Storage(ManagedStorageSettings):
    """FSx for Lustre (`size_gib`, its throughput for each TiB) in front of the bucket."""

    throughput_mb_per_second_per_tib: Literal[125, 250, 500, 1000] = 250


class Monitoring(Section):
    """CloudWatch's own metrics and logs, and how long logs are kept."""

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
        """Below the folder that mirrors the bucket: only there can the trainer's user be given a folder of its own."""
        return f"{self.bucket_folder}/work"

    @property
    def bucket_folder(self) -> str:
        """Where FSx mirrors the folder of the bucket that has the same name."""
        return "datasets"

    @property
    def zones(self) -> tuple[str, ...]:
        """The VPC's zones. One that GPU nodes need beside the two by default comes last: it moves no other's range."""
        if self.network.zones:
            return self.network.zones
        default = (f"{self.region}a", f"{self.region}b")
        return default if self.gpu.zone in (None, *default) else (*default, self.gpu_zone)

    @property
    def gpu_zone(self) -> str:
        """The zone of GPU nodes, shared storage and the way out."""
        return self.gpu.zone or next(iter(self.network.zones), f"{self.region}a")

    @property
    def partition(self) -> str:
        """The second part of every ARN."""
        return "aws-us-gov" if self.region.startswith("us-gov-") else "aws"

    @property
    def num_efa_interfaces(self) -> int:
        """Network cards of one GPU node that speak EFA; 0 where the type has none or is not known."""
        row = self._instance
        return row.num_network_cards if row and row.fabric == "EFA" else 0

    @property
    def _instance(self) -> catalog.InstanceType | None:
        """The GPU nodes' row of the catalog, None where it has none, which `problems` tells."""
        rows = catalog.instances(self.cloud)
        return next((row for row in rows if row.name == self.gpu.instance_type), None)

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections."""
        yield from super().problems()
        yield from self._zone_problems()
        yield from self._address_problems()
        yield from self._access_problems()
        yield from checks.one_of("system.instance_type", self.system.instance_type, _prices()["system_nodes"])
        yield from _lustre_problems(self.storage.size_gib)
        yield from self._name_problems()
        if self.gpu.capacity == "capacity_block" and self._instance and not self.num_efa_interfaces:
            legal = "on_demand | spot | reservation, or a type with EFA"
            wrong = f"capacity blocks are not sold for {self.gpu.instance_type}"
            yield Problem("gpu.capacity", wrong, legal, fix_by_setting("gpu.capacity", "on_demand"), self.gpu.capacity)

    def _zone_problems(self) -> Iterable[Problem]:
        """At least two zones, of this region, none twice, the GPU nodes' among them."""
        zones = self.network.zones
        for index, zone in enumerate(zones):
            key, letter = f"network.zones[{index}]", _LETTERS[index % len(_LETTERS)]
            for problem in checks.zone_in_region(key, zone, self.region):
                yield replace(problem, fix=fix_by_setting(key, f"{self.region}{letter}"))
            if zone in zones[:index]:
                yield Problem(key, "named twice", "each zone once", fix_by_removing(key), zone)
        if len(zones) == 1:
            command = fix_by_setting(
                "network.zones[1]", f"{self.region}{'a' if zones[0] == f'{self.region}b' else 'b'}"
            )
            yield Problem("network.zones", "one zone; the control plane needs two", "2 to 6 zones", command, zones)
        if len(zones) > NUM_SUBNET_BLOCKS - 2:
            command = fix_by_removing(f"network.zones[{len(zones) - 1}]")
            yield Problem("network.zones", f"{len(zones)} zones", "2 to 6 zones", command, zones)
        if self.gpu.zone:
            yield from checks.zone_in_region("gpu.zone", self.gpu.zone, self.region)
            yield from checks.one_of("gpu.zone", self.gpu.zone, set(self.zones))

    def _address_problems(self) -> Iterable[Problem]:
        """Ranges that AWS takes, apart from each other, and wide enough for the nodes."""
        vpc, services = IPv4Network(self.network.cidr), IPv4Network(self.network.services_cidr)
        yield from checks.disjoint({"network.cidr": str(vpc), "network.services_cidr": str(services)})
        if not _WIDEST_VPC <= vpc.prefixlen <= 28:
            command = fix_by_setting("network.cidr", f"{vpc.network_address}/{_WIDEST_VPC}")
            yield Problem("network.cidr", "a size that a VPC cannot have", "/16 to /28", command, str(vpc))
            return
        if not (12 <= services.prefixlen <= 24 and _is_private(services)):
            key, legal = "network.services_cidr", "a private range of /12 to /24"
            yield Problem(key, "a range that EKS refuses", legal, fix_by_setting(key, "172.20.0.0/16"), str(services))
        yield from self._room_problems(vpc)

    def _access_problems(self) -> Iterable[Problem]:
        """Who may reach the Kubernetes API from outside."""
        for index, cidr in enumerate(self.network.authorized_cidrs):
            if _is_private(IPv4Network(cidr)):
                key, legal = f"network.authorized_cidrs[{index}]", "a public range; the VPC reaches the API anyway"
                yield Problem(key, "a private range, which EKS refuses", legal, fix_by_removing(key), cidr)

    def _room_problems(self, vpc: IPv4Network) -> Iterable[Problem]:
        """One zone's subnet must hold all GPU nodes, and may have to hold all system nodes."""
        needed = (self.gpu.nodes.max + self.system.num_nodes) * ADDRESSES_PER_NODE
        usable = vpc.num_addresses // NUM_SUBNET_BLOCKS - 5
        if usable >= needed:
            return
        wrong = f"{usable} usable addresses in each zone's subnet, {needed} needed for the nodes and their pods"
        prefix = 32 - (needed + 4).bit_length() - (NUM_SUBNET_BLOCKS - 1).bit_length()
        if prefix >= _WIDEST_VPC:
            wider = IPv4Network((int(vpc.network_address), prefix), strict=False)
            yield Problem("network.cidr", wrong, f"/{prefix} or wider", fix_by_setting("network.cidr", wider), str(vpc))
            return
        most = (2 ** (32 - _WIDEST_VPC) // NUM_SUBNET_BLOCKS - 5) // ADDRESSES_PER_NODE - self.system.num_nodes
        key = "gpu.nodes.max"
        yield Problem(key, wrong, f"at most {most}, in a /{_WIDEST_VPC}", fix_by_setting(key, most), self.gpu.nodes.max)

    def _name_problems(self) -> Iterable[Problem]:
        """Names and tags that AWS refuses."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}", self.stack):
            legal = "letters, digits and hyphens, 40 at most: the names of bucket and cluster begin with it"
            yield Problem("stack", "a name that AWS refuses", legal, "pulumi stack rename <name>", self.stack)
        for key in self.tags.extra:
            if key.lower().startswith("aws:"):
                name = f'tags.extra["{key}"]'
                yield Problem(name, "a key that AWS keeps for itself", "a key without aws:", fix_by_removing(name), key)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[CostLine]:
        """The GPU nodes and everything that is billed by the hour whether it is used or not."""
        prices, num_system = _prices(), self.system.num_nodes
        volumes_gib = num_system * self.system.root_volume_gib + num_gpu_nodes * self.gpu.root_volume_gib
        lustre = prices["lustre"][str(self.storage.throughput_mb_per_second_per_tib)]
        return (
            *super().cost_lines(num_gpu_nodes),
            CostLine("EKS control plane", 1, prices["control_plane"][self.cluster.support]),
            CostLine(f"system node {self.system.instance_type}", num_system, self._system_price),
            CostLine("NAT gateway", 1, prices["network"]["nat_gateway"]),
            CostLine("public IPv4 address", 1, prices["network"]["public_ipv4"]),
            CostLine("interface endpoint", 2 * len(self.zones), prices["network"]["interface_endpoint"]),
            CostLine("GiB of root volumes", volumes_gib, _hourly(prices["root_volume"]["gp3"])),
            CostLine("GiB of FSx for Lustre", self.storage.size_gib, _hourly(lustre)),
            CostLine("KMS key", 1, _hourly(prices["key"]["kms"])),
        )

    @property
    def _system_price(self) -> float:
        """USD per hour of a system node; a type without a price is refused by `problems`."""
        return _prices()["system_nodes"].get(self.system.instance_type, 0.0)


def _lustre_problems(size_gib: int) -> Iterable[Problem]:
    """PERSISTENT_2 on SSD comes in 1200 GiB, 2400 GiB and multiples of 2400 GiB; the next larger one is offered."""
    if size_gib == 1200 or size_gib % 2400 == 0:
        return []
    nearest = 1200 if size_gib < 1200 else -(-size_gib // 2400) * 2400
    return checks.size_step("storage.size_gib", size_gib, "1200, 2400 or a multiple of 2400", nearest)


def _is_private(network: IPv4Network) -> bool:
    return any(network.subnet_of(private) for private in _PRIVATE)


def _hourly(usd_per_month: float) -> float:
    return usd_per_month / _HOURS_PER_MONTH


@cache
def _prices() -> Mapping[str, Mapping[str, float]]:
    """The numbers of `prices.toml` by section; dates and sources stay in the file, for people."""
    sections = tomllib.loads((Path(__file__).parent / "prices.toml").read_text())
    return {
        name: {key: float(value) for key, value in rows.items() if isinstance(value, (int, float))}
        for name, rows in sections.items()
    }
