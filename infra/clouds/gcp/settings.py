"""The settings of a stack on Google Cloud, their validation, and the costs of everything except its GPU nodes."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from infra import catalog
from infra.clouds.gcp.addresses import ExistingNetwork
from infra.clouds.gcp.versions import KubernetesVersion, Maintenance
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

#: The maximum of pods per node. GKE gives each node twice as many addresses, rounded up to a power of two.
#: https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr
MAX_PODS_PER_NODE = 64
POD_ADDRESSES_PER_NODE = 128

#: Kubernetes services of the operators and of a few hundred jobs; the range of an existing cluster cannot change.
NUM_SERVICES = 512

#: Addresses that Google Cloud reserves in each subnet: the first two and the last two.
NUM_RESERVED = 4

#: GPUDirect-TCPX has four additional network cards per node, each in a separate network.
NUM_FABRIC_NETWORKS = 4

#: Flex-start deletes nodes after at most seven days.
MAX_FLEX_START_HOURS = 168

#: The two size bands of Filestore's zonal tier: smallest, largest, step in GiB. An instance cannot change its band.
_FILESTORE_BANDS = ((1024, 9984, 256), (10240, 102400, 2560))

#: The form of labels, and the start of bucket names, which must not contain `google` or begin with `goog`:
#: https://cloud.google.com/storage/docs/buckets#naming
_STACK_NAME = r"(?!goog)(?!.*google)[a-z]([a-z0-9-]*[a-z0-9])?"
#: The stack's name is the prefix of names to which Pulumi adds eight characters. GKE allows 40 for a pool, of which
#: `<stack>-cluster-system` is the longest. Other names may have 63, which Vertex AI's use.
_MAX_STACK_NAME = 40 - len("-cluster-system") - 8
_MAX_SERVICE_STACK_NAME = 30
_LABEL_KEY = r"[a-z][a-z0-9_-]{0,62}"

_HOURS_PER_MONTH = 730


class Gpu(ManagedGpuSettings):
    """The GPU pool, with all nodes in `gcp:zone`.

    Flex-start deletes a node after `max_run_hours`, by default its limit of seven days.
    """

    instance_type: str = Field(examples=["a2-highgpu-8g"])
    capacity: Literal["on_demand", "spot", "reservation", "flex_start"] = "on_demand"
    max_run_hours: int | None = Field(None, ge=1, le=MAX_FLEX_START_HOURS)
    boot_disk_gib: int = Field(200, ge=50, le=65536)

    def problems(self) -> Iterable[Problem]:
        """Yield problems across this section's keys."""
        yield from super().problems()
        if self.nodes.max < 1:
            key = "gpu.nodes.max"
            yield Problem(
                key, "GKE rejects an autoscaled pool of at most 0 nodes", "at least 1", fix_by_setting(key, 1), 0
            )
        flex_start = self.capacity == "flex_start"
        if flex_start and self.nodes.min:
            key, message = "gpu.nodes.min", "flex-start adds nodes only for pending pods and keeps none"
            yield Problem(key, message, "0", fix_by_setting(key, 0), self.nodes.min)
        if self.max_run_hours is not None and not flex_start:
            key, message = "gpu.max_run_hours", f"capacity {self.capacity!r} has no time limit"
            yield Problem(key, message, "only with gpu.capacity flex_start", fix_by_removing(key), self.max_run_hours)


class Network(NetworkSettings):
    """The VPC: `cidr` is the nodes' subnet, and pods and services have secondary ranges.

    `control_plane_cidr` is the /28 of the Kubernetes API; `fabric_cidr` is divided among the four networks of
    GPUDirect-TCPX. With `dns_endpoint`, principals that IAM allows reach the API by name from anywhere.
    """

    api_access: Literal["authorized_ranges", "inside"] = "authorized_ranges"
    pods_cidr: Cidr = "10.64.0.0/14"
    services_cidr: Cidr = "10.80.0.0/20"
    control_plane_cidr: Cidr = "172.16.0.0/28"
    fabric_cidr: Cidr = "10.200.0.0/18"
    dns_endpoint: bool = False
    existing: ExistingNetwork | None = None

    @property
    def fabric_subnets(self) -> list[str]:
        """Return the range of each network of GPUDirect-TCPX."""
        bits = NUM_FABRIC_NETWORKS.bit_length() - 1
        return [str(subnet) for subnet in IPv4Network(self.fabric_cidr).subnets(prefixlen_diff=bits)]


