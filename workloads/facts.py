"""The facts from which every manifest is built: the cluster, the job and the trainer's settings as plain values."""

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
#: The reserve between the trainer's own deadline and the moment when Kubernetes kills it.
GRACE_RESERVE_SECONDS = 5

RUN_LABEL = "torchrec-cloud/run"
PART_OF = {"app.kubernetes.io/part-of": "torchrec-cloud"}
COMPONENT_LABEL = "app.kubernetes.io/component"


@dataclass(frozen=True)
class Facts:
    """A cluster and a job as plain values.

    `config` is the trainer's configuration: the stack's `trainer` section with the keys that the cluster sets. `queued`
    says that Kueue admits the job, `monitored` that the cluster has Prometheus's operator.
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
        """Return the number of pods of the job, one per node."""
        return job_nodes(self.job, self.pool.num_nodes_desired)

    @property
    def min_nodes(self) -> int:
        """Return the fewest pods with which an elastic job trains."""
        return self.job.min_nodes or self.nodes

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs of one pod, 0 on CPU nodes."""
        return self.job.gpus_per_node or self.pool.gpus_per_node

    @property
    def processes_per_node(self) -> int:
        """Return the trainer processes of one pod: one per GPU, on CPU nodes the configured number."""
        return self.gpus_per_node or self.job.processes_per_node or 1

    @property
    def has_netcheck(self) -> bool:
        """Return whether the fabric is measured before the training; by default with RDMA on a fixed set of nodes."""
        enabled = self.job.netcheck.enabled
        if enabled is None:
            return self.fabric.rdma and self.min_nodes == self.nodes > 1
        return enabled

    @property
    def common_labels(self) -> dict[str, str]:
        """Return the labels of every object of the stack."""
        return {**self.labels, **PART_OF}

    @property
    def run_labels(self) -> dict[str, str]:
        """Return the labels of every object of the run."""
        return {**self.common_labels, RUN_LABEL: self.job.run}


def job_nodes(job: JobSettings, desired: int) -> int:
    """Return the number of pods of a job on a pool that starts with `desired` nodes."""
    return job.nodes or max(desired, 1)


def resolve_facts(
    cluster: Cluster,
    image: pulumi.Input[str],
    job: JobSettings,
    trainer: TrainConfig,
    *,
    queued: bool,
    monitored: bool,
) -> pulumi.Output[Facts]:
    """Return the facts once the values that the cloud computes are known."""
    import pulumi

    draft = draft_facts(cluster, job, trainer, queued=queued, monitored=monitored)

    def complete(known: Mapping[str, Any]) -> Facts:
        """Return the draft with the known values."""
        return replace(draft, **known, config=train_config(trainer, job, cluster, known["checkpoint_uri"]))

    return pulumi.Output.all(
        bucket_uri=cluster.bucket_uri,
        checkpoint_uri=cluster.checkpoint_uri,
        image=image,
        annotations=dict(cluster.identity.annotations),
    ).apply(complete)


def draft_facts(cluster: Cluster, job: JobSettings, trainer: TrainConfig, *, queued: bool, monitored: bool) -> Facts:
    """Return the facts with placeholders for the values that the cloud computes."""
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
    """Return the stack's `trainer` section with the keys that the cluster sets: paths, device and metrics endpoint."""
    has_gpus = bool(job.gpus_per_node or cluster.gpu.gpus_per_node)
    cluster_keys: dict[str, dict[str, object]] = {
        "train": {"device": "cuda" if has_gpus else "cpu"},
        "checkpoint": {"uri": checkpoint_uri},
        "metrics": {
            "dir": f"{cluster.storage.work_path}/runs",
            "prometheus_port": METRICS_PORT,
            "prometheus_host": "0.0.0.0",  # noqa: S104  # the pod's network; the NetworkPolicy limits access
        },
    }
    return with_job_settings(trainer, job, cluster.gpu.interruptible, cluster_keys)


def with_job_settings(
    trainer: TrainConfig, job: JobSettings, interruptible: bool, sections: Mapping[str, Mapping[str, object]]
) -> TrainConfig:
    """Return the stack's `trainer` section with the keys that the job sets everywhere, and the keys in `sections`."""
    values = trainer.model_dump()
    values["train"]["run"] = job.run
    values["fault"]["grace_seconds"] = job.grace_seconds - GRACE_RESERVE_SECONDS
    values["metrics"]["progress"] = "lines"
    if interruptible and "notices" not in trainer.fault.model_fields_set:
        # The cloud announces a spot interruption minutes before Kubernetes terminates the pod.
        values["fault"]["notices"] = "auto"
    for section, keys in sections.items():
        values[section] |= keys
    return TrainConfig.model_validate(values)
