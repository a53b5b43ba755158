"""What every cluster offers a workload, whoever provisioned it.

Plain values decide which resources exist; `pulumi.Output` appears only where a cloud computes the value. Pulumi is
imported for types only, so a workload can reason about a cluster without loading it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import pulumi
    import pulumi_kubernetes as k8s

    from infra.catalog import InstanceType
    from infra.config.settings import StackSettings

AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]
Effect = Literal["NoSchedule", "NoExecute", "PreferNoSchedule"]

#: Every GPU pool carries this label: the NVIDIA device plugin's chart schedules nothing without it.
GPU_LABEL = {"nvidia.com/gpu.present": "true"}


@dataclass(frozen=True)
class Toleration:
    """One taint of the GPU pool that a pod must tolerate; an empty value tolerates any value of the key."""

    key: str
    value: str = ""
    effect: Effect = "NoSchedule"

    @property
    def manifest(self) -> dict[str, str]:
        """The entry of a pod's `tolerations`."""
        if not self.value:
            return {"key": self.key, "operator": "Exists", "effect": self.effect}
        return {"key": self.key, "operator": "Equal", "value": self.value, "effect": self.effect}


#: Every GPU pool carries this taint, the one that the charts of NVIDIA and the managed clouds already tolerate.
GPU_TAINT = Toleration("nvidia.com/gpu", "present")


@dataclass(frozen=True)
class CustomResource:
    """An object of an operator's own kind, created after the operator and deleted before it."""

    api_version: str
    kind: str
    name: str
    spec: Mapping[str, object]
    namespace: str | None = None


@dataclass(frozen=True)
class ChartRequest:
    """A chart that this cluster needs: its key in the pinned table, its values, the objects that configure it."""

    key: str
    values: Mapping[str, object] = field(default_factory=dict)
    resources: Sequence[CustomResource] = ()


@dataclass(frozen=True)
class GpuPool:
    """The nodes that train: facts of their instance type and what a pod needs to land on one of them.

    `resource_limits` are the limits of one pod that owns a whole node, GPUs and fabric devices included.
    `chart` is what makes the GPUs schedulable, None where the cluster brings driver and device plugin itself.
    """

    instance: InstanceType
    num_nodes_min: int
    num_nodes_desired: int
    num_nodes_max: int
    node_selector: Mapping[str, str]
    tolerations: Sequence[Toleration]
    resource_limits: Mapping[str, str]
    shared_memory_gib: int
    chart: ChartRequest | None = None
    exports_metrics: bool = False
    interruptible: bool = False

    @property
    def gpus_per_node(self) -> int:
        """GPUs that one node offers; 0 on a CPU cluster."""
        return self.instance.num_gpus


@dataclass(frozen=True)
class Mount:
    """A host path, or a memory-backed empty directory where `host_path` is None, inside a container."""

    name: str
    mount_path: str
    host_path: str | None = None
    read_only: bool = True


@dataclass(frozen=True)
class Sidecar:
    """A container that must run beside the trainer for the fabric to work."""

    name: str
    image: str
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    capabilities: Sequence[str] = ()
    privileged: bool = False
    mounts: Sequence[Mount] = ()


