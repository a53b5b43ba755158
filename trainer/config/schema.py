"""The trainer's settings: a frozen tree that needs only pydantic, so that a cluster program can build and check it.

Every leaf is an option of the command line (`--train.batch-size`), an environment variable
(`TRAINER_TRAIN__BATCH_SIZE`) and a key of a JSON, TOML or YAML file; `trainer.config.options` merges those sources.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

CRITEO_1TB_ROWS: tuple[int, ...] = (
    # Rows per table of the Criteo 1TB click logs as MLPerf trains them (40 M cap); facebookresearch/dlrm, MLPerf v1-v4.
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
    11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE = 13, 26
RUN_NAME = r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"


class Section(BaseModel):
    """Frozen, and a key that nobody knows is an error rather than a silent no-op."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
LearningRate = Annotated[float, Field(gt=0)]


# --- data ------------------------------------------------------------------------------------------------------------


class DenseColumn(Section):
    """One numeric column of a Parquet table."""

    column: str = Field(description="column of the file")
    transform: Literal["none", "log1p", "standardize"] = Field(
        "none", description="log1p: log(1 + max(x, 0)); standardize: (x - mean) / std with the two values below"
    )
    mean: float = Field(0.0, description="subtracted when transform is standardize")
    std: float = Field(1.0, gt=0, description="divided by when transform is standardize")
    fill: float | None = Field(None, description="value for nulls and NaN, before the transform; without it an error")


class SparseColumn(Section):
    """One categorical column of a Parquet table; a list-typed column is a multi-valued feature."""

    column: str = Field(description="column of the file")
    rows: Positive | None = Field(None, description="rows of its table; without it model.num_embeddings decides")
    hash: bool = Field(False, description="map any integer or string to a row by a 64-bit hash modulo the rows")
    fill: int | str | None = Field(
        None, description="value for nulls; without it a null is an error (an empty list is not)"
    )


def _column_names(value: Any) -> Any:
    """`"age"` is short for `{"column": "age"}`."""
    return (
        [{"column": item} if isinstance(item, str) else item for item in value]
        if isinstance(value, (list, tuple))
        else value
    )


class ParquetConfig(Section):
    """Which columns of the user's own Parquet files are what."""

    label: str = Field("label", description="column with the label: 0/1, a boolean, or a probability in [0, 1]")
    dense: Annotated[tuple[DenseColumn, ...], BeforeValidator(_column_names)] = Field(
        (), description="numeric columns: names, or objects with column, transform, mean, std, fill"
    )
    sparse: Annotated[tuple[SparseColumn, ...], BeforeValidator(_column_names)] = Field(
        (), description="categorical columns: names, or objects with column, rows, hash, fill"
    )
    cache_groups: Positive = Field(4, description="decoded row groups kept in memory per process")


class CriteoConfig(Section):
    """Criteo as npy files: day_N_dense.npy (float32 N x 13), day_N_sparse.npy (int N x 26), day_N_labels.npy (int
    N)."""

    train_days: tuple[Count, ...] = Field(tuple(range(23)), description="days to train on")
    eval_days: tuple[Count, ...] = Field((23,), description="days to evaluate on")
    block_rows: Positive = Field(65_536, description="rows shuffled together; blocks themselves are shuffled per epoch")
    modulo_ids: bool = Field(False, description="map ids to rows by modulo; without it an id >= rows is an error")


