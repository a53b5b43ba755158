"""Optimizers: fused into the embedding kernels, dense for other weights, and a schedule for both learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-untyped]  # has no types at all
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from trainer.config import DenseOptimConfig, OptimConfig, ScheduleConfig, SparseOptimConfig
from trainer.errors import UserError

_FUSED = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
# The state of a table's optimizer, in the order in which the kernels list it; one value per row or per weight.
SPARSE_STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


def fused_params(config: SparseOptimConfig, device: torch.device) -> dict[str, Any]:
    """Return the settings of the fused optimizer; raise UserError if the device's kernels do not support it."""
    if config.optimizer == "adam" and device.type == "cpu":
        raise UserError(
            "optim.sparse.optimizer is adam, which the CPU kernels do not support; "
            "allowed on CPU: sgd, adagrad, rowwise_adagrad"
        )
    params: dict[str, Any] = {"optimizer": _FUSED[config.optimizer], "learning_rate": config.learning_rate}
    if config.optimizer != "sgd":
        params["eps"] = config.eps
    if config.optimizer == "adam":
        params |= {"beta1": config.beta1, "beta2": config.beta2}
    return params


def dense_factory(config: DenseOptimConfig) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """Return the factory of the optimizer for all weights but the tables."""
    decay, betas = config.weight_decay, (config.beta1, config.beta2)
    factories: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=config.learning_rate, momentum=config.momentum, weight_decay=decay),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=config.learning_rate, eps=config.eps, weight_decay=decay),
        "adam": lambda p: torch.optim.Adam(p, lr=config.learning_rate, betas=betas, eps=config.eps, weight_decay=decay),
        "adamw": lambda p: torch.optim.AdamW(
            p, lr=config.learning_rate, betas=betas, eps=config.eps, weight_decay=decay
        ),
    }
    return factories[config.optimizer]


def replicated_factory(config: SparseOptimConfig) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    """Return the factory of the sparse optimizer for data-parallel tables, which have ordinary dense gradients."""
    factories: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=config.learning_rate),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=config.learning_rate, eps=config.eps),
        "rowwise_adagrad": lambda p: RowWiseAdagrad(p, lr=config.learning_rate, eps=config.eps),
        "adam": lambda p: torch.optim.Adam(
            p, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps
        ),
    }
    return factories[config.optimizer]


class Optimizers:
    """All optimizers of a sharded model; the pipeline calls `combined`."""

    def __init__(
        self, dmp: DistributedModelParallel, replicated: Mapping[str, nn.Parameter], config: OptimConfig
    ) -> None:
        self.fused: CombinedOptimizer = dmp.fused_optimizer
        tables = {id(parameter) for parameter in replicated.values()}
        dense = {
            name: parameter
            for name, parameter in dmp.named_parameters()
            if ".embedding_bags." not in name and id(parameter) not in tables
        }
        self.dense = KeyedOptimizerWrapper(dense, dense_factory(config.dense))
        self.replicated = (
            KeyedOptimizerWrapper(dict(replicated), replicated_factory(config.sparse)) if replicated else None
        )
        stepped: KeyedOptimizer = self.dense
        if config.dense.clip_norm is not None:
            stepped = GradientClippingOptimizer(self.dense, GradientClipping.NORM, max_gradient=config.dense.clip_norm)
        parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [("fused", self.fused), ("dense", stepped)]
        if self.replicated is not None:
            parts.append(("replicated", self.replicated))
        self.combined = CombinedOptimizer(parts)
        self._sparse_rate, self._dense_rate = config.sparse.learning_rate, config.dense.learning_rate

    def set_factor(self, factor: float) -> None:
        """Multiply both base learning rates by `factor` for the next step."""
        _set_rate(self.dense, self._dense_rate * factor)
        _set_rate(self.fused, self._sparse_rate * factor)
        if self.replicated is not None:
            _set_rate(self.replicated, self._sparse_rate * factor)

    def set_step(self, step: int) -> None:
        """Set the number of updates in kernels that count them, for Adam's bias correction."""
        for _, optimizer in self.fused.optimizers:
            _set_kernel_step(optimizer, step)


def _set_rate(optimizer: KeyedOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        cast("dict[str, Any]", group)["lr"] = rate  # annotated as a Mapping, but a dict


def _set_kernel_step(optimizer: KeyedOptimizer, step: int) -> None:
    for _, inner in getattr(optimizer, "optimizers", []):
        _set_kernel_step(inner, step)
    if hasattr(optimizer, "set_optimizer_step"):
        optimizer.set_optimizer_step(step)


def schedule_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor of both learning rates at `step` (0-based) of `total_steps`.

    Warm-up: (step + 1) / warmup_steps. Then 1 until decay_start_step. Decay over n steps at fraction x in [0, 1]:
    polynomial end + (1 - end) (1 - x)^power, cosine end + (1 - end) (1 + cos(pi x)) / 2; `end` afterwards.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start = max(config.decay_start_step, config.warmup_steps)
    if config.decay == "constant" or step < start:
        return 1.0
    length = config.decay_steps or max(1, total_steps - start)
    x = min(1.0, (step - start) / length)
    shape = (1 - x) ** config.power if config.decay == "polynomial" else (1 + math.cos(math.pi * x)) / 2
    return config.end_factor + (1 - config.end_factor) * shape
