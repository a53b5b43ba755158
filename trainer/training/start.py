"""The start of a run: the checkpoint to resume from, the number of steps, and the events that describe them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from trainer.checkpoint import Checkpointer, Progress
from trainer.config import TrainConfig
from trainer.data import Source
from trainer.errors import UserError
from trainer.metrics import Reporter
from trainer.sharding.planner import describe_plan
from trainer.sharding.sharded_model import ShardedModel


@dataclass(frozen=True)
class Start:
    """Where a run starts: its progress, how long the checkpoint took to load, and warnings about skipped ones."""

    progress: Progress
    seconds: float
    warnings: tuple[str, ...]


def resume(config: TrainConfig, checkpointer: Checkpointer) -> Start:
    """Load the newest complete checkpoint as checkpoint.resume allows; raise UserError if it forbids it. Collective."""
    began, run, mode = time.monotonic(), config.train.run, config.checkpoint.resume
    warnings: list[str] = []
    progress: Progress | None = None
    if mode == "never":
        newest = checkpointer.newest()
        if newest is not None:
            raise UserError(
                f"checkpoint.resume is never, but run {run} already has {checkpointer.location(newest)}. "
                f"Fix: start a new run with another --train.run NAME, or resume with --checkpoint.resume auto"
            )
    else:
        progress = checkpointer.resume(warnings.append)
    if progress is None and mode == "required":
        raise UserError(
            f"checkpoint.resume is required, but run {run} has no complete checkpoint under {config.checkpoint.uri}. "
            f"Fix: use --checkpoint.resume auto, or another --train.run"
        )
    return Start(progress or Progress(), round(time.monotonic() - began, 3), tuple(warnings))


def count_steps(config: TrainConfig, source: Source, start: Progress) -> int:
    """Return the number of the run's last step; raise UserError if its samples do not fill one batch."""
    if config.train.steps is not None:
        return config.train.steps
    samples = int(config.train.epochs * (source.samples_per_epoch or config.data.train_samples))
    total = start.step + max(0, samples - start.position) // config.train.batch_size
    if total == 0:
        raise UserError(
            f"train.batch_size is larger than the run: got {config.train.batch_size}; allowed: at most {samples}, the "
            f"samples of the run. Fix: choose a smaller --train.batch-size, or give --train.steps"
        )
    return total


def report_start(model: ShardedModel, start: Start, total_steps: int, reporter: Reporter) -> None:
    """Send the events start, plan, warning and resume."""
    runtime, config = model.runtime, model.config
    reporter.event(
        "start",
        run=config.train.run,
        processes=runtime.world_size,
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        device=str(runtime.device.type),
        precision=runtime.precision,
        because=runtime.precision_reason,
        malloc=runtime.malloc,
        **model.resolved,
        threads=torch.get_num_threads(),
        batch_size=config.train.batch_size,
        batch_per_process=config.train.batch_size // runtime.world_size,
        total_steps=total_steps,
        source=config.data.source,
    )
    reporter.event("plan", tables=describe_plan(model.plan, config))
    for text in start.warnings:
        reporter.event("warning", text=text)
    if start.progress.step:
        reporter.event("resume", step=start.progress.step, position=start.progress.position, seconds=start.seconds)
