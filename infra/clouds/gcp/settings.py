"""What a stack on Google Cloud configures, the mistakes it can make, and what it costs beside its GPU nodes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

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

#: Most pods on one node. GKE gives each node twice as many addresses, rounded up to a power of two.
#: https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr
MAX_PODS_PER_NODE = 64
POD_ADDRESSES_PER_NODE = 128

#: Services of the operators and of a few hundred jobs; a range cannot be changed once the cluster exists.
NUM_SERVICES = 512

#: Addresses that Google Cloud keeps of every subnet: the first two and the last two.
NUM_RESERVED = 4

#: GPUDirect-TCPX has four network cards beside the node's own, each in a network of its own.
NUM_FABRIC_NETWORKS = 4

#: Flex-start takes nodes back after seven days at the latest.
MAX_FLEX_START_HOURS = 168

#: Filestore's two bands of the zonal tier: smallest, largest, step in GiB. An instance never leaves its band.
_FILESTORE_BANDS = ((1024, 9984, 256), (10240, 102400, 2560))

#: Labels of Google Cloud; a stack's name is also the beginning of names that end in eight letters of Pulumi's.
_STACK_NAME = r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?"
_LABEL_KEY = r"[a-z][a-z0-9_-]{0,62}"

_HOURS_PER_MONTH = 730


class Gpu(ManagedGpuSettings):
    """The accelerator pool, all of it in `gcp:zone`.

    `max_run_hours` is when flex-start takes a node back, unset its own limit of seven days.
    """

    instance_type: str = Field(examples=["a2-highgpu-8g"])
    capacity: Literal["on_demand", "spot", "reservation", "flex_start"] = "on_demand"
    max_run_hours: int | None = Field(None, ge=1, le=MAX_FLEX_START_HOURS)
    boot_disk_gib: int = Field(200, ge=50, le=65536)

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from super().problems()
        if self.nodes.max < 1:
            key = "gpu.nodes.max"
            yield Problem(
                key, "an autoscaled pool of at most 0 nodes is refused", "at least 1", fix_by_setting(key, 1), 0
            )
        flexible = self.capacity == "flex_start"
        if flexible and self.nodes.min:
            key, wrong = "gpu.nodes.min", "flex-start brings nodes when pods wait for them and keeps none"
            yield Problem(key, wrong, "0", fix_by_setting(key, 0), self.nodes.min)
        if self.max_run_hours is not None and not flexible:
            key, wrong = "gpu.max_run_hours", f"capacity {self.capacity!r} does not end by itself"
            yield Problem(key, wrong, "only with gpu.capacity flex_start", fix_by_removing(key), self.max_run_hours)


class Network(NetworkSettings):
    """The VPC: `cidr` is the nodes' subnet, pods and services have secondary ranges beside it.

    `control_plane_cidr` is the /28 of the Kubernetes API, `fabric_cidr` is cut in four for the networks of
    GPUDirect-TCPX. `dns_endpoint` lets whoever IAM admits reach the API by name, from anywhere.
    """

    pods_cidr: Cidr = "10.64.0.0/14"
    services_cidr: Cidr = "10.80.0.0/20"
    control_plane_cidr: Cidr = "172.16.0.0/28"
    fabric_cidr: Cidr = "10.200.0.0/18"
    dns_endpoint: bool = False

    @property
    def fabric_subnets(self) -> list[str]:
        """The range of each network of GPUDirect-TCPX."""
        bits = NUM_FABRIC_NETWORKS.bit_length() - 1
        return [str(subnet) for subnet in IPv4Network(self.fabric_cidr).subnets(prefixlen_diff=bits)]


class KubernetesCluster(Section):
    """The control plane: `regional` has three replicas, `zonal` one that is away during an upgrade, at one price."""

    location: Literal["regional", "zonal"] = "regional"


class Vertex(Section):
    """What `job.launcher vertex` reads: Vertex AI runs the job, and there is no cluster.

    `tensorboard` makes an instance that shows the run's curves in the console. `start_minutes` is how long `pulumi up`
    waits for the machines before it leaves the job in its queue; `queue_hours` how long flex-start looks for them,
    unset a day. `endpoint` replaces the region's own address, as Private Service Connect needs it.
    """

    tensorboard: bool = True
    start_minutes: int = Field(10, ge=1, le=120)
    queue_hours: int | None = Field(None, ge=1, le=MAX_FLEX_START_HOURS)
    endpoint: str | None = Field(
        None, pattern=r"^https?://[^/]+$", examples=["https://us-central1-aiplatform-<endpoint>.p.googleapis.com"]
    )


class System(Section):
    """The nodes that run everything but training: operators, dashboards, DNS."""

    instance_type: str = Field("e2-standard-4", examples=["e2-standard-4"])
    num_nodes: int = Field(2, ge=1, le=20)


class Storage(ManagedStorageSettings):
    """Filestore, zonal tier, beside the bucket.

    One TiB reads 260 MiB/s; from 10 TiB on each 2.5 TiB read 650 MiB/s.
    """

    size_gib: int = Field(1024, gt=0)

    def problems(self) -> Iterable[Problem]:
        """A size that Filestore refuses."""
        nearest = _nearest_filestore_size(self.size_gib)
        legal = "1024 to 9984 in steps of 256 (1 to 9.75 TiB), or 10240 to 102400 in steps of 2560 (10 to 100 TiB)"
        yield from checks.size_step(
            "storage.size_gib", self.size_gib, legal, None if nearest == self.size_gib else nearest
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
        *("network", "cluster", "system", "gpu.nodes.min"),
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
    vertex: Vertex = Vertex()

    @property
    def instance(self) -> catalog.InstanceType | None:
        """The GPU nodes' row of the catalog, None where it has none, which `problems` tells."""
        rows = catalog.instances(self.cloud)
        return next((row for row in rows if row.name == self.gpu.instance_type), None)

    @property
    def fabric(self) -> str:
        """The catalog's word for the network between GPU nodes."""
        return self.instance.fabric if self.instance else "TCP"

    @property
    def fast_socket(self) -> bool:
        """Whether NCCL's Fast Socket plug-in belongs on the nodes: A2."""
        return "Fast Socket" in self.fabric

    @property
    def tcpx(self) -> bool:
        """Whether the nodes have GPUDirect-TCPX and its four networks: A3 High."""
        return "TCPX" in self.fabric

    @property
    def compact(self) -> bool:
        """Whether GPU nodes are placed close together.

        Not for one without a fabric; not beside a reservation, whose nodes were placed when it was made; not with
        flex-start, which refuses it for every type of the catalog.
        """
        return self.fabric != "TCP" and self.gpu.capacity in ("on_demand", "spot")

    @property
    def num_initial_nodes(self) -> int:
        """GPU nodes that the pool is created with; flex-start begins empty and lets pending pods bring them."""
        return 0 if self.gpu.capacity == "flex_start" else self.gpu.nodes.desired

    @property
    def cluster_location(self) -> str:
        """Where the control plane runs."""
        return self.region if self.cluster.location == "regional" else self.zone

    @property
    def is_private(self) -> bool:
        """Whether only machines inside the VPC reach the Kubernetes API."""
        return not self.network.authorized_cidrs and not self.network.dns_endpoint

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections."""
        yield from super().problems()
        yield from checks.zone_in_region("gcp:zone", self.zone, self.region, "-")
        yield from self._name_problems()
        if self.service:
            yield from self._service_problems()
            return
        yield from self._address_problems()
        yield from checks.one_of("system.instance_type", self.system.instance_type, _prices()["system_nodes"])
        yield from self.storage.problems()

    def _service_problems(self) -> Iterable[Problem]:
        """What Vertex AI would do nothing with."""
        hours = self.vertex.queue_hours
        if hours is not None and self.gpu.capacity != "flex_start":
            key, wrong = "vertex.queue_hours", f"capacity {self.gpu.capacity!r} has no queue"
            yield Problem(key, wrong, "only with gpu.capacity flex_start", fix_by_removing(key), hours)

    def _address_problems(self) -> Iterable[Problem]:
        """Ranges apart from each other, and wide enough for the nodes, their pods and the services."""
        net, num_nodes = self.network, self.gpu.nodes.max + self.system.num_nodes
        names = ["cidr", "pods_cidr", "services_cidr", "control_plane_cidr", *(["fabric_cidr"] if self.tcpx else [])]
        ranges = {f"network.{name}": str(getattr(net, name)) for name in names}
        yield from checks.disjoint(ranges)
        # One node more than the system pool has, while GKE replaces it by a newer one.
        yield from checks.holds("network.cidr", net.cidr, num_nodes + 1, "the nodes", NUM_RESERVED)
        pods = (num_nodes + 1) * POD_ADDRESSES_PER_NODE
        why = f"pods ({POD_ADDRESSES_PER_NODE} for each node)"
        yield from checks.holds("network.pods_cidr", net.pods_cidr, pods, why, 0)
        yield from checks.holds("network.services_cidr", net.services_cidr, NUM_SERVICES, "services", 0)
        if (control := IPv4Network(net.control_plane_cidr)).prefixlen != 28:
            key, proposal = "network.control_plane_cidr", f"{control.network_address}/28"
            yield Problem(
                key, "a size that GKE refuses", "a /28", fix_by_setting(key, proposal), net.control_plane_cidr
            )
        if self.tcpx:
            per_network = 2 ** (self.gpu.nodes.max + NUM_RESERVED - 1).bit_length()
            why, total = "a network card of each GPU node in each of four networks", NUM_FABRIC_NETWORKS * per_network
            yield from checks.holds("network.fabric_cidr", net.fabric_cidr, total, why, 0)

    def _name_problems(self) -> Iterable[Problem]:
        """Names and labels that Google Cloud refuses."""
        if not re.fullmatch(_STACK_NAME, self.stack):
            legal = "a small letter, then small letters, digits and hyphens, 30 at most: names and labels begin with it"
            yield Problem("stack", "a name that Google Cloud refuses", legal, "pulumi stack rename <name>", self.stack)
        for key in self.tags.extra:
            if not re.fullmatch(_LABEL_KEY, key):
                name, legal = f'tags.extra["{key}"]', "a small letter, then small letters, digits, _ and -, 63 at most"
                yield Problem(name, "a label that Google Cloud refuses", legal, fix_by_removing(name), key)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[CostLine]:
        """The GPU nodes and everything that is billed by the hour whether it is used or not.

        Beside a service there is no such thing: its machines are billed while the job runs.
        """
        if self.service:
            return super().cost_lines(num_gpu_nodes)
        prices, num_system = _prices(), self.system.num_nodes
        nat = min((num_gpu_nodes + num_system) * prices["nat"]["node"], prices["nat"]["gateway_at_most"])
        system_price = prices["system_nodes"].get(self.system.instance_type, 0.0)
        return (
            *super().cost_lines(num_gpu_nodes),
            CostLine("GKE control plane", 1, prices["control_plane"]["cluster"]),
            CostLine(f"system node {self.system.instance_type}", num_system, system_price),
            CostLine("GiB of Filestore", self.storage.size_gib, prices["filestore"]["zonal"] / _HOURS_PER_MONTH),
            CostLine("Cloud NAT gateway", 1, nat),
            CostLine("external address of Cloud NAT", 1, prices["nat"]["external_address"]),
            CostLine("Cloud KMS key version", 1, prices["key"]["version"] / _HOURS_PER_MONTH),
        )


def _nearest_filestore_size(size_gib: int) -> int:
    """The legal size next above, the largest where there is none above."""
    for smallest, largest, step in _FILESTORE_BANDS:
        if size_gib <= largest:
            return max(smallest, -(-size_gib // step) * step)
    return _FILESTORE_BANDS[-1][1]


@cache
def _prices() -> Mapping[str, Mapping[str, float]]:
    """The numbers of `prices.toml` by section; dates and sources stay in the file, for people."""
    sections = tomllib.loads((Path(__file__).parent / "prices.toml").read_text())
    return {
        name: {key: float(value) for key, value in rows.items() if isinstance(value, (int, float))}
        for name, rows in sections.items()
    }
