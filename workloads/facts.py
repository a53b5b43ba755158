"""What every manifest is a function of: the cluster, the job and the trainer's settings, all values known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from infra.contract import Cluster, Fabric, GpuPool, Storage
from trainer.config import TrainConfig
from workloads.settings import JobSettings

if TYPE_CHECKING:
    import pulumi

METRICS_PORT = 9400
#: From the moment when the trainer must be done to the one when Kubernetes kills it.
LEFT_OF_GRACE_SECONDS = 5


@dataclass(frozen=True)
class Facts:
    """A cluster and a job in plain values.

    `config` is what the trainer runs with: the stack's `trainer` section and what the cluster decides. `queued` says
    that Kueue admits the job, `monitored` that the cluster has Prometheus's operator.
    """

    stack: str
    namespace: str
    labels: Mapping[str, str]
    pool: GpuPool
    fabric: Fabric
    storage: Storage
    service_account: str
    annotations: Mapping[str, str]
    pod_labels: Mapping[str, str]
    identity_env: Mapping[str, str]
    identity_endpoints: tuple[str, ...]
    secret_name: str | None
    bucket_uri: str
    checkpoint_uri: str
    image: str
    job: JobSettings
    config: TrainConfig
    queued: bool = False
    monitored: bool = False

    @property
    def nodes(self) -> int:
        """Pods of the job, each on a node of its own."""
        return job_nodes(self.job, self.pool.num_nodes_desired)

    @property
    def min_nodes(self) -> int:
        """Pods with which an elastic job still trains."""
        return self.job.min_nodes or self.nodes

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one pod; 0 on CPU."""
        return self.job.gpus_per_node or self.pool.gpus_per_node

    @property
    def processes_per_node(self) -> int:
        """Trainer processes of one pod: one per GPU, on CPU as many as were asked for."""
        return self.gpus_per_node or self.job.processes_per_node or 1

    @property
    def common_labels(self) -> dict[str, str]:
        """On every object of the stack."""
        return {**self.labels, **PART_OF}

    @property
    def run_labels(self) -> dict[str, str]:
        """On every object of the run."""
        return {**self.common_labels, RUN_LABEL: self.job.run}


RUN_LABEL = "torchrec-cloud/run"
PART_OF = {"app.kubernetes.io/part-of": "torchrec-cloud"}
COMPONENT_LABEL = "app.kubernetes.io/component"


def job_nodes(job: JobSettings, desired: int) -> int:
    """Pods of the job where the pool starts with `desired` nodes."""
    return job.nodes or max(desired, 1)


def resolve(
    cluster: Cluster,
    image: pulumi.Input[str],
    job: JobSettings,
    trainer: TrainConfig,
    *,
    queued: bool,
    monitored: bool,
) -> pulumi.Output[Facts]:
    """The facts, once the cloud has said what it named things."""
    import pulumi

    first = draft(cluster, job, trainer, queued=queued, monitored=monitored)

    def complete(known: Mapping[str, Any]) -> Facts:
        return replace(first, **known, config=train_config(trainer, job, cluster, known["checkpoint_uri"]))

    return pulumi.Output.all(
        bucket_uri=cluster.bucket_uri,
        checkpoint_uri=cluster.checkpoint_uri,
        image=image,
        annotations=dict(cluster.identity.annotations),
    ).apply(complete)


def draft(cluster: Cluster, job: JobSettings, trainer: TrainConfig, *, queued: bool, monitored: bool) -> Facts:
    """The facts before anything exists: what a cloud computes is a word in angle brackets."""
    identity = cluster.identity
    return Facts(
        stack=cluster.labels["stack"],
        namespace=cluster.namespace,
        labels=cluster.labels,
        pool=cluster.gpu,
        fabric=cluster.fabric,
        storage=cluster.storage,
        service_account=identity.service_account,
        annotations=dict.fromkeys(identity.annotations, "<computed>"),
        pod_labels=identity.pod_labels,
        identity_env=identity.env,
        identity_endpoints=tuple(identity.endpoints),
        secret_name=identity.secret_name,
        bucket_uri="<bucket>",
        checkpoint_uri="<checkpoints>",
        image="<image>",
        job=job,
        config=train_config(trainer, job, cluster, "<checkpoints>"),
        queued=queued,
        monitored=monitored,
    )


def train_config(trainer: TrainConfig, job: JobSettings, cluster: Cluster, checkpoint_uri: str) -> TrainConfig:
    """The stack's `trainer` section with what the cluster decides: names, places, device and the metrics endpoint."""
    has_gpus = bool(job.gpus_per_node or cluster.gpu.gpus_per_node)
    more: dict[str, dict[str, object]] = {
        "train": {"device": "cuda" if has_gpus else "cpu"},
        "checkpoint": {"uri": checkpoint_uri},
        "metrics": {
            "dir": f"{cluster.storage.work_path}/runs",
            "prometheus_port": METRICS_PORT,
            "prometheus_host": "0.0.0.0",  # noqa: S104  # a pod's own network: the NetworkPolicy says who may ask
        },
    }
    return decided(trainer, job, cluster.gpu.interruptible, more)


def decided(
    trainer: TrainConfig, job: JobSettings, interruptible: bool, more: Mapping[str, Mapping[str, object]]
) -> TrainConfig:
    """The stack's `trainer` section with what the job decides wherever it runs, and `more`, by section."""
    values = trainer.model_dump()
    values["train"]["run"] = job.run
    values["fault"]["grace_seconds"] = job.grace_seconds - LEFT_OF_GRACE_SECONDS
    values["metrics"]["progress"] = "lines"
    if interruptible and "notices" not in trainer.fault.model_fields_set:
        # Spot nodes are announced minutes before Kubernetes hears of it.
        values["fault"]["notices"] = "auto"
    for section, own in more.items():
        values[section] |= own
    return TrainConfig.model_validate(values)
