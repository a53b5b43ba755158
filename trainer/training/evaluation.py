"""Held-out quality of a sharded model: each sample of the evaluation split once, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import Checkpointer, load_saved_config, open_store
from trainer.config import CheckpointConfig, TrainConfig
from trainer.config.options import load_config
from trainer.data import Batch, KnowsBestAuc, Source, SourceContext, open_source
from trainer.data.loader import eval_batches, eval_size
from trainer.errors import UserError
from trainer.metrics import Quality, Reporter
from trainer.runtime.process_group import Runtime
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model
from trainer.training.pipeline import Pipeline


def evaluate(model: ShardedModel, source: Source, after_batch: Callable[[], None] | None = None) -> dict[str, float]:
    """Return `loss`, `ne`, `auc`, `calibration`, `samples`, and `best_auc` if the source knows it. Collective.

    `after_batch` is called after every batch. It may raise to end the evaluation, on all processes after the same
    batch. The model is in evaluation mode, and in a separate pipeline so that training batches read ahead are kept.
    """
    config, runtime = model.config, model.runtime
    count = eval_size(source, config)
    share = config.eval_batch_size // runtime.world_size
    quality = Quality(runtime, window=count + config.eval_batch_size, piece=max(share, 65_536))
    totals = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # sum of weighted losses, sum of weights
    was_training = model.dmp.training
    model.dmp.eval()
    pipeline = Pipeline(model)
    try:
        with torch.no_grad():
            batches: Iterator[Batch] = eval_batches(
                source, config, count, runtime.rank, runtime.world_size, runtime.device
            )
            for _, logits, labels, weights in pipeline.run(batches):
                assert weights is not None, "eval_batches gives every sample a weight"
                losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                totals += torch.stack([(losses * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64)])
                quality.add(logits, labels, weights)
                if after_batch is not None:
                    after_batch()
    finally:
        pipeline.detach()
        model.dmp.train(was_training)
    dist.all_reduce(totals)
    result = {"loss": float(totals[0] / totals[1])} | quality.compute() | {"samples": count}
    if isinstance(source, KnowsBestAuc):
        result["best_auc"] = source.best_auc(count)
    return result


def load_evaluated_config(
    arguments: Sequence[str], environ: Mapping[str, str], checkpoint: CheckpointConfig, run: str
) -> TrainConfig:
    """Return the command's options over the data, model and optimizer of the run's newest checkpoint. Collective."""
    saved = load_saved_config(checkpoint, run)
    base = saved.model_dump(mode="json", include={"data", "model", "optim"}) if saved else {}
    if saved:
        base["optim"]["sparse"].pop("update")  # a kernel of the machine that trained
    return load_config(arguments, environ, base)


def evaluate_run(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run and return the fields of its result event. Collective."""
    source = open_source(SourceContext(config, "eval", runtime.device))
    model = build_sharded_model(config, runtime)
    checkpointer = Checkpointer(model, open_store(config.checkpoint.uri, config.train.run, config.checkpoint))
    warnings: list[str] = []
    progress = checkpointer.resume(warnings.append)
    if progress is None:
        raise UserError(
            f"run {config.train.run} has no complete checkpoint under {config.checkpoint.uri}. "
            f"Fix: train it first, or name another --train.run"
        )
    result = {
        "run": config.train.run,
        "state": "evaluated",
        **evaluate(model, source),
        "step": progress.step,
        "position": progress.position,
        "world_size": runtime.world_size,
        "checkpoint": checkpointer.location(progress.step),
    }
    with Reporter.open(config, runtime.is_main, progress.step) as reporter:
        for text in warnings:
            reporter.event("warning", text=text)
        reporter.event("result", **result)
    return result