class KubernetesCluster(Section):
    """The control plane: `regional` has three replicas; `zonal` has one, down during upgrades, for the same price.

    `kubernetes_version` is the lowest one; GKE upgrades further during the maintenance window.
    """

    kubernetes_version: KubernetesVersion = "1.35"
    location: Literal["regional", "zonal"] = "regional"


class Vertex(Section):
    """The keys for `job.launcher vertex`, with which Vertex AI runs the job instead of a cluster.

    `tensorboard` creates an instance that shows the run's curves in the console. `pulumi up` waits `start_minutes` for
    the machines, then leaves the job in its queue; flex-start searches for them for `queue_hours`, by default a day.
    `endpoint` replaces the region's public address, for example for Private Service Connect.
    """

    tensorboard: bool = True
    start_minutes: int = Field(10, ge=1, le=120)
    queue_hours: int | None = Field(None, ge=1, le=MAX_FLEX_START_HOURS)
    endpoint: str | None = Field(
        None, pattern=r"^https?://[^/]+$", examples=["https://us-central1-aiplatform-<endpoint>.p.googleapis.com"]
    )


class System(Section):
    """The nodes for everything except training: operators, dashboards, DNS."""

    instance_type: str = Field("e2-standard-4", examples=["e2-standard-4"])
    num_nodes: int = Field(2, ge=1, le=20)


class Storage(ManagedStorageSettings):
    """The bucket, and Filestore in the zonal tier.

    Filestore reads 260 MiB/s per TiB; from 10 TiB on, 650 MiB/s per 2.5 TiB.
    """

    size_gib: int = Field(1024, gt=0)

    def problems(self) -> Iterable[Problem]:
        """Check that Filestore accepts the size and suggest the next one."""
        nearest = _nearest_filestore_size(self.size_gib)
        allowed = "1024 to 9984 in steps of 256 (1 to 9.75 TiB), or 10240 to 102400 in steps of 2560 (10 to 100 TiB)"
        yield from checks.size_step(
            "storage.size_gib", self.size_gib, allowed, None if nearest == self.size_gib else nearest
        )


