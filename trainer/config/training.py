"""Options of a run: its length, numerics, checkpoints, fault handling and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.section import Count, Positive, Section

RUN_NAME = r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"


class TrainLoopConfig(Section):
    """One run: its name, length, batch and numerics."""

    run: str = Field(
        "default", pattern=RUN_NAME, description="name of the run and of the folder with its checkpoints and logs"
    )
    batch_size: Positive = Field(4_096, description="samples of one step, over all processes")
    eval_batch_size: Positive | None = Field(None, description="samples of one evaluation step; none: batch_size")
    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="length of the run; unused if steps is set")
    steps: Positive | None = Field(None, description="length of the run in steps; none: use epochs")
    seed: Count = Field(0, description="seed of the initial weights, which no sharding plan changes")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: one GPU per process if there are enough, else CPU"
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto", description="dense arithmetic; auto: the best of the device, which is logged"
    )
    compile: bool = Field(False, description="torch.compile of the dense parts")
    fused_interaction: bool = Field(True, description="dot interaction as one autograd function; false: plain products")
    malloc: Literal["auto", "system", "keep"] = Field(
        "auto",
        description="keep: reuse freed memory in the next step instead of returning it to the system; auto: "
        "keep on CPU with glibc",
    )
    pipeline: Literal["sparse_dist", "base", "none"] = Field(
        "sparse_dist", description="overlap of input distribution, forward and backward"
    )
    num_threads: Positive | None = Field(
        None, description="CPU threads per process; none: cores / processes on this machine"
    )
    eval_every: Count = Field(0, description="steps between evaluations; 0: only at the end")
    target_auc: Annotated[float, Field(gt=0.5, lt=1)] | None = Field(
        None, description="stop when an evaluation reaches this AUC"
    )
    timeout_seconds: Positive = Field(600, description="longest time of a collective; a slower one ends the job")
    batch_size_is: Literal["global", "per_process"] = Field(
        "global",
        description="global: all processes share batch_size; per_process: each has batch_size samples, so the step "
        "grows and shrinks with an elastic job (eval_batch_size too)",
    )


class CheckpointConfig(Section):
    """Where checkpoints are saved, how often, and which are kept. The path is <uri>/<run>/checkpoints/step_N."""

    uri: str = Field("runs", min_length=1, description="folder or fsspec URI (s3://, gs://, abfs://, file://)")
    every_steps: Count = Field(0, description="steps between saves; 0: by time only")
    every_minutes: float = Field(
        10.0, ge=0, description="minutes between saves, the most work that a kill loses; 0: by steps only"
    )
    asynchronous: bool = Field(
        True, description="write in the background; needs memory for a second copy of each process's shards"
    )
    keep: Positive = Field(2, description="number of complete checkpoints to keep, the newest ones")
    keep_every_steps: Count = Field(
        0, description="keep the first checkpoint at or after each multiple of this; 0: none"
    )
    direct_io: bool = Field(
        True, description="bypass the page cache for local files (O_DIRECT) where the file system supports it"
    )
    max_failures: Positive = Field(5, description="failed saves in a row after which the run ends")
    attempts: Positive = Field(5, description="attempts of one object-store request, with exponential backoff")
    request_timeout_seconds: Positive = Field(
        60, description="timeout of one object-store request, after which it is retried"
    )
    resume: Literal["auto", "never", "required"] = Field(
        "auto",
        description="auto: use the newest checkpoint, if any; required: fail without one; never: fail if there is one",
    )


class FaultConfig(Section):
    """What to do on preemption, and when a process hangs."""

    grace_seconds: Positive = Field(
        25, description="time from SIGTERM or a spot interruption notice until the process exits; includes the save"
    )
    save_if_older_seconds: Count = Field(30, description="save on preemption if the last save is older than this")
    step_timeout_seconds: Count = Field(
        300, description="longest time of a step; a slower one prints its stack and ends all processes; 0: no limit"
    )
    notices: Literal["off", "auto", "aws", "azure", "gcp"] = Field(
        "off", description="poll the cloud's metadata server for spot interruption notices; auto: detect the cloud"
    )
    notices_endpoint: str | None = Field(
        None, pattern=r"^https?://", description="URL of the metadata server; none: the cloud's own"
    )
    notices_poll_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="seconds between two polls")


class MetricsConfig(Section):
    """What is reported, how often and where."""

    log_every: Positive = Field(20, description="steps between reports")
    window_samples: Positive = Field(
        131_072, description="samples in the window of the training NE, AUC and calibration"
    )
    train_metrics: bool = Field(True, description="report NE, AUC and calibration of the training data")
    dir: str | None = Field(None, description="folder of logs; none: checkpoint.uri if that is local, else runs")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    jsonl: bool = Field(True, description="write metrics.jsonl")
    prometheus_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, description="port of rank 0's Prometheus endpoint; none: off"
    )
    prometheus_host: str = Field("127.0.0.1", description="address of the Prometheus endpoint; 0.0.0.0 in a pod")
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto: a bar on a terminal, else JSON lines"
    )
