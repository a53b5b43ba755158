"""Options of a run: its length, numerics, checkpoints, fault handling and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.section import Count, Positive, Section

RUN_NAME = r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"


class TrainLoopConfig(Section):
    """One run: its name, length, batch and numerics."""

    run: str = Field(
        "default", pattern=RUN_NAME, description="name; its checkpoints and logs live in a folder of this name"
    )
    batch_size: Positive = Field(4_096, description="samples of one step over all processes")
    eval_batch_size: Positive | None = Field(None, description="the same for evaluations; none: batch_size")
    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="length of the run where steps is not given")
    steps: Positive | None = Field(None, description="length of the run in steps; none: from epochs")
    seed: Count = Field(0, description="seed of the initial weights, which no sharding plan changes")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: one GPU per process where there are enough"
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto", description="dense arithmetic; auto picks by what the device has and says so"
    )
    compile: bool = Field(False, description="torch.compile of the dense parts")
    fused_interaction: bool = Field(
        True, description="dot interaction as one function; false: the plain products and autograd"
    )
    malloc: Literal["auto", "system", "keep"] = Field(
        "auto",
        description="keep: memory that a step frees serves the next one instead of going back to the system; auto: "
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
        None, description="stop once an evaluation reaches this AUC"
    )
    timeout_seconds: Positive = Field(600, description="a collective that takes longer ends the job")
    batch_size_is: Literal["global", "per_process"] = Field(
        "global",
        description="global: processes share batch_size, however many there are; per_process: each takes batch_size, "
        "so that a step grows and shrinks with an elastic job (eval_batch_size too)",
    )


class CheckpointConfig(Section):
    """Where checkpoints go, how often and which stay: <uri>/<run>/checkpoints/step_N."""

    uri: str = Field("runs", min_length=1, description="folder or fsspec URI (s3://, gs://, abfs://, file://)")
    every_steps: Count = Field(0, description="steps between saves; 0: by time alone")
    every_minutes: float = Field(
        10.0, ge=0, description="minutes between saves, what a kill loses at most; 0: by steps alone"
    )
    asynchronous: bool = Field(
        True, description="write in the background; needs memory for a second copy of this process's share"
    )
    keep: Positive = Field(2, description="newest complete checkpoints kept")
    keep_every_steps: Count = Field(
        0, description="the first checkpoint from each multiple of this on stays for ever; 0: none"
    )
    direct_io: bool = Field(
        True, description="write local files past the page cache (O_DIRECT) where the file system can"
    )
    max_failures: Positive = Field(5, description="saves that may fail in a row before the run ends")
    attempts: Positive = Field(5, description="tries of one request to an object store, with growing pauses")
    request_timeout_seconds: Positive = Field(
        60, description="an object store that is silent for so long is asked anew"
    )
    resume: Literal["auto", "never", "required"] = Field(
        "auto", description="auto: from the newest complete checkpoint of the run; never: refuses a folder that has one"
    )


class FaultConfig(Section):
    """What happens when a machine is taken away, or stops answering."""

    grace_seconds: Positive = Field(
        25, description="time from SIGTERM or a cloud's notice until this process must be gone; save included"
    )
    save_if_older_seconds: Count = Field(
        30, description="a process that must go saves first if the last save is older than this"
    )
    step_timeout_seconds: Count = Field(
        300, description="a step that takes longer ends all processes with the stack of the slow one; 0: no limit"
    )
    notices: Literal["off", "auto", "aws", "azure", "gcp"] = Field(
        "off", description="watch the cloud's metadata server for the end of this machine; auto: find out which cloud"
    )
    notices_endpoint: str | None = Field(
        None, pattern=r"^https?://", description="URL of that metadata server; none: the cloud's own"
    )
    notices_poll_seconds: Annotated[float, Field(gt=0)] = Field(5.0, description="seconds between two looks")


class MetricsConfig(Section):
    """What is reported, how often and where to."""

    log_every: Positive = Field(20, description="steps between reports")
    window_samples: Positive = Field(
        131_072, description="samples over which NE, AUC and calibration of training are taken"
    )
    train_metrics: bool = Field(True, description="NE, AUC and calibration of the training stream, besides the loss")
    dir: str | None = Field(None, description="folder of logs; none: <checkpoint.uri> where that is local, else runs")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    jsonl: bool = Field(True, description="write metrics.jsonl")
    prometheus_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, description="port of rank 0's endpoint; none: off"
    )
    prometheus_host: str = Field("127.0.0.1", description="address that endpoint listens on; 0.0.0.0 in a pod")
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto: a bar on a terminal, else JSON lines"
    )
