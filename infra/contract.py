"""The contract between clouds and workloads: what every cluster or training service offers.

Plain values decide which resources exist; `pulumi.Output` appears only if a cloud computes the value. Pulumi is
imported for types only, so that workloads can use the contract without loading it.
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
    """A taint of the GPU pool that a pod must tolerate; an empty value tolerates every value of the key."""

    key: str
    value: str = ""
    effect: Effect = "NoSchedule"

    @property
    def manifest(self) -> dict[str, str]:
        """Return the entry of a pod's `tolerations`."""
        if not self.value:
            return {"key": self.key, "operator": "Exists", "effect": self.effect}
        return {"key": self.key, "operator": "Equal", "value": self.value, "effect": self.effect}


#: Every GPU pool carries this taint, which the charts of NVIDIA and of the managed clouds already tolerate.
GPU_TAINT = Toleration("nvidia.com/gpu", "present")


@dataclass(frozen=True)
class CustomResource:
    """A custom resource of an operator, created after the operator and deleted before it."""

    api_version: str
    kind: str
    name: str
    spec: Mapping[str, object]
    namespace: str | None = None


@dataclass(frozen=True)
class ChartRequest:
    """A Helm chart that a cluster needs: its key in the pinned table, its values and its custom resources.

    `runtime_class` is the RuntimeClass that its operator creates for pods that use GPUs without requesting one.
    """

    key: str
    values: Mapping[str, object] = field(default_factory=dict)
    resources: Sequence[CustomResource] = ()
    runtime_class: str | None = None


@dataclass(frozen=True)
class GpuPool:
    """The nodes that train: facts about their instance type, and what a pod needs to be scheduled on them.

    `resource_limits` are the limits of a pod that uses a whole node, including GPUs and fabric devices. `chart` makes
    the GPUs schedulable; it is None if the cluster already has a driver and a device plugin.
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
        """Return the number of GPUs per node; 0 on a CPU cluster."""
        return self.instance.num_gpus


@dataclass(frozen=True)
class Mount:
    """A volume in a container: a host path, or a memory-backed empty directory if `host_path` is None."""

    name: str
    mount_path: str
    host_path: str | None = None
    read_only: bool = True


@dataclass(frozen=True)
class Sidecar:
    """A sidecar container that the fabric needs in each trainer pod."""

    name: str
    image: str
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    capabilities: Sequence[str] = ()
    privileged: bool = False
    mounts: Sequence[Mount] = ()


@dataclass(frozen=True)
class Fabric:
    """The network between GPU nodes: a pod's settings for it, and the line in NCCL's log that confirms its use.

    `rdma` says that the cards access the memory of pods, which pods must therefore be able to lock: the node's limit
    allows it, or the pods run `as_root` with capability IPC_LOCK. `image_target` is the build target of the trainer
    image that contains the fabric's user-space libraries. `chart` makes the fabric's devices schedulable; it is None if
    no device is requested.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    pod_annotations: Mapping[str, str] = field(default_factory=dict)
    rdma: bool = False
    as_root: bool = False
    capabilities: Sequence[str] = ()
    mounts: Sequence[Mount] = ()
    sidecars: Sequence[Sidecar] = ()
    image_target: str = "default"
    expected_log: str = ""
    chart: ChartRequest | None = None

    def __post_init__(self) -> None:
        """Refuse capabilities that do nothing: Kubernetes gives a non-root user none (kubernetes/enhancements#2763)."""
        if self.capabilities and not self.as_root:
            got = ", ".join(self.capabilities)
            raise ValueError(f"capabilities have no effect for a non-root user: got {got}. Fix: set as_root")

    @property
    def pod_security(self) -> Literal["restricted", "privileged"]:
        """Return the strictest Pod Security level that admits these pods.

        `baseline` is no option: it admits root, but rejects host paths and added capabilities such as IPC_LOCK.
        """
        needs_host = any(mount.host_path for mount in self.mounts)
        return "privileged" if self.as_root or self.sidecars or needs_host else "restricted"


