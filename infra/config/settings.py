"""What every stack can configure; a cloud's own keys are in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from infra import catalog, cost
from infra.config import checks
from infra.config.problems import Problem, find_unused

#: The folder of the shared storage that the trainer's user may write to, where a cloud has no reason for another.
WORK_FOLDER = "work"


def _cidr(value: str) -> str:
    return str(IPv4Network(value))


Cidr = Annotated[str, AfterValidator(_cidr), Field(examples=["10.0.0.0/16"])]
#: Legal as a tag or label on every cloud: the strictest of them allows these characters, 63 at most.
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$", examples=["ml-platform"])]


class Section(BaseModel):
    """A group of keys: immutable, and a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Nodes(Section):
    """How many GPU nodes: the autoscaler's bounds and the number to start with."""

    min: int = Field(0, ge=0, le=1000)
    desired: int = Field(2, ge=0, le=1000)
    max: int = Field(2, ge=0, le=1000)


class GpuSettings(Section):
    """The GPU pool of any cluster."""

    nodes: Nodes = Nodes()

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from checks.node_counts(self.nodes.min, self.nodes.desired, self.nodes.max)


class ManagedGpuSettings(GpuSettings):
    """The GPU pool of a cluster that this project creates.

    A cloud narrows `capacity` with a Literal of its own and names in `reserved` those that need `reservation_id`.
    """

    reserved: ClassVar[frozenset[str]] = frozenset({"reservation"})

    instance_type: str = Field(examples=["<type>"])
    capacity: str = "on_demand"
    reservation_id: str | None = None

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from super().problems()
        yield from checks.reservation(self.capacity, self.reservation_id, self.reserved)


class StorageSettings(Section):
    """Shared storage for datasets, and what `pulumi destroy` does with the checkpoints."""

    size_gib: int = Field(1200, gt=0)
    mount_path: str = Field("/data", pattern=r"^/[a-zA-Z0-9/_.-]+$", examples=["/data"])
    on_destroy: Literal["keep", "delete"] = "keep"


class ManagedStorageSettings(StorageSettings):
    """Storage that this project creates, the checkpoint bucket included."""

    expire_checkpoints_after_days: int | None = Field(None, gt=0)


class NetworkSettings(Section):
    """The private network and who may reach the Kubernetes API; nothing is public unless ranges are given."""

    cidr: Cidr = "10.0.0.0/16"
    authorized_cidrs: tuple[Cidr, ...] = ()


class Tags(Section):
    """What every resource is tagged or labelled with, beside project and stack."""

    owner: Label
    cost_centre: Label
    extra: dict[str, Label] = Field(default_factory=dict)


class Budget(Section):
    """A ceiling that stops `pulumi preview`; counted at `gpu.nodes.max`, since an autoscaler may go there."""

    max_usd_per_hour: float | None = Field(None, gt=0)


class AddonSettings(Section):
    """Operators beyond those that the launcher and the hardware need."""

    monitoring: bool = True
    kueue: bool = False


class StackSettings(Section):
    """Everything a stack configures about its cluster; a cloud's `Settings` adds its own keys.

    `provider_keys` maps a field to the configuration key of the cloud's provider that holds it. `services` are the
    values of `job.launcher` that name a training service of the cloud, which then takes the cluster's place: `service`
    is the one chosen, and the keys in `of_clusters` are refused beside it. `for_services` are read beside it alone.
    """

    provider_keys: ClassVar[Mapping[str, str]] = {}
    services: ClassVar[tuple[str, ...]] = ()
    of_clusters: ClassVar[tuple[str, ...]] = ("namespace", "addons", "storage.size_gib")
    for_services: ClassVar[tuple[str, ...]] = ()

    service: str | None = None
    project: str
    stack: str
    cloud: str
    namespace: str = Field("training", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", examples=["training"])
    gpu: GpuSettings = GpuSettings()
    storage: StorageSettings = StorageSettings()
    tags: Tags
    budget: Budget = Budget()
    addons: AddonSettings = AddonSettings()

    @property
    def labels(self) -> dict[str, str]:
        """Tags of every resource, in the spelling that all clouds allow."""
        common = {"project": self.project, "stack": self.stack, "managed-by": "pulumi"}
        return common | {"owner": self.tags.owner, "cost-centre": self.tags.cost_centre} | self.tags.extra

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections; a cloud extends it with `yield from super().problems()` first."""
        yield from self.gpu.problems()
        if self.service:
            yield from find_unused(self, self.of_clusters, f"of a cluster, and {self.service} has none")
        else:
            yield from find_unused(self, self.for_services, f"read with job.launcher {' | '.join(self.services)} alone")

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[cost.CostLine]:
        """What an hour costs with so many GPU nodes; a cloud adds its control plane, system nodes and storage."""
        del num_gpu_nodes
        return ()

    @property
    def interruptible(self) -> bool:
        """Whether the pool's nodes may be taken away at any time, at the spot price."""
        return False

    @property
    def gpus_per_node(self) -> int:
        """GPUs that one node of the pool offers; 0 on a CPU cluster."""
        return 0

    @property
    def has_registry(self) -> bool:
        """Whether the stack has a registry to push the trainer's image to."""
        return False

    @property
    def work_folder(self) -> str:
        """The folder of the shared storage that the trainer's user may write to."""
        return WORK_FOLDER

    @property
    def bucket_folder(self) -> str | None:
        """The folder of the shared storage that shows the bucket's datasets; None where it shows none."""
        return None


class ManagedStackSettings(StackSettings):
    """Settings of a stack whose cluster this project creates."""

    gpu: ManagedGpuSettings
    network: NetworkSettings = NetworkSettings()
    storage: ManagedStorageSettings = ManagedStorageSettings()

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections."""
        yield from super().problems()
        yield from checks.instance_of_cloud(self.cloud, self.gpu.instance_type)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[cost.CostLine]:
        """The GPU nodes; a cloud adds the rest."""
        return (cost.gpu_nodes(self.cloud, self.gpu.instance_type, num_gpu_nodes),)

    @property
    def interruptible(self) -> bool:
        """Whether the pool's nodes may be taken away at any time, at the spot price."""
        return self.gpu.capacity == "spot"

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the instance type; 0 where the catalog does not have it, which `problems` tells."""
        types = {row.name: row for row in catalog.instances(self.cloud)}
        return types[self.gpu.instance_type].num_gpus if self.gpu.instance_type in types else 0

    @property
    def has_registry(self) -> bool:
        """This project creates one beside the cluster."""
        return True
