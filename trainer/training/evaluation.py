"""Held-out quality of a job's model: every sample of the evaluation split once, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import Checkpointer, open_store
from trainer.config import TrainConfig
from trainer.data import Batch, KnowsBestAuc, Source, SourceContext, open_source
from trainer.data.loader import eval_batches, eval_size
from trainer.errors import UserError
from trainer.metrics import Quality, Reporter
from trainer.runtime.process_group import Runtime
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model
from trainer.training.pipeline import Pipeline


def evaluate(job: ShardedModel, source: Source, look: Callable[[], None] | None = None) -> dict[str, float]:
    """Collective: `loss`, `ne`, `auc`, `calibration` and, where the source knows it, `best_auc`; and `samples`.

    `look` is called after every batch and may raise to end the evaluation, if it does so on all processes alike.

    The model is in evaluation mode meanwhile, in a pipeline of its own, so that no batch of it meets the training
    stream.
    """
    config, runtime = job.config, job.runtime
    count = eval_size(source, config)
    share = config.eval_batch_size // runtime.world_size
    quality = Quality(runtime, window=count + config.eval_batch_size, piece=max(share, 65_536))
    totals = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # sum of weighted losses, sum of weights
    was_training = job.dmp.training
    job.dmp.eval()
    pipeline = Pipeline(job)
    try:
        with torch.no_grad():
            batches: Iterator[Batch] = eval_batches(
                source, config, count, runtime.rank, runtime.world_size, runtime.device
            )
            for _, logits, labels, weights in pipeline.run(batches):
                assert weights is not None, "eval_batches weighs every sample"
                losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                totals += torch.stack([(losses * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64)])
                quality.add(logits, labels, weights)
                if look is not None:
                    look()
    finally:
        pipeline.detach()
        job.dmp.train(was_training)
    dist.all_reduce(totals)
    result = {"loss": float(totals[0] / totals[1])} | quality.compute() | {"samples": count}
    if isinstance(source, KnowsBestAuc):
        result["best_auc"] = source.best_auc(count)
    return result


def evaluate_run(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Collective: held-out quality of the newest checkpoint of a run, as its result event."""
    source = open_source(SourceContext(config, "eval", runtime.device))
    job = build_sharded_model(config, runtime)
    checkpointer = Checkpointer(job, open_store(config.checkpoint.uri, config.train.run, config.checkpoint))
    passed_over: list[str] = []
    progress = checkpointer.resume(passed_over.append)
    if progress is None:
        raise UserError(
            f"run {config.train.run} has no complete checkpoint under {config.checkpoint.uri}; train it first, or name "
            f"another --train.run"
        )
    result = {
        "run": config.train.run,
        "state": "evaluated",
        **evaluate(job, source),
        "step": progress.step,
        "position": progress.position,
        "world_size": runtime.world_size,
        "checkpoint": checkpointer.location(progress.step),
    }
    with Reporter.open(config, runtime.is_main, progress.step) as reporter:
        for line in passed_over:
            reporter.event("warning", text=line)
        reporter.event("result", **result)
    return result
