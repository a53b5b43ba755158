"""The settings that every stack shares; a cloud's own keys are in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import AddressValueError, IPv4Network, NetmaskValueError
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from infra import catalog, cost
from infra.config import checks
from infra.config.problems import Problem, find_unused

#: Default folder of the shared storage that the trainer's user may write to.
WORK_FOLDER = "work"


def _normalize_cidr(value: str) -> str:
    """Return the range in its usual spelling; raise ValueError if it is none."""
    try:
        return str(IPv4Network(value))
    except NetmaskValueError:
        raise ValueError("not a range of IPv4 addresses: the prefix is 0 to 32") from None
    except AddressValueError:
        raise ValueError("not a range of IPv4 addresses") from None


Cidr = Annotated[str, AfterValidator(_normalize_cidr), Field(examples=["10.0.0.0/16"])]
#: A tag or label that every cloud accepts: the strictest one allows these characters, 63 at most.
Label = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$",
        description="1 to 63 of a-z, 0-9, _ and -, with a letter or digit at both ends",
        examples=["ml-platform"],
    ),
]


class Section(BaseModel):
    """A group of keys that is immutable and rejects unknown keys.

    `renamed` maps former keys of the section to the full path of the key to use instead.
    """

    renamed: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid")


class Nodes(Section):
    """The number of GPU nodes: the initial one and the limits of the autoscaler."""

    min: int = Field(0, ge=0, le=1000)
    desired: int = Field(2, ge=0, le=1000)
    max: int = Field(2, ge=0, le=1000)


class GpuSettings(Section):
    """The GPU pool of any cluster, also of one that exists already."""

    nodes: Nodes = Nodes()

    def problems(self) -> Iterable[Problem]:
        """Return the mistakes across this section's keys."""
        yield from checks.node_counts(self.nodes.min, self.nodes.desired, self.nodes.max)


class ManagedGpuSettings(GpuSettings):
    """The GPU pool of a cluster that this project creates.

    A cloud restricts `capacity` to its own Literal; `reserved` are the capacities that require `reservation_id`.
    """

    reserved: ClassVar[frozenset[str]] = frozenset({"reservation"})

    instance_type: str = Field(examples=["<type>"])
    capacity: str = "on_demand"
    reservation_id: str | None = None

    def problems(self) -> Iterable[Problem]:
        """Return the mistakes across this section's keys."""
        yield from super().problems()
        yield from checks.reservation(self.capacity, self.reservation_id, self.reserved)


class StorageSettings(Section):
    """The shared storage for datasets, and whether `pulumi destroy` keeps the checkpoints."""

    size_gib: int = Field(1200, gt=0)
    mount_path: str = Field("/data", pattern=r"^/[a-zA-Z0-9/_.-]+$", description="an absolute path", examples=["/data"])
    on_destroy: Literal["keep", "delete"] = "keep"


class ManagedStorageSettings(StorageSettings):
    """The shared storage and the checkpoint bucket that this project creates."""

    expire_checkpoints_after_days: int | None = Field(None, gt=0)


class NetworkSettings(Section):
    """The private network, and how `pulumi up` reaches the Kubernetes API.

    With `api_access` authorized_ranges the API accepts `authorized_cidrs`. With inside it is private, and `pulumi up`
    runs in the network or over a VPN. A cloud restricts `api_access` to its own Literal.
    """

    cidr: Cidr = "10.0.0.0/16"
    api_access: str = "authorized_ranges"
    authorized_cidrs: tuple[Cidr, ...] = Field((), examples=["203.0.113.7/32"])


class Tags(Section):
    """The tags or labels of every resource, in addition to project and stack."""

    owner: Label
    cost_centre: Label
    extra: dict[str, Label] = Field(default_factory=dict)


class Budget(Section):
    """A limit that stops `pulumi preview`, compared with the cost at `gpu.nodes.max`, which autoscaling may reach."""

    max_usd_per_hour: float | None = Field(None, gt=0)


class AddonSettings(Section):
    """Optional operators; those that the launcher and the hardware need are always installed."""

    monitoring: bool = True
    kueue: bool = False


