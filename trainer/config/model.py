"""Options of the model and of how its embedding tables are sharded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.section import Positive, Section

CRITEO_1TB_ROWS: tuple[int, ...] = (
    # Rows per table of the Criteo 1TB click logs as MLPerf trains them (40 M cap); facebookresearch/dlrm, MLPerf v1-v4.
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
    11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


class ModelConfig(Section):
    """DLRM: a bottom MLP for dense features, one embedding table per sparse feature, an interaction and a top MLP."""

    num_embeddings: Positive | tuple[Positive, ...] | Literal["criteo-1tb"] = Field(
        100_000, description="rows per table: one number, a list with one per feature, or criteo-1tb"
    )
    num_embeddings_cap: Positive | None = Field(None, description="most rows of any table")
    embedding_dim: Positive = Field(64, description="columns of every table")
    pooling: Literal["sum", "mean"] = Field("sum", description="how the embeddings of a feature's ids are combined")
    dense_arch: tuple[Positive, ...] = Field(
        (512, 256, 64), min_length=1, description="bottom MLP; last = embedding_dim"
    )
    over_arch: tuple[Positive, ...] = Field((512, 256, 1), min_length=1, description="top MLP; last = 1")
    interaction: Literal["dot", "dcn"] = Field("dot", description="pairwise dot products, or low-rank cross network v2")
    dcn_num_layers: Positive = Field(3, description="cross layers (interaction dcn)")
    dcn_low_rank_dim: Positive = Field(512, description="rank of a cross layer's matrix (interaction dcn)")

    @model_validator(mode="after")
    def _check_layers(self) -> ModelConfig:
        if self.dense_arch[-1] != self.embedding_dim:
            raise ValueError(
                f"model.dense_arch must end in model.embedding_dim: got {self.dense_arch[-1]}; "
                f"allowed: {self.embedding_dim}. "
                f"Fix: --model.dense-arch '{[*self.dense_arch[:-1], self.embedding_dim]}'"
            )
        if self.over_arch[-1] != 1:
            raise ValueError(
                f"model.over_arch must end in the logit: got {self.over_arch[-1]}; allowed: 1. "
                f"Fix: --model.over-arch '{[*self.over_arch[:-1], 1]}'"
            )
        return self


ShardingType = Literal["table_wise", "row_wise", "column_wise", "data_parallel"]
CommPrecision = Literal["fp32", "fp16", "bf16", "int8"]


class ShardingConfig(Section):
    """Limits for the planner. Tables are named `t_<feature>`; the plan is printed once at the start."""

    types: tuple[ShardingType, ...] = Field(
        ("table_wise", "row_wise", "column_wise", "data_parallel"),
        min_length=1,
        description="types that the planner may choose from",
    )
    tables: dict[str, tuple[ShardingType, ...]] = Field(
        default_factory=dict, description='per table: {"t_cat_0": ["row_wise"]}; overrides types for that table'
    )
    kernels: tuple[Literal["fused", "fused_uvm", "fused_uvm_caching", "dense"], ...] | None = Field(
        None, min_length=1, description="embedding kernels that the planner may use; none: all of the device"
    )
    min_columns: Positive | None = Field(
        None, description="columns of the smallest column-wise shard; none: TorchRec's default"
    )
    hbm_cap_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory per device to plan for; none: as detected"
    )
    reserve_fraction: float = Field(
        0.15, ge=0, lt=1, description="share of that memory kept free for activations and everything else"
    )
    forward_precision: CommPrecision = Field("fp32", description="precision of pooled embeddings on the wire")
    backward_precision: CommPrecision = Field("fp32", description="precision of their gradients on the wire")
    exchange: Literal["auto", "collective", "shared_memory"] = Field(
        "auto",
        description="all-to-all of pooled embeddings: collective (gloo or NCCL), or shared_memory (CPU processes of "
        "one machine); auto: shared_memory where available",
    )
