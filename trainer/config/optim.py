"""Options of the optimizers and of the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.section import Count, Positive, Section

LearningRate = Annotated[float, Field(gt=0)]


class SparseOptimConfig(Section):
    """The optimizer of the embedding tables, fused into their backward pass."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = Field(
        "rowwise_adagrad", description="optimizer; adam needs a GPU"
    )
    learning_rate: LearningRate = Field(0.05, description="base rate; the schedule multiplies it")
    eps: float = Field(1e-8, gt=0, description="adagrad, rowwise_adagrad, adam")
    beta1: float = Field(0.9, ge=0, lt=1, description="adam")
    beta2: float = Field(0.999, ge=0, lt=1, description="adam")
    update: Literal["auto", "fbgemm", "coalesced"] = Field(
        "auto",
        description="implementation: fbgemm's kernel, or coalesced, which gives the same numbers faster "
        "(rowwise_adagrad on CPU); auto: coalesced where available",
    )


class DenseOptimConfig(Section):
    """The optimizer of all parameters except the embedding tables."""

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
    """One factor for both learning rates: linear warm-up, then constant, then decay to end_factor."""

    decay: Literal["constant", "polynomial", "cosine"] = Field("constant", description="shape after decay_start_step")
    warmup_steps: Count = Field(0, description="steps of the linear warm-up, from 1/warmup_steps of the rate")
    decay_start_step: Count = Field(
        0, description="first step of the decay, but not before the warm-up ends (polynomial, cosine)"
    )
    decay_steps: Positive | None = Field(None, description="steps of the decay; none: until the end of the run")
    power: float = Field(2.0, gt=0, description="exponent (polynomial)")
    end_factor: float = Field(0.0, ge=0, le=1, description="factor at the end of the decay")


class OptimConfig(Section):
    """The sparse and the dense optimizer, and the learning-rate schedule of both."""

    sparse: SparseOptimConfig = Field(default_factory=SparseOptimConfig, description="embedding tables")
    dense: DenseOptimConfig = Field(default_factory=DenseOptimConfig, description="dense parameters")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning-rate schedule")