class DataConfig(Section):
    """Where samples come from. Sample k of the stream is a pure function of (seed, k)."""

    source: str = Field(
        "synthetic",
        pattern=r"^(synthetic|criteo|parquet|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="synthetic, criteo, parquet, or package.module:Class that implements trainer.data.Source",
    )
    path: str | None = Field(
        None, description="criteo: folder; parquet: file, folder or fsspec URI of the training data"
    )
    eval_path: str | None = Field(None, description="parquet: file, folder or URI of the evaluation data")
    seed: Count = Field(1, description="seed of the stream: order of samples, synthetic values")
    shuffle: bool = Field(True, description="shuffle finite sources anew in every epoch")
    num_dense: Count = Field(13, description="dense features (synthetic, custom)")
    num_sparse: Positive = Field(26, description="sparse features (synthetic, custom)")
    ids_per_feature: Positive = Field(1, description="ids per feature and sample (synthetic)")
    train_samples: Positive = Field(819_200, description="samples in an epoch (synthetic)")
    eval_samples: Count = Field(65_536, description="samples of an evaluation at most; 0: all of a finite source")
    prefetch: Positive = Field(2, description="batches prepared ahead by a thread of each process")
    parquet: ParquetConfig = Field(default_factory=ParquetConfig, description="columns of Parquet files")
    criteo: CriteoConfig = Field(default_factory=CriteoConfig, description="layout of Criteo npy files")
    options: dict[str, Any] = Field(default_factory=dict, description="passed to a custom source class as it is (JSON)")

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> DataConfig:
        if self.source in ("criteo", "parquet") and not self.path:
            raise ValueError(f"data.path is missing: data.source {self.source} reads it; set --data.path PATH")
        if self.source == "parquet" and not self.parquet.sparse:
            raise ValueError(
                "data.parquet.sparse is empty: name at least one categorical column, for example "
                '--data.parquet.sparse \'["user", "item"]\''
            )
        if self.source == "synthetic" and not self.eval_samples:
            raise ValueError("data.eval_samples is 0: the synthetic stream has no end; legal: 1 or more")
        overlap = sorted(set(self.criteo.train_days) & set(self.criteo.eval_days))
        if self.source == "criteo" and overlap:
            raise ValueError(f"data.criteo.eval_days shares days {overlap} with train_days: an evaluation would leak")
        return self

    @property
    def dense_features(self) -> tuple[str, ...]:
        """Names of the dense features in the order of a batch's columns."""
        if self.source == "parquet":
            return tuple(c.column for c in self.parquet.dense)
        count = CRITEO_NUM_DENSE if self.source == "criteo" else self.num_dense
        return tuple(f"dense_{i}" for i in range(count))

    @property
    def sparse_features(self) -> tuple[str, ...]:
        """Names of the sparse features in their canonical order, which no sharding plan changes."""
        if self.source == "parquet":
            return tuple(c.column for c in self.parquet.sparse)
        count = CRITEO_NUM_SPARSE if self.source == "criteo" else self.num_sparse
        return tuple(f"cat_{i}" for i in range(count))


# --- model and sharding ----------------------------------------------------------------------------------------------


class ModelConfig(Section):
    """DLRM: bottom MLP over dense features, one embedding table per sparse feature, interaction, top MLP."""

    num_embeddings: Positive | tuple[Positive, ...] | Literal["criteo-1tb"] = Field(
        100_000, description="rows per table: one number, a list with one per feature, or criteo-1tb"
    )
    num_embeddings_cap: Positive | None = Field(None, description="upper limit of the rows of any table")
    embedding_dim: Positive = Field(64, description="columns of every table")
    pooling: Literal["sum", "mean"] = Field("sum", description="how several ids of one feature become one vector")
    dense_arch: tuple[Positive, ...] = Field(
        (512, 256, 64), min_length=1, description="bottom MLP; last = embedding_dim"
    )
    over_arch: tuple[Positive, ...] = Field((512, 256, 1), min_length=1, description="top MLP; last = 1")
    interaction: Literal["dot", "dcn"] = Field("dot", description="pairwise dot products, or low-rank cross network v2")
    dcn_num_layers: Positive = Field(3, description="cross layers (interaction dcn)")
    dcn_low_rank_dim: Positive = Field(512, description="rank of a cross layer's matrix (interaction dcn)")

    @model_validator(mode="after")
    def _layers_fit(self) -> ModelConfig:
        if self.dense_arch[-1] != self.embedding_dim:
            raise ValueError(
                f"model.dense_arch ends in {self.dense_arch[-1]} but model.embedding_dim is {self.embedding_dim}: "
                f"they must be equal; set --model.dense-arch '{[*self.dense_arch[:-1], self.embedding_dim]}'"
            )
        if self.over_arch[-1] != 1:
            raise ValueError(f"model.over_arch ends in {self.over_arch[-1]}: the last layer is the logit; legal: 1")
        return self