class Settings(ManagedStackSettings):
    """All keys of a stack on Google Cloud."""

    provider_keys: ClassVar[Mapping[str, str]] = {
        "gcp_project": "gcp:project",
        "region": "gcp:region",
        "zone": "gcp:zone",
    }
    services: ClassVar[tuple[str, ...]] = ("vertex",)
    of_clusters: ClassVar[tuple[str, ...]] = (
        *ManagedStackSettings.of_clusters,
        *("network", "cluster", "system", "maintenance", "gpu.nodes.min"),
    )
    for_services: ClassVar[tuple[str, ...]] = ("vertex",)

    gcp_project: str = Field(pattern=r"^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$", examples=["my-project"])
    region: str = Field(pattern=r"^[a-z]+-[a-z]+\d+$", examples=["us-central1"])
    zone: str = Field(pattern=r"^[a-z]+-[a-z]+\d+-[a-z]$", examples=["us-central1-a"])
    gpu: Gpu
    network: Network = Network()
    cluster: KubernetesCluster = KubernetesCluster()
    system: System = System()
    storage: Storage = Storage()
    maintenance: Maintenance = Maintenance()
    vertex: Vertex = Vertex()

    @property
    def instance(self) -> catalog.InstanceType | None:
        """Return the GPU nodes' row of the catalog, None for an unknown type, which `problems` reports."""
        rows = catalog.instances(self.cloud)
        return next((row for row in rows if row.name == self.gpu.instance_type), None)

    @property
    def fabric(self) -> str:
        """Return the catalog's name of the network between GPU nodes."""
        return self.instance.fabric if self.instance else "TCP"

    @property
    def fast_socket(self) -> bool:
        """Return whether the nodes use NCCL's Fast Socket plug-in, as A2 does."""
        return "Fast Socket" in self.fabric

    @property
    def tcpx(self) -> bool:
        """Return whether the nodes use GPUDirect-TCPX and its four networks, as A3 High does."""
        return "TCPX" in self.fabric

    @property
    def compact(self) -> bool:
        """Return whether the GPU nodes have a compact placement policy.

        Types without a fabric do not need it, a reservation has placed its nodes, and flex-start does not support it
        for any type of the catalog.
        """
        return self.fabric != "TCP" and self.gpu.capacity in ("on_demand", "spot")

    @property
    def num_initial_nodes(self) -> int:
        """Return the initial number of GPU nodes: the minimum, and pending pods add the others.

        GKE removes idle nodes after ten minutes, which is before image, operators and storage are ready. Only reserved
        nodes are billed in any case, and can be started again.
        """
        reserved = self.gpu.capacity in self.gpu.reserved
        return self.gpu.nodes.desired if reserved else self.gpu.nodes.min

    @property
    def cluster_location(self) -> str:
        """Return the region or zone of the control plane."""
        return self.region if self.cluster.location == "regional" else self.zone

    @property
    def has_api_access(self) -> bool:
        """Return whether the settings name a way from this machine to the Kubernetes API."""
        return self.network.dns_endpoint or super().has_api_access

    def access_problems(self) -> Iterable[Problem]:
        """Suggest the DNS endpoint, which Google recommends: IAM guards it, whatever address this machine has.

        https://cloud.google.com/kubernetes-engine/docs/concepts/network-isolation
        """
        fix = f"pulumi config set --stack {self.stack} --path network.dns_endpoint true"
        problems = super().access_problems()
        return [replace(one, fix=fix, allowed=f"network.dns_endpoint true | {one.allowed}") for one in problems]

    def problems(self) -> Iterable[Problem]:
        """Yield problems across sections."""
        yield from super().problems()
        yield from checks.zone_in_region("gcp:zone", self.zone, self.region, "-")
        yield from self._name_problems()
        if self.service:
            yield from self._service_problems()
            return
        if self.network.existing:
            owned = ("network.cidr", "network.pods_cidr", "network.services_cidr")
            yield from find_unused(self, owned, "a range of the stack's own network, and network.existing is set")
            yield from self.network.existing.problems()
        else:
            yield from self._address_problems()
        yield from self._control_plane_problems()
        if self.network.dns_endpoint and self.network.api_access == "inside":
            key = "network.dns_endpoint"
            message = "a name that reaches the API from anywhere, and network.api_access is 'inside'"
            yield Problem(key, message, "unset, or network.api_access unset", fix_by_removing(key), True)
        yield from checks.one_of("system.instance_type", self.system.instance_type, price_table()["system_nodes"])
        yield from self.storage.problems()
        yield from self.maintenance.problems_for(self.cluster.kubernetes_version)

    def _nat_lines(self, nat: float, address: float) -> Sequence[CostLine]:
        """Return the costs of the stack's own NAT."""
        return CostLine("Cloud NAT gateway", 1, nat), CostLine("external address of Cloud NAT", 1, address)

    def _service_problems(self) -> Iterable[Problem]:
        """Check for keys that have no effect on Vertex AI."""
        hours = self.vertex.queue_hours
        if hours is not None and self.gpu.capacity != "flex_start":
            key, message = "vertex.queue_hours", f"capacity {self.gpu.capacity!r} has no queue"
            yield Problem(key, message, "only with gpu.capacity flex_start", fix_by_removing(key), hours)

    def _address_problems(self) -> Iterable[Problem]:
        """Check that the ranges do not overlap and have room for the nodes, their pods and the services."""
        net, num_nodes = self.network, self.gpu.nodes.max + self.system.num_nodes
        names = ["cidr", "pods_cidr", "services_cidr", "control_plane_cidr", *(["fabric_cidr"] if self.tcpx else [])]
        ranges = {f"network.{name}": str(getattr(net, name)) for name in names}
        yield from checks.disjoint(ranges)
        # An upgrade of the system pool adds one node.
        yield from checks.holds("network.cidr", net.cidr, num_nodes + 1, "the nodes", NUM_RESERVED)
        pods = (num_nodes + 1) * POD_ADDRESSES_PER_NODE
        purpose = f"pods ({POD_ADDRESSES_PER_NODE} for each node)"
        yield from checks.holds("network.pods_cidr", net.pods_cidr, pods, purpose, 0)
        yield from checks.holds("network.services_cidr", net.services_cidr, NUM_SERVICES, "services", 0)

    def _control_plane_problems(self) -> Iterable[Problem]:
        """Check the ranges that are the stack's own in any network: the API's and the cards' of GPUDirect-TCPX."""
        net = self.network
        if (control := IPv4Network(net.control_plane_cidr)).prefixlen != 28:
            key, proposal = "network.control_plane_cidr", f"{control.network_address}/28"
            yield Problem(
                key, "a size that GKE rejects", "a /28", fix_by_setting(key, proposal), net.control_plane_cidr
            )
        if self.tcpx:
            per_network = 2 ** (self.gpu.nodes.max + NUM_RESERVED - 1).bit_length()
            purpose = "a network card of each GPU node in each of four networks"
            total = NUM_FABRIC_NETWORKS * per_network
            yield from checks.holds("network.fabric_cidr", net.fabric_cidr, total, purpose, 0)

    def _name_problems(self) -> Iterable[Problem]:
        """Check the stack's name and the labels against the rules of Google Cloud."""
        longest = _MAX_SERVICE_STACK_NAME if self.service else _MAX_STACK_NAME
        allowed = f"a lowercase letter, then lowercase letters, digits and hyphens, {longest} at most, without google"
        yield from checks.stack_name(self.stack, "Google Cloud", _STACK_NAME, longest, allowed)
        for key in self.tags.extra:
            if not re.fullmatch(_LABEL_KEY, key):
                name = f'tags.extra["{key}"]'
                allowed = "a lowercase letter, then lowercase letters, digits, _ and -, 63 at most"
                yield Problem(name, "a label that Google Cloud rejects", allowed, fix_by_removing(name), key)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[CostLine]:
        """Return the costs of the GPU nodes and of everything else that is billed by the hour, used or not.

        With a service, only machines are billed, while a job runs.
        """
        if self.service:
            return super().cost_lines(num_gpu_nodes)
        prices, num_system = price_table(), self.system.num_nodes
        nat = min((num_gpu_nodes + num_system) * prices["nat"]["node"], prices["nat"]["gateway_at_most"])
        system_price = prices["system_nodes"].get(self.system.instance_type, 0.0)
        return (
            *super().cost_lines(num_gpu_nodes),
            CostLine("GKE control plane", 1, prices["control_plane"]["cluster"]),
            CostLine(f"system node {self.system.instance_type}", num_system, system_price),
            CostLine("GiB of Filestore", self.storage.size_gib, prices["filestore"]["zonal"] / _HOURS_PER_MONTH),
            *(() if self.network.existing else self._nat_lines(nat, prices["nat"]["external_address"])),
            CostLine("Cloud KMS key version", 1, prices["key"]["version"] / _HOURS_PER_MONTH),
        )


def _nearest_filestore_size(size_gib: int) -> int:
    """Return the next larger size that Filestore accepts, the largest one if there is none."""
    for smallest, largest, step in _FILESTORE_BANDS:
        if size_gib <= largest:
            return max(smallest, -(-size_gib // step) * step)
    return _FILESTORE_BANDS[-1][1]


def account_id(settings: Settings, role: str) -> str:
    """Return the id of a service account: 6 to 30 characters, unique in the project.

    The digest distinguishes stacks of the same name. It is not random, so that `up` after `destroy` uses the same ids:
    a deleted account keeps its id for 30 days.
    """
    digest = hashlib.sha256(f"{settings.project}/{settings.stack}".encode()).hexdigest()[:6]
    return f"{settings.stack[: 30 - len(f'-{role}-{digest}')]}-{role}-{digest}"


@cache
def price_table() -> Mapping[str, Mapping[str, float]]:
    """Return the numbers of `prices.toml` by section, without dates and sources."""
    sections = tomllib.loads((Path(__file__).parent / "prices.toml").read_text())
    return {
        name: {key: float(value) for key, value in rows.items() if isinstance(value, (int, float))}
        for name, rows in sections.items()
    }