@dataclass(frozen=True)
class Fabric:
    """The network between GPU nodes: what a pod sets to use it, and the line in NCCL's log that proves it did.

    `image_target` is the build target of the trainer image that carries the fabric's user-space libraries.
    `chart` makes the fabric's devices schedulable, None where no device is requested.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    pod_annotations: Mapping[str, str] = field(default_factory=dict)
    capabilities: Sequence[str] = ()
    mounts: Sequence[Mount] = ()
    sidecars: Sequence[Sidecar] = ()
    image_target: str = "default"
    expected_log: str = ""
    chart: ChartRequest | None = None

    @property
    def pod_security(self) -> Literal["restricted", "privileged"]:
        """The Pod Security level that the trainer's namespace must enforce for these pods to be admitted.

        `baseline` refuses added capabilities such as IPC_LOCK and host paths just as `restricted` does.
        """
        needs_host = any(mount.host_path for mount in self.mounts)
        return "privileged" if self.capabilities or self.sidecars or needs_host else "restricted"


@dataclass(frozen=True)
class Storage:
    """Shared storage for datasets: a claim that exists in the cluster's namespace and is ready to mount.

    `work_folder` is the one folder of it that the trainer's user may write to, for logs and prepared data;
    `bucket_folder` is where the bucket's datasets appear by themselves, None where a Job must copy them.
    """

    claim_name: str
    mount_path: str
    size_gib: int
    access_mode: AccessMode
    work_folder: str = "work"
    bucket_folder: str | None = None

    @property
    def work_path(self) -> str:
        """Where a pod finds the folder that it may write to."""
        return f"{self.mount_path.rstrip('/')}/{self.work_folder}"


@dataclass(frozen=True)
class Identity:
    """How a pod reaches the bucket without a key: its service account's annotations and its own labels.

    The workloads create the service account and set `env` in every container that opens the bucket. `secret_name`
    names a Secret whose entries become environment variables, for clusters that have no keyless identity. `endpoints`
    (`cidr:port`) are where a pod gets its credentials, when that is not plain HTTPS.
    """

    service_account: str = "trainer"
    annotations: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    secret_name: str | None = None
    endpoints: Sequence[str] = ()


@dataclass(frozen=True)
class Registry:
    """Where the trainer image is pushed; `repository` is None where images come from elsewhere (`job.image`).

    `username` and `password` (a secret output) log a builder in; both None where the registry asks for nothing.
    """

    repository: pulumi.Input[str] | None
    server: pulumi.Input[str] | None = None
    username: pulumi.Input[str] | None = None
    password: pulumi.Input[str] | None = None


@dataclass(frozen=True)
class Cluster:
    """A Kubernetes cluster on which the trainer can run, and everything around it that a job uses.

    `before_operators` must exist before a chart can be scheduled (system nodes), `before_workloads` before a training
    pod can (GPU pool, volume, identity). On destroy the engine walks both backwards.
    `commands` are shell lines for a person, by purpose: `registry_login`, `upload_data`.
    """

    name: pulumi.Input[str]
    kubeconfig: pulumi.Output[str]
    provider: k8s.Provider
    namespace: str
    gpu: GpuPool
    fabric: Fabric
    storage: Storage
    identity: Identity
    bucket_uri: pulumi.Input[str]
    checkpoint_uri: pulumi.Input[str]
    registry: Registry
    labels: Mapping[str, str]
    charts: Sequence[ChartRequest] = ()
    commands: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    before_operators: Sequence[pulumi.Resource] = ()
    before_workloads: Sequence[pulumi.Resource] = ()


#: The image's own entry point (trainer/Dockerfile), for services that run a command line instead.
ENTRYPOINT = "/app/trainer/entrypoint.sh"


@dataclass(frozen=True)
class ServiceRun:
    """A run as every training service takes it: `arguments` for the image's entry point, the same on each machine.

    `reads_data` says that the arguments name the service's `data_path`, which must be there then.
    """

    run: str
    image: pulumi.Input[str]
    arguments: Sequence[pulumi.Input[str]]
    num_nodes: int
    reads_data: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Submitted:
    """A run that a service has taken: its name there, the page that shows it, shell lines for a person by purpose."""

    name: pulumi.Output[str]
    page: pulumi.Output[str]
    commands: Mapping[str, pulumi.Input[str]]


@dataclass(frozen=True)
class TrainingService:
    """A cloud's own training service, which takes the place of a cluster.

    Its machines find the bucket's datasets in `data_path` and write checkpoints to `checkpoint_uri`. `gpu` and `fabric`
    say what a machine is; what only a pod needs is empty in them. `submit` registers a run under a name and a parent.
    """

    name: pulumi.Input[str]
    gpu: GpuPool
    fabric: Fabric
    bucket_uri: pulumi.Input[str]
    checkpoint_uri: pulumi.Input[str]
    data_path: pulumi.Input[str]
    registry: Registry
    labels: Mapping[str, str]
    submit: Callable[[str, ServiceRun, pulumi.Resource], Submitted]
    commands: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)


SettingsT = TypeVar("SettingsT", bound="StackSettings", contravariant=True)


class Provision(Protocol[SettingsT]):
    """The one function of a cloud: from checked settings to a cluster."""

    def __call__(self, name: str, settings: SettingsT, opts: pulumi.ResourceOptions | None = None) -> Cluster:
        """Register everything under `name` and return the contract."""


class Serve(Protocol[SettingsT]):
    """The function of a cloud's `service.py`: from checked settings to its training service."""

    def __call__(self, name: str, settings: SettingsT, opts: pulumi.ResourceOptions | None = None) -> TrainingService:
        """Register what the service needs under `name`; nothing of Kubernetes."""


class Credentials(Protocol):
    """A cloud's `credentials.py`: whose resources are reached, and how to tell and fix credentials that are refused.

    `ASKS` is whether `account` calls the provider, `LOGIN` the command that renews the credentials, and `REFUSED` are
    pieces of the messages of the cloud's provider and tools. The module imports no SDK before `account` is called.
    """

    ASKS: bool
    LOGIN: str
    REFUSED: Sequence[str]

    def account(self, settings: StackSettings) -> pulumi.Input[str]:
        """The account, subscription, project or cluster that the credentials in use belong to."""
