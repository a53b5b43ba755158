"""Quality of the fast modes: held-out AUC after the same samples, compared with fp32 stock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from trainer.bench.measures.stock import build_stock, stock_batch
from trainer.bench.progress import progress
from trainer.config import TrainConfig
from trainer.config.options import validate
from trainer.data import Batch, KnowsBestAuc, SourceContext, open_source
from trainer.data.auc import area_under_curve
from trainer.data.loader import eval_batches, eval_size, train_batches
from trainer.runtime.precision import has_native_bf16
from trainer.runtime.process_group import Runtime
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model
from trainer.training.pipeline import Pipeline

if TYPE_CHECKING:
    from trainer.bench.options import BenchOptions

#: Spread of AUC between random seeds at this number of samples, in fp32.
BOUND = 0.006
_MAX_ROWS = 10_000  # per table: learning the weights of more rows takes more samples


@dataclass(frozen=True)
class Mode:
    """A way to train: stock, or ours with `changes` to the configuration."""

    name: str
    stock: bool
    changes: dict[str, Any]
    precision: str = "fp32"


def modes(runtime: Runtime) -> list[Mode]:
    """Return stock, then the fast modes of this device, which include bf16 only with native support."""
    found = [Mode("fp32 stock", True, {}), Mode("fp32 ours", False, {})]
    if runtime.world_size > 1:
        for wire in ("fp16", "int8"):
            # TorchRec does not support int8 for the partial sums of row-wise shards.
            changes = {"forward_precision": wire, "backward_precision": wire, "types": ("table_wise",)}
            found.append(Mode(f"fp32, {wire} on the wire", False, {"sharding": changes}))
    if has_native_bf16(runtime.device):
        found.append(Mode("bf16 ours", False, {}, "bf16"))
    return found


def bench_quality(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> dict[str, Any]:
    """Train each mode on `options.samples` samples with `options.seeds` seeds (collective).

    `kept` is whether the mean AUC of every mode is at most BOUND below stock's.
    """
    config = _limit_rows(config)
    steps = max(1, options.samples // config.train.batch_size)
    found: dict[str, list[float]] = {mode.name: [] for mode in modes(runtime)}
    best = []
    with progress("training", len(found) * options.seeds * steps, "steps", runtime.is_main) as advance:
        for seed in range(options.seeds):
            seeded = _with_changes(config, {"train": {"seed": config.train.seed + seed}})
            seeded = _with_changes(seeded, {"data": {"seed": config.data.seed + seed}})
            for mode in modes(runtime):
                found[mode.name].append(_auc(_with_changes(seeded, mode.changes), runtime, mode, steps, advance))
            source = open_source(SourceContext(seeded, "eval", runtime.device))
            if isinstance(source, KnowsBestAuc):
                best.append(source.best_auc(eval_size(source, seeded)))
    means = {name: statistics.mean(aucs) for name, aucs in found.items()}
    reference = means[next(iter(means))]
    return {
        "modes": [
            {"name": name, "auc": aucs, "mean": means[name], "against_stock": means[name] - reference}
            for name, aucs in found.items()
        ],
        "bound": BOUND,
        "kept": all(mean >= reference - BOUND for mean in means.values()),
        "best_auc": max(best, default=1.0),
        "samples": steps * config.train.batch_size,
        "seeds": options.seeds,
        "processes": runtime.world_size,
        "device": runtime.device.type,
    }


def _limit_rows(config: TrainConfig) -> TrainConfig:
    cap = min(_MAX_ROWS, config.model.num_embeddings_cap or _MAX_ROWS)
    return _with_changes(config, {"model": {"num_embeddings_cap": cap}})


def _with_changes(config: TrainConfig, changes: dict[str, dict[str, Any]]) -> TrainConfig:
    tree = config.model_dump()
    for section, values in changes.items():
        tree[section] |= values
    return validate(tree)


def _auc(config: TrainConfig, runtime: Runtime, mode: Mode, steps: int, advance: Callable[[], None]) -> float:
    """Return the held-out AUC of a new model after `steps` steps (collective)."""
    runtime.precision = mode.precision  # type: ignore[assignment]  # a precision of this device
    model = build_stock(config, runtime) if mode.stock else build_sharded_model(config, runtime)
    model.dmp.train()
    source = open_source(SourceContext(config, "train", runtime.device))
    ranks = (runtime.rank, runtime.world_size, runtime.device)
    batches: Iterator[Any] = train_batches(source, config, 0, steps, *ranks)
    if mode.stock:
        pipeline: Any = TrainPipelineSparseDist(
            model.dmp, model.optimizers.combined, runtime.device, execute_all_batches=True
        )
        batches = map(stock_batch, batches)
    else:
        pipeline = Pipeline(model)
    for _ in range(steps):
        pipeline.progress(batches)
        advance()
    pipeline.detach()
    return _held_out_auc(model, runtime, _stock_logits if mode.stock else _our_logits)


def _stock_logits(model: ShardedModel, batch: Batch) -> Tensor:
    _, (_, logits_B, _) = model.dmp(stock_batch(batch))
    found: Tensor = logits_B
    return found


def _our_logits(model: ShardedModel, batch: Batch) -> Tensor:
    _, (_, logits_B, _, _) = model.dmp(batch)
    found: Tensor = logits_B
    return found


def _held_out_auc(model: ShardedModel, runtime: Runtime, logits: Callable[[ShardedModel, Batch], Tensor]) -> float:
    """Return the AUC of all evaluation samples, the same on every process (collective)."""
    source = open_source(SourceContext(model.config, "eval", runtime.device))
    count = eval_size(source, model.config)
    scored: list[Tensor] = []
    model.dmp.eval()
    with torch.no_grad():
        for batch in eval_batches(source, model.config, count, runtime.rank, runtime.world_size, runtime.device):
            moved = batch.to(runtime.device)
            assert moved.weights_B is not None, "eval_batches gives every sample a weight"
            kept = moved.weights_B > 0
            scored.append(torch.stack([logits(model, moved).detach().float().view(-1), moved.labels_B])[:, kept].cpu())
    gathered: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(gathered, torch.cat(scored, dim=1))
    scores, labels = torch.cat(gathered, dim=1)
    return area_under_curve(scores, labels)
