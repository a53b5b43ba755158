"""The training run: resume, step, report, evaluate, save, until the end."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import Checkpointer, Progress, open_store
from trainer.config import TrainConfig
from trainer.data import Batch, Source, SourceContext, open_source
from trainer.data.loader import train_batches
from trainer.errors import UserError
from trainer.evaluate import evaluate
from trainer.job import Job, build_job
from trainer.metrics import Quality, Reporter
from trainer.metrics.report import run_folder
from trainer.optim import schedule_factor
from trainer.planner import describe_plan
from trainer.runtime import Runtime
from trainer.step import Output, Pipeline

_GIB = 1024**3


def train(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Collective: train from where the run is to its end; returns the fields of the result event."""
    sources = {split: open_source(SourceContext(config, split, runtime.device)) for split in ("train", "eval")}
    job = build_job(config, runtime)
    checkpointer = Checkpointer(job, open_store(config.checkpoint.uri, config.train.run))
    start = _resume(config, checkpointer)
    total_steps = _total_steps(config, sources["train"], start)
    with Reporter.open(config, runtime.is_main, total_steps) as reporter:
        _announce(job, start, total_steps, reporter)
        run = Run(job, sources["train"], sources["eval"], checkpointer, reporter, total_steps, start)
        return run.execute()


def evaluate_run(config: TrainConfig, runtime: Runtime) -> dict[str, Any]:
    """Collective: held-out quality of the newest checkpoint of a run, as its result event."""
    source = open_source(SourceContext(config, "eval", runtime.device))
    job = build_job(config, runtime)
    checkpointer = Checkpointer(job, open_store(config.checkpoint.uri, config.train.run))
    newest = checkpointer.newest()
    if newest is None:
        raise UserError(
            f"run {config.train.run} has no complete checkpoint under {config.checkpoint.uri}; train it first, or name "
            f"another --train.run"
        )
    progress = checkpointer.restore(newest)
    result = {
        "run": config.train.run,
        "state": "evaluated",
        **evaluate(job, source),
        "step": progress.step,
        "position": progress.position,
        "world_size": runtime.world_size,
        "checkpoint": checkpointer.location(newest),
    }
    with Reporter.open(config, runtime.is_main, progress.step) as reporter:
        reporter.event("result", **result)
    return result


def _resume(config: TrainConfig, checkpointer: Checkpointer) -> Progress:
    newest, wanted = checkpointer.newest(), config.checkpoint.resume
    if newest is None:
        if wanted == "required":
            raise UserError(
                f"checkpoint.resume is required, but run {config.train.run} has no complete checkpoint under "
                f"{config.checkpoint.uri}; legal: --checkpoint.resume auto, or another --train.run"
            )
        return Progress()
    if wanted == "never":
        raise UserError(
            f"checkpoint.resume is never, but run {config.train.run} already has {checkpointer.location(newest)}; "
            f"start afresh with another --train.run NAME, or resume with --checkpoint.resume auto"
        )
    return checkpointer.restore(newest)


def _total_steps(config: TrainConfig, source: Source, start: Progress) -> int:
    if config.train.steps is not None:
        return config.train.steps
    per_epoch = source.samples_per_epoch or config.data.train_samples
    left = int(config.train.epochs * per_epoch) - start.position
    total = start.step + max(0, left) // config.train.batch_size
    if total == 0:
        raise UserError(
            f"train.batch_size is {config.train.batch_size}, more than the "
            f"{int(config.train.epochs * per_epoch)} samples of the run; legal: at most that, or give --train.steps"
        )
    return total


def _announce(job: Job, start: Progress, total_steps: int, reporter: Reporter) -> None:
    runtime, config = job.runtime, job.config
    reporter.event(
        "start",
        run=config.train.run,
        processes=runtime.world_size,
        device=str(runtime.device.type),
        precision=runtime.precision,
        because=runtime.precision_reason,
        threads=torch.get_num_threads(),
        batch_size=config.train.batch_size,
        total_steps=total_steps,
        source=config.data.source,
    )
    reporter.event("plan", tables=describe_plan(job.plan, config))
    if start.step:
        reporter.event("resume", step=start.step, position=start.position)


