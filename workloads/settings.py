"""The settings of a stack's training job, section `job`; section `trainer` is the trainer's."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainer.config import TrainConfig

#: The last two are managed training services, each of one cloud, which replace the cluster.
Launcher = Literal["job", "pytorchjob", "trainjob", "torchx", "azureml", "vertex"]

#: DNS limits the names of pods and services to 63 characters. They start with the run's name, and the operators append
#: up to 27 characters: JobSet's `<name>-<hash>-node-0-<index>-<5 letters>` is the longest.
_RUN_NAME = re.compile(r"[a-z]([-a-z0-9]{0,34}[a-z0-9])?")


def _check_run_name(value: str) -> str:
    """Return a valid run name; raise ValueError for others."""
    if not _RUN_NAME.fullmatch(value):
        raise ValueError(
            "not a valid name; allowed: 1 to 36 of a-z, 0-9 and -, starting with a letter, not ending with -"
        )
    return value


RunName = Annotated[str, AfterValidator(_check_run_name)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A group of keys: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Dataset(Section):
    """The Job that copies the data to the shared storage and preprocesses it before the training.

    `source` is "bucket" (the folder that `upload_data` fills), a URI, or a folder below `storage.mount_path`. There is
    no such Job if it is unset. The result is the folder `name` in the storage's writable folder.
    """

    source: str | None = Field(
        None,
        pattern=r"^(bucket|(s3|gs|abfs|file|https?)://.+|/.+)$",
        description="bucket, a URI (s3, gs, abfs, file, http or https) or an absolute path",
        examples=["bucket", "s3://other/criteo"],
    )
    name: str = Field("criteo", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$", examples=["criteo"])
    preprocess: bool = True
    options: tuple[str, ...] = ()
    cpus: float = Field(2, gt=0)
    memory_gib: float = Field(4, ge=2)
    wait: bool = True
    timeout_hours: float = Field(24, gt=0)


class Netcheck(Section):
    """A Job that measures all-to-all and all-reduce over the whole pool, which detects a silent fallback to TCP.

    `enabled` defaults to true for a job of several nodes with RDMA that is not elastic: an elastic job may start with
    fewer nodes. With `gate` the training starts only after at least `min_gb_per_s` per GPU was measured over the
    cluster's fabric.
    """

    enabled: bool | None = None
    gate: bool = True
    min_gb_per_s: float = Field(0, ge=0)
    timeout_minutes: Positive = 30


class Tensorboard(Section):
    """TensorBoard on the logs of all runs of the stack."""

    enabled: bool = True


class JobSettings(Section):
    """The training job, with the same keys for every launcher.

    `nodes` defaults to `gpu.nodes.desired`; a smaller `min_nodes` makes the job elastic. `processes_per_node` is for
    clusters without GPUs. `env` overrides the fabric's variables. `OF_CLUSTERS` are the keys that a managed training
    service does not use.
    """

    OF_CLUSTERS: ClassVar[tuple[str, ...]] = (
        *("min_nodes", "processes_per_node", "cpus", "memory_gib", "egress"),
        *("dataset", "netcheck", "tensorboard"),
    )

    launcher: Launcher = "pytorchjob"
    run: RunName = Field("default", examples=["default"])
    image: str | None = Field(None, examples=["registry.example/trainer@sha256:<digest>"])
    base_image: str | None = Field(None, examples=["ubuntu@sha256:<digest>"])
    nodes: Positive | None = None
    min_nodes: Positive | None = None
    gpus_per_node: Positive | None = None
    processes_per_node: Positive | None = None
    cpus: float | None = Field(None, gt=0)
    memory_gib: float | None = Field(None, gt=0)
    max_restarts: int = Field(10, ge=0)
    grace_seconds: int = Field(120, ge=10)
    env: dict[str, str] = Field(default_factory=dict)
    egress: tuple[str, ...] = ()
    dataset: Dataset = Dataset()
    netcheck: Netcheck = Netcheck()
    tensorboard: Tensorboard = Tensorboard()


#: Launchers that start the job on a cluster.
ON_CLUSTERS = frozenset({"job", "pytorchjob", "trainjob", "torchx"})
#: Launchers that are a cloud's managed training service.
SERVICES = frozenset(get_args(Launcher)) - ON_CLUSTERS
#: The sections of a stack's configuration that belong to the workloads.
SECTIONS: dict[str, type[BaseModel]] = {"job": JobSettings, "trainer": TrainConfig}