ShardingType = Literal["table_wise", "row_wise", "column_wise", "data_parallel"]
CommPrecision = Literal["fp32", "fp16", "bf16", "int8"]


class ShardingConfig(Section):
    """What the planner may do. Tables are named `t_<feature>`; the plan is printed once at the start."""

    types: tuple[ShardingType, ...] = Field(
        ("table_wise", "row_wise", "column_wise", "data_parallel"),
        min_length=1,
        description="types the planner may choose from",
    )
    tables: dict[str, tuple[ShardingType, ...]] = Field(
        default_factory=dict, description='per table: {"t_cat_0": ["row_wise"]}; overrides types for that table'
    )
    kernels: tuple[Literal["fused", "fused_uvm", "fused_uvm_caching", "dense"], ...] | None = Field(
        None, min_length=1, description="embedding kernels the planner may use; none: all that the device has"
    )
    min_columns: Positive | None = Field(
        None, description="columns of the smallest column-wise shard; none: TorchRec's default"
    )
    hbm_cap_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory per device for the plan; none: as found"
    )
    reserve_fraction: float = Field(
        0.15, ge=0, lt=1, description="share of that memory kept for activations and the rest"
    )
    forward_precision: CommPrecision = Field("fp32", description="pooled embeddings on the wire")
    backward_precision: CommPrecision = Field("fp32", description="their gradients on the wire")
    exchange: Literal["auto", "collective", "shared_memory"] = Field(
        "auto",
        description="how pooled embeddings travel: gloo's or NCCL's all-to-all, or memory that CPU processes of one "
        "machine share; auto: that where it can be had",
    )


# --- optimisation ----------------------------------------------------------------------------------------------------


