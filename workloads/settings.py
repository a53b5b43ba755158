"""What a stack configures about its training job: the section `job`, beside the trainer's own section `trainer`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainer.config import TrainConfig

#: The last two are training services, each of one cloud, which take the place of a cluster.
Launcher = Literal["job", "pytorchjob", "trainjob", "torchx", "azureml", "vertex"]

#: A run's name begins the names of pods and services, which DNS limits to 63 letters, and the operators add up to 27:
#: JobSet's `<name>-<hash>-node-0-<index>-<5 letters>` is the longest.
_RUN_NAME = re.compile(r"[a-z]([-a-z0-9]{0,34}[a-z0-9])?")


def _run_name(value: str) -> str:
    if not _RUN_NAME.fullmatch(value):
        raise ValueError(
            "not a name that Kubernetes takes: 1 to 36 of a-z, 0-9 and -, beginning with a letter, not ending in -"
        )
    return value


RunName = Annotated[str, AfterValidator(_run_name)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A group of keys: immutable, and a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Dataset(Section):
    """A Job that brings the data onto the shared storage and prepares it, before the first training.

    `source` is "bucket" (the folder that `upload_data` fills), a URI, or a folder below `storage.mount_path`; unset,
    there is no such Job. The result is the folder `name` of the storage's writable part.
    """

    source: str | None = Field(
        None, pattern=r"^(bucket|(s3|gs|abfs|file|https?)://.+|/.+)$", examples=["bucket", "s3://other/criteo"]
    )
    name: str = Field("criteo", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$", examples=["criteo"])
    preprocess: bool = True
    options: tuple[str, ...] = ()
    cpus: float = Field(2, gt=0)
    memory_gib: float = Field(4, ge=2)
    wait: bool = True
    timeout_hours: float = Field(24, gt=0)


class Netcheck(Section):
    """All-to-all and all-reduce over the whole pool before the training, so that a silent fall-back to TCP is told.

    With `gate` the training starts only after it passed: at least `min_gb_per_s` per GPU, over the cluster's fabric.
    """

    enabled: bool = False
    gate: bool = True
    min_gb_per_s: float = Field(0, ge=0)
    timeout_minutes: Positive = 30


class Tensorboard(Section):
    """TensorBoard on the logs of every run of the stack."""

    enabled: bool = True


class JobSettings(Section):
    """The training job; the same keys whatever `launcher` starts it.

    `nodes` unset means `gpu.nodes.desired`; `min_nodes` below it makes the job elastic. `processes_per_node` is for
    clusters without GPUs, where nothing else says how many. `env` overrides the fabric's variables. `OF_CLUSTERS` are
    the keys that a training service has no use for.
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
#: Launchers that are a cloud's own training service.
SERVICES = frozenset(get_args(Launcher)) - ON_CLUSTERS
#: The sections of a stack's configuration that belong to the workloads.
SECTIONS: dict[str, type[BaseModel]] = {"job": JobSettings, "trainer": TrainConfig}