@dataclass
class Run:
    """A run under way on this process."""

    job: Job
    source: Source
    eval_source: Source
    checkpointer: Checkpointer
    reporter: Reporter
    total_steps: int
    progress: Progress
    saved_step: int | None = field(init=False, default=None)
    evaluated: dict[str, float] | None = field(init=False, default=None)

    def execute(self) -> dict[str, Any]:
        """Train what is left; the result event's fields."""
        config = self.job.config
        self.saved_step = self.progress.step or None
        first, state = self.progress.step, "complete"
        if first >= self.total_steps:
            state = "was already complete: nothing to train (more --train.steps, or another --train.run NAME)"
        elif first and config.train.target_auc is not None and self._reached_target():
            state = "had already reached train.target_auc: nothing to train"
        clock = Clock(self.job, self.reporter)
        if state == "complete":
            state = self._train(clock)
        if self.saved_step != self.progress.step:
            self._save()
        result = self._result(state, clock)
        self.reporter.event("result", **result)
        return result

    def _train(self, clock: Clock) -> str:
        """Steps until the end or the target; returns how it ended."""
        config, runtime = self.job.config, self.job.runtime
        self.job.dmp.train()
        pipeline = Pipeline(self.job)
        left = self.total_steps - self.progress.step
        stream = train_batches(
            self.source, config, self.progress.position, left, runtime.rank, runtime.world_size, runtime.device
        )
        with closing(cast("Generator[Batch]", stream)) as batches:
            for _ in range(left):
                self._step(pipeline, batches, clock)
                if self._due(config.checkpoint.every_steps):
                    with clock.paused():
                        self._save()
                if self._due(config.train.eval_every):
                    pipeline.detach()
                    with clock.paused():
                        reached = self._reached_target()
                    pipeline.attach()
                    if reached:
                        pipeline.detach()
                        clock.report(self.progress)
                        return f"complete: reached train.target_auc {config.train.target_auc}"
        pipeline.detach()
        clock.report(self.progress)
        return "complete"

    def _step(self, pipeline: Pipeline, batches: Iterator[Any], clock: Clock) -> None:
        config, step = self.job.config, self.progress.step
        factor = schedule_factor(config.optim.schedule, step, self.total_steps)
        self.job.optimizers.set_factor(factor)
        output = pipeline.progress(batches)
        self.progress = Progress(step + 1, self.progress.position + config.train.batch_size)
        self.evaluated = None
        clock.stepped(output, factor)
        self.reporter.tick(self.progress.step)
        if self.progress.step % config.metrics.log_every == 0:
            clock.report(self.progress)

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0 and self.progress.step < self.total_steps

    def _save(self) -> None:
        began = time.monotonic()
        where = self.checkpointer.save(self.progress)
        self.saved_step = self.progress.step
        self.reporter.event(
            "checkpoint", step=self.progress.step, path=where, seconds=round(time.monotonic() - began, 3)
        )

    def _reached_target(self) -> bool:
        """Evaluate; whether the AUC is at train.target_auc."""
        self._evaluate()
        assert self.evaluated is not None
        target = self.job.config.train.target_auc
        return target is not None and self.evaluated["auc"] >= target

    def _evaluate(self) -> None:
        self.evaluated = evaluate(self.job, self.eval_source)
        self.reporter.event("eval", step=self.progress.step, **self.evaluated)

    def _result(self, state: str, clock: Clock) -> dict[str, Any]:
        if self.evaluated is None:
            self._evaluate()
        assert self.evaluated is not None
        return {
            "run": self.job.config.train.run,
            "state": state,
            **self.evaluated,
            "samples_per_second": clock.overall(),
            "step": self.progress.step,
            "position": self.progress.position,
            "world_size": self.job.runtime.world_size,
            "checkpoint": self.checkpointer.location(self.progress.step),
            "logs": str(run_folder(self.job.config)),
            "memory_gib": memory_gib(self.job.runtime.device),
        }


class Clock:
    """Loss, quality and speed between two reports. The device is waited for in `report` alone."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        config = job.config
        self._job, self._reporter = job, reporter
        self._losses: list[Tensor] = []
        self._factor = 1.0
        self._since = time.perf_counter()
        self._trained_seconds, self._trained_steps, self._reports = 0.0, 0, 0
        self._last_rate: float | None = None
        self._quality: Quality | None = None
        if config.metrics.train_metrics:
            piece = config.train.batch_size // job.runtime.world_size * config.metrics.log_every
            self._quality = Quality(job.runtime, config.metrics.window_samples, piece)

    def stepped(self, output: Output, factor: float) -> None:
        """Take note of a step."""
        loss, logits, labels, weights = output
        self._losses.append(loss)
        self._factor = factor
        if self._quality is not None:
            self._quality.add(logits, labels, weights)

    def report(self, progress: Progress) -> None:
        """Collective: send a train event about the steps since the last one."""
        if not self._losses:
            return
        loss = torch.stack(self._losses).mean().double()
        dist.all_reduce(loss)
        mean = float(loss) / self._job.runtime.world_size  # waits for the device
        seconds, steps = time.perf_counter() - self._since, len(self._losses)
        samples = steps * self._job.config.train.batch_size
        if self._reports or steps < 3:  # the first report holds the start-up of the pipeline
            self._trained_seconds, self._trained_steps = self._trained_seconds + seconds, self._trained_steps + steps
        self._reports += 1
        quality = self._quality.compute() if self._quality is not None else {}
        self._reporter.event(
            "train",
            step=progress.step,
            position=progress.position,
            loss=mean,
            **quality,
            samples_per_second=samples / seconds,
            step_ms=1e3 * seconds / steps,
            learning_rate_factor=self._factor,
            memory_gib=memory_gib(self._job.runtime.device),
            samples_since_last=samples,
        )
        self._losses = []
        self._since = time.perf_counter()
        self._last_rate = samples / seconds

    def overall(self) -> float | None:
        """Samples per second of the whole job over all reports but the first, evaluations and saves left out."""
        if self._trained_steps:
            return self._trained_steps * self._job.config.train.batch_size / self._trained_seconds
        return self._last_rate

    def paused(self) -> Paused:
        """A block whose time does not count as training."""
        return Paused(self)

    def shift(self, seconds: float) -> None:
        """Leave out `seconds` that passed since the last report."""
        self._since += seconds


class Paused:
    """See Clock.paused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock.shift(time.perf_counter() - self._began)


def memory_gib(device: torch.device) -> float:
    """Largest memory of this process so far in GiB: the GPU's allocator, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