@dataclass(frozen=True)
class Storage:
    """Shared storage for datasets: an existing claim in the cluster's namespace.

    `work_folder` is the only folder that the trainer's user may write to, for logs and prepared data.
    `bucket_folder` mirrors the bucket's datasets; it is None if a Job has to copy them.
    """

    claim_name: str
    mount_path: str
    size_gib: int
    access_mode: AccessMode
    work_folder: str = "work"
    bucket_folder: str | None = None

    @property
    def work_path(self) -> str:
        """Return the path of `work_folder` in a pod."""
        return f"{self.mount_path.rstrip('/')}/{self.work_folder}"


@dataclass(frozen=True)
class Identity:
    """A pod's keyless access to the bucket: annotations of its service account and its own labels.

    The workloads create the service account and set `env` in every container that opens the bucket. `secret_name` is
    a Secret whose entries become environment variables, for clusters without keyless identity. `endpoints`
    (`cidr:port`) are the addresses of the credential service if it does not use plain HTTPS.
    """

    service_account: str = "trainer"
    annotations: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    secret_name: str | None = None
    endpoints: Sequence[str] = ()


@dataclass(frozen=True)
class Login:
    """What Docker presents to a registry; the password is a secret output, and short-lived."""

    username: pulumi.Input[str]
    password: pulumi.Output[str]


@dataclass(frozen=True)
class Registry:
    """The registry of the trainer image; `repository` is None if the stack builds no image (`job.image`).

    `login` requests the credentials for a push; it is None if the registry needs none, and only a build calls it.
    """

    repository: pulumi.Input[str] | None
    server: pulumi.Input[str] | None = None
    login: Callable[[], Login] | None = None


@dataclass(frozen=True)
class Cluster:
    """A Kubernetes cluster that can run the trainer, with everything else that a job uses.

    `disk_class` is a storage class for disks that one pod mounts, None if the cluster has none that outlives a node.
    `before_operators` must exist before a chart can be scheduled (system nodes), `before_workloads` before a training
    pod can (GPU pool, volume, identity); the engine deletes them in reverse order. `commands` are shell lines for the
    user, by purpose: `registry_login`, `upload_data`.
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
    disk_class: str | None = None
    commands: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    before_operators: Sequence[pulumi.Resource] = ()
    before_workloads: Sequence[pulumi.Resource] = ()


#: The image's own entry point (trainer/Dockerfile), for services that run a command line instead.
ENTRYPOINT = "/app/trainer/entrypoint.sh"


@dataclass(frozen=True)
class ServiceRun:
    """A run for a training service; each machine starts the image's entry point with the same `arguments`.

    With `reads_data`, the arguments contain the service's `data_path`, which must exist then.
    """

    run: str
    image: pulumi.Input[str]
    arguments: Sequence[pulumi.Input[str]]
    num_nodes: int
    reads_data: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Submitted:
    """A run that a service accepted: its name, the web page that shows it, and shell lines by purpose."""

    name: pulumi.Output[str]
    page: pulumi.Output[str]
    commands: Mapping[str, pulumi.Input[str]]


@dataclass(frozen=True)
class TrainingService:
    """A cloud's own training service, used instead of a cluster.

    Its machines read the bucket's datasets from `data_path` and write checkpoints to `checkpoint_uri`. `gpu` and
    `fabric` describe a machine; their fields for pods are empty. `submit` registers a run under a name and a parent.
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
    """The function of a cloud's `provision.py`, which creates a cluster from checked settings."""

    def __call__(self, name: str, settings: SettingsT, opts: pulumi.ResourceOptions | None = None) -> Cluster:
        """Register all resources under `name` and return the contract."""


class Serve(Protocol[SettingsT]):
    """The function of a cloud's `service.py`, which prepares its training service from checked settings."""

    def __call__(self, name: str, settings: SettingsT, opts: pulumi.ResourceOptions | None = None) -> TrainingService:
        """Register the resources of the service under `name`, none of them in Kubernetes."""


class Credentials(Protocol):
    """The interface of a cloud's `credentials.py`: the account in use, and how to detect and renew bad credentials.

    `ASKS` is whether `account` calls the provider, `LOGIN` the command that renews the credentials, and `REFUSED` are
    parts of the error messages for bad credentials. The module imports no SDK before `account` is called.
    """

    ASKS: bool
    LOGIN: str
    REFUSED: Sequence[str]

    def account(self, settings: StackSettings) -> pulumi.Input[str]:
        """Return the account, subscription, project or cluster that the current credentials belong to."""