class StackSettings(Section):
    """All settings of a stack's cluster; a cloud's `Settings` adds its own keys.

    `provider_keys` maps a field to the key of the cloud's provider that configures it. `services` are the values of
    `job.launcher` that select a training service of the cloud instead of a cluster; `service` is the selected one.
    The keys `of_clusters` are rejected with a service, the keys `for_services` without one.
    """

    provider_keys: ClassVar[Mapping[str, str]] = {}
    services: ClassVar[tuple[str, ...]] = ()
    of_clusters: ClassVar[tuple[str, ...]] = ("namespace", "addons", "storage.size_gib")
    for_services: ClassVar[tuple[str, ...]] = ()

    service: str | None = None
    project: str
    stack: str
    cloud: str
    namespace: str = Field(
        "training",
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        description="1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends",
        examples=["training"],
    )
    gpu: GpuSettings = GpuSettings()
    storage: StorageSettings = StorageSettings()
    tags: Tags
    budget: Budget = Budget()
    addons: AddonSettings = AddonSettings()

    @property
    def labels(self) -> dict[str, str]:
        """Return the tags of every resource, in a spelling that all clouds allow."""
        common = {"project": self.project, "stack": self.stack, "managed-by": "pulumi"}
        return common | {"owner": self.tags.owner, "cost-centre": self.tags.cost_centre} | self.tags.extra

    def problems(self) -> Iterable[Problem]:
        """Return the mistakes across sections; a cloud overrides this and calls `super().problems()` first."""
        yield from self.gpu.problems()
        if self.service:
            yield from find_unused(self, self.of_clusters, f"a key of clusters, and {self.service} has none")
        else:
            yield from find_unused(self, self.for_services, f"used only with job.launcher {' | '.join(self.services)}")

    def access_problems(self) -> Iterable[Problem]:
        """Return the mistake for which this machine could not reach the cluster; only `pulumi up` needs to."""
        return ()

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[cost.CostLine]:
        """Return the items of the hourly bill; a cloud adds its control plane, system nodes and storage."""
        del num_gpu_nodes
        return ()

    @property
    def interruptible(self) -> bool:
        """Return whether the pool uses spot capacity, which the cloud may reclaim at any time."""
        return False

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs per node of the pool; 0 on a CPU cluster."""
        return 0

    @property
    def has_registry(self) -> bool:
        """Return whether the stack has a registry to push the trainer's image to."""
        return False

    @property
    def work_folder(self) -> str:
        """Return the folder of the shared storage that the trainer's user may write to."""
        return WORK_FOLDER

    @property
    def work_path(self) -> str:
        """Return the path of `work_folder` in a pod."""
        return f"{self.storage.mount_path.rstrip('/')}/{self.work_folder}"

    @property
    def bucket_folder(self) -> str | None:
        """Return the folder of the shared storage that mirrors the bucket's datasets; None if there is none."""
        return None


class ManagedStackSettings(StackSettings):
    """The settings of a stack whose cluster this project creates."""

    of_clusters: ClassVar[tuple[str, ...]] = (*StackSettings.of_clusters, "network.api_access")

    gpu: ManagedGpuSettings
    network: NetworkSettings = NetworkSettings()
    storage: ManagedStorageSettings = ManagedStorageSettings()

    def problems(self) -> Iterable[Problem]:
        """Return the mistakes across sections."""
        yield from super().problems()
        yield from checks.instance_of_cloud(self.cloud, self.gpu.instance_type)
        yield from checks.api_access(self.network.api_access, self.network.authorized_cidrs)
        yield from checks.public_ranges(self.network.authorized_cidrs)

    def access_problems(self) -> Iterable[Problem]:
        """Return the mistake for which this machine could not reach the cluster."""
        if self.service or self.has_api_access:
            return []
        ways = get_args(type(self.network).model_fields["api_access"].annotation)
        return [checks.no_api_access(self.stack, self.network.api_access, ways)]

    @property
    def has_api_access(self) -> bool:
        """Return whether the settings name a way from this machine to the Kubernetes API."""
        return self.network.api_access != checks.BY_RANGES or bool(self.network.authorized_cidrs)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[cost.CostLine]:
        """Return the GPU nodes; a cloud adds the other items."""
        return (cost.gpu_nodes(self.cloud, self.gpu.instance_type, num_gpu_nodes),)

    @property
    def interruptible(self) -> bool:
        """Return whether the pool uses spot capacity, which the cloud may reclaim at any time."""
        return self.gpu.capacity == "spot"

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs of the instance type; 0 if it is unknown, which `problems` reports."""
        types = {row.name: row for row in catalog.instances(self.cloud)}
        return types[self.gpu.instance_type].num_gpus if self.gpu.instance_type in types else 0

    @property
    def has_registry(self) -> bool:
        """Return True: this project creates a registry with each cluster."""
        return True