class SparseOptimConfig(Section):
    """Fused into the backward pass of the embedding tables."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = Field(
        "rowwise_adagrad", description="adam only where the device's kernels have it (GPU)"
    )
    learning_rate: LearningRate = Field(0.05, description="base rate; the schedule multiplies it")
    eps: float = Field(1e-8, gt=0, description="adagrad, rowwise_adagrad, adam")
    beta1: float = Field(0.9, ge=0, lt=1, description="adam")
    beta2: float = Field(0.999, ge=0, lt=1, description="adam")
    update: Literal["auto", "fbgemm", "coalesced"] = Field(
        "auto",
        description="who applies it: fbgemm's own kernel, or coalesced: the same numbers quicker, rowwise_adagrad on "
        "CPU; auto: coalesced where it is there",
    )


class DenseOptimConfig(Section):
    """For everything but the embedding tables."""

    optimizer: Literal["sgd", "adagrad", "adam", "adamw"] = Field("adagrad", description="dense optimizer")
    learning_rate: LearningRate = Field(0.01, description="base rate; the schedule multiplies it")
    eps: float = Field(1e-8, gt=0, description="adagrad, adam, adamw")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd")
    weight_decay: float = Field(0.0, ge=0, description="all")
    beta1: float = Field(0.9, ge=0, lt=1, description="adam, adamw")
    beta2: float = Field(0.999, ge=0, lt=1, description="adam, adamw")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="largest norm of the dense gradient; none: no clipping"
    )


class ScheduleConfig(Section):
    """One factor for both learning rates: linear warm-up, then constant, then decay down to end_factor."""

    decay: Literal["constant", "polynomial", "cosine"] = Field("constant", description="shape after decay_start_step")
    warmup_steps: Count = Field(0, description="steps from 1/warmup_steps of the rate up to all of it")
    decay_start_step: Count = Field(
        0, description="first step of the decay, not before the warm-up ends (polynomial, cosine)"
    )
    decay_steps: Positive | None = Field(None, description="steps of the decay; none: until the end of the run")
    power: float = Field(2.0, gt=0, description="exponent (polynomial)")
    end_factor: float = Field(0.0, ge=0, le=1, description="factor at the end of the decay")


class OptimConfig(Section):
    """Sparse and dense optimizer and the schedule that moves both."""

    sparse: SparseOptimConfig = Field(default_factory=SparseOptimConfig, description="embedding tables")
    dense: DenseOptimConfig = Field(default_factory=DenseOptimConfig, description="dense parameters")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning-rate schedule")


# --- run -------------------------------------------------------------------------------------------------------------


class RunConfig(Section):
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


class TrainConfig(Section):
    """Everything a run is made of."""

    data: DataConfig = Field(default_factory=DataConfig, description="samples")
    model: ModelConfig = Field(default_factory=ModelConfig, description="architecture")
    sharding: ShardingConfig = Field(default_factory=ShardingConfig, description="distribution of the tables")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizers and learning rate")
    train: RunConfig = Field(default_factory=RunConfig, description="length, batch, numerics")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    fault: FaultConfig = Field(default_factory=FaultConfig, description="preemption and hangs")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="reports")

    @model_validator(mode="after")
    def _sections_agree(self) -> TrainConfig:
        features, rows = self.data.sparse_features, self.model.num_embeddings
        if len(set(features)) != len(features):
            twice = sorted({f for f in features if features.count(f) > 1})
            raise ValueError(f"data.parquet.sparse names {twice} more than once: a feature has one table")
        if isinstance(rows, tuple) and len(rows) != len(features):
            raise ValueError(
                f"model.num_embeddings lists {len(rows)} tables but there are {len(features)} sparse features: "
                f"give {len(features)} numbers, or one for all"
            )
        if rows == "criteo-1tb" and len(features) != CRITEO_NUM_SPARSE:
            raise ValueError(
                f"model.num_embeddings criteo-1tb has {CRITEO_NUM_SPARSE} tables but there are {len(features)} "
                f"sparse features; set --data.num-sparse {CRITEO_NUM_SPARSE} or give the rows"
            )
        if not self.data.dense_features:
            raise ValueError(
                "there is no dense feature: DLRM's bottom MLP needs one; set data.num_dense or data.parquet.dense"
            )
        unknown = sorted(set(self.sharding.tables) - set(self.table_names))
        if unknown:
            raise ValueError(f"sharding.tables names {unknown}: no such table; legal: {', '.join(self.table_names)}")
        return self

    @property
    def table_names(self) -> tuple[str, ...]:
        """One table per sparse feature, `t_<feature>`."""
        return tuple(f"t_{feature}" for feature in self.data.sparse_features)

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Rows of each table in feature order: the column's own number, else model.num_embeddings, both capped."""
        count, given = len(self.data.sparse_features), self.model.num_embeddings
        rows = CRITEO_1TB_ROWS if given == "criteo-1tb" else (given,) * count if isinstance(given, int) else given
        if self.data.source == "parquet":
            rows = tuple(c.rows or r for c, r in zip(self.data.parquet.sparse, rows, strict=True))
        return tuple(min(r, self.model.num_embeddings_cap or r) for r in rows)

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation step over all processes."""
        return self.train.eval_batch_size or self.train.batch_size

    def for_processes(self, world_size: int) -> TrainConfig:
        """The configuration with batch sizes over all of `world_size` processes."""
        if self.train.batch_size_is == "global":
            return self
        eval_size = self.train.eval_batch_size
        train = self.train.model_copy(
            update={
                "batch_size": self.train.batch_size * world_size,
                "eval_batch_size": None if eval_size is None else eval_size * world_size,
                "batch_size_is": "global",
            }
        )
        return self.model_copy(update={"train": train})

    def check_world_size(self, world_size: int) -> None:
        """Raises ValueError where a batch does not divide into equal parts for `world_size` processes."""
        sizes = {"train.batch_size": self.train.batch_size, "train.eval_batch_size": self.eval_batch_size}
        for key, size in sizes.items():
            if size % world_size:
                legal = f"{size - size % world_size or world_size} or {size + world_size - size % world_size}"
                raise ValueError(
                    f"{key} is {size}, which {world_size} processes cannot share equally: legal are multiples of "
                    f"{world_size}, for example {legal}; set --{key.replace('_', '-')}"
                )


def leaves(section: type[Section] = TrainConfig, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every option as path -> pydantic FieldInfo, in the order of the tree; lists and dicts are leaves."""
    found: dict[tuple[str, ...], Any] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= leaves(inner, (*prefix, name))
        else:
            found[(*prefix, name)] = field
    return found
