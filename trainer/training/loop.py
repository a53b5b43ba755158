"""The training run: resume, step, report, evaluate, save, until the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch

from trainer.checkpoint import Checkpointer, Progress, Saver, open_store
from trainer.config import TrainConfig
from trainer.data import Batch, Source, SourceContext, open_source
from trainer.data.loader import train_batches
from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK, EXIT_RESTART
from trainer.metrics import Reporter
from trainer.metrics.reporter import run_folder
from trainer.runtime.preemption import Preemption
from trainer.runtime.process_group import Runtime
from trainer.runtime.spot_notices import Notice, NoticeWatcher
from trainer.runtime.vote import AsyncVote, Ballot
from trainer.runtime.watchdog import Watchdog
from trainer.sharding.optimizers import schedule_factor
from trainer.sharding.planner import describe_plan
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model
from trainer.training.evaluation import evaluate
from trainer.training.interval_metrics import Clock, memory_gib
from trainer.training.pipeline import Pipeline

_LINGER_SECONDS = 10.0


def train(config: TrainConfig, runtime: Runtime) -> int:
    """Collective: train from where the run is to its end; returns the exit code, 75 where it must go on elsewhere."""
    sources = {split: open_source(SourceContext(config, split, runtime.device)) for split in ("train", "eval")}
    job = build_sharded_model(config, runtime)
    checkpointer = Checkpointer(job, open_store(config.checkpoint.uri, config.train.run, config.checkpoint))
    passed_over: list[str] = []
    began = time.monotonic()
    start = _resume(config, checkpointer, passed_over.append)
    loaded_seconds = round(time.monotonic() - began, 3)
    total_steps = _total_steps(config, sources["train"], start)
    with Reporter.open(config, runtime.is_main, total_steps) as reporter:
        _announce(job, start, total_steps, reporter, passed_over, loaded_seconds)
        run = Run(job, sources["train"], sources["eval"], checkpointer, reporter, total_steps, start)
        return run.execute()


def _resume(config: TrainConfig, checkpointer: Checkpointer, warn: Callable[[str], None]) -> Progress:
    wanted = config.checkpoint.resume
    newest = checkpointer.newest() if wanted == "never" else None
    if newest is not None:
        raise UserError(
            f"checkpoint.resume is never, but run {config.train.run} already has {checkpointer.location(newest)}; "
            f"start afresh with another --train.run NAME, or resume with --checkpoint.resume auto"
        )
    progress = checkpointer.resume(warn) if wanted != "never" else None
    if progress is None and wanted == "required":
        raise UserError(
            f"checkpoint.resume is required, but run {config.train.run} has no complete checkpoint under "
            f"{config.checkpoint.uri}; legal: --checkpoint.resume auto, or another --train.run"
        )
    return progress or Progress()


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


def _announce(
    job: ShardedModel,
    start: Progress,
    total_steps: int,
    reporter: Reporter,
    passed_over: list[str],
    loaded_seconds: float,
) -> None:
    runtime, config = job.runtime, job.config
    reporter.event(
        "start",
        run=config.train.run,
        processes=runtime.world_size,
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        device=str(runtime.device.type),
        precision=runtime.precision,
        because=runtime.precision_reason,
        malloc=runtime.malloc,
        **job.resolved,
        threads=torch.get_num_threads(),
        batch_size=config.train.batch_size,
        batch_per_process=config.train.batch_size // runtime.world_size,
        total_steps=total_steps,
        source=config.data.source,
    )
    reporter.event("plan", tables=describe_plan(job.plan, config))
    for line in passed_over:
        reporter.event("warning", text=line)
    if start.step:
        reporter.event("resume", step=start.step, position=start.position, seconds=loaded_seconds)


class Leaving(Exception):  # noqa: N818  # not an error: the way out of an evaluation
    """All processes have agreed to stop in the middle of an evaluation."""

    def __init__(self, agreed: Ballot) -> None:
        super().__init__(agreed)
        self.agreed = agreed


@dataclass
class Run:
    """A run under way on this process."""

    job: ShardedModel
    source: Source
    eval_source: Source
    checkpointer: Checkpointer
    reporter: Reporter
    total_steps: int
    progress: Progress
    evaluated: dict[str, float] | None = field(init=False, default=None)
    waiting_for_save: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        config, runtime = self.job.config, self.job.runtime
        self.saver = Saver(self.checkpointer, config.checkpoint, self.reporter.event)
        self.vote = AsyncVote(timedelta(seconds=config.train.timeout_seconds))
        self.preemption = Preemption(config.fault, runtime.rank, runtime.siblings)
        self.watchdog = Watchdog(config.fault.step_timeout_seconds, runtime.rank, runtime.store)
        self.notices = NoticeWatcher(config.fault, self._heard)
        self.wise_to_save = False

    def execute(self) -> int:
        """Train what is left; the exit code."""
        config = self.job.config
        first, state = self.progress.step, "complete"
        if first:
            self.saver.mark_saved(first)
        if first >= self.total_steps:
            state = "was already complete: nothing to train (more --train.steps, or another --train.run NAME)"
        elif first and config.train.target_auc is not None and self._reached_target():
            state = "had already reached train.target_auc: nothing to train"
        clock = Clock(self.job, self.reporter)
        if state == "complete":
            found = self._guarded(clock)
            if found is None:
                self.preemption.tell_launcher()
                return EXIT_RESTART
            state = found
        self.reporter.event("result", **self._result(state, clock))
        return EXIT_OK

    def _guarded(self, clock: Clock) -> str | None:
        """Steps and the last save, while signals, notices and hangs are watched for; how it ended, None: must go."""
        with self.preemption, self.watchdog:
            if self.job.runtime.local_rank == 0:
                self.notices.start()
            try:
                state = self._train(clock)
            except BaseException:
                self.saver.wait_briefly(_LINGER_SECONDS)
                raise
            finally:
                self.notices.close()
                self.watchdog.rest()
            if state is not None:
                self.saver.finish(self.progress)
            return state

    def _train(self, clock: Clock) -> str | None:
        """Steps until the end, the target, or a stop that all processes agree on; how it ended, None for that."""
        config, runtime = self.job.config, self.job.runtime
        self.job.dmp.train()
        self.saver.reserve()
        pipeline = Pipeline(self.job)
        left = self.total_steps - self.progress.step
        stream = train_batches(
            self.source, config, self.progress.position, left, runtime.rank, runtime.world_size, runtime.device
        )
        with closing(cast("Generator[Batch]", stream)) as batches:
            for _ in range(left):
                self.watchdog.step(self.progress.step + 1)
                self._step(pipeline, batches, clock)
                agreed = self._agree()
                if agreed.stop:
                    self._stop(agreed)
                    return None
                self._save_where_due(agreed, clock)
                if self._due(config.train.eval_every):
                    pipeline.detach()
                    try:
                        with clock.paused():
                            reached = self._reached_target(self._look)
                    except Leaving as leaving:
                        self._stop(leaving.agreed)
                        return None
                    pipeline.attach()
                    if reached:
                        self.vote.close()
                        pipeline.detach()
                        clock.report(self.progress)
                        return f"complete: reached train.target_auc {config.train.target_auc}"
        self.vote.close()
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
        self.reporter.set_step(self.progress.step)
        if self.progress.step % config.metrics.log_every == 0:
            clock.report(self.progress)

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0 and self.progress.step < self.total_steps

    def _agree(self) -> Ballot:
        """Collective: what all processes said after the step before this one."""
        saver, fault, main = self.saver, self.job.config.fault, self.job.runtime.is_main
        wise, self.wise_to_save = self.wise_to_save, False
        return self.vote.submit(
            Ballot(
                step=self.progress.step,
                stop=self.preemption.requested,
                save_first=main and saver.age_seconds > fault.save_if_older_seconds,
                due=wise or (main and saver.due),
                writing=saver.busy,
            )
        )

    def _look(self) -> None:
        """Collective, between two batches of an evaluation: whether all must go, and what else was voted."""
        self.watchdog.step(self.progress.step)
        agreed = self._agree()
        self.waiting_for_save |= self._by_clock(agreed)
        if agreed.stop:
            raise Leaving(agreed)

    def _by_clock(self, agreed: Ballot) -> bool:
        """Whether a save is due for another reason than the steps. Ballot given before the last save began know nothing
        of it."""
        return agreed.due and agreed.step > self.saver.started_step

    def _save_where_due(self, agreed: Ballot, clock: Clock) -> None:
        """Take in a save that has ended everywhere; begin one by steps or by the clock, unless one is under way."""
        if self.saver.pending and agreed.step >= self.saver.started_step and not agreed.writing:
            self.saver.wait()
        self.waiting_for_save |= self._due(self.job.config.checkpoint.every_steps) or self._by_clock(agreed)
        if self.waiting_for_save and not self.saver.pending and self.progress.step < self.total_steps:
            self.waiting_for_save = False
            self.watchdog.rest()
            with clock.paused():
                self.saver.start(self.progress)

    def _stop(self, agreed: Ballot) -> None:
        """All processes stop after this step: save first where that is worth it, or just go."""
        self.watchdog.rest()
        self.preemption.stopping()
        self.vote.close()
        before = self.saver.saved_step
        try:
            self.saver.wait()
            if agreed.save_first and self.saver.saved_step != self.progress.step:
                self.saver.start(self.progress)
                self.saver.wait()
        except UserError as error:  # too late for another try; what counts now is to say so and go
            self.reporter.event("checkpoint_failed", step=self.progress.step, error=str(error))
        self.reporter.event(
            "preempted",
            step=self.progress.step,
            saved_step=self.saver.saved_step,
            saved_now=self.saver.saved_step != before,
            because=self.preemption.reason or "another process must go",
            exit_code=EXIT_RESTART,
        )

    def _heard(self, notice: Notice) -> None:
        """From the thread that watches the cloud."""
        if notice.goes:
            self.preemption.request(notice.text, machine_goes=True)
        else:
            self.wise_to_save = True

    def _reached_target(self, look: Callable[[], None] | None = None) -> bool:
        """Evaluate; whether the AUC is at train.target_auc."""
        self._evaluate(look)
        assert self.evaluated is not None
        target = self.job.config.train.target_auc
        return target is not None and self.evaluated["auc"] >= target

    def _evaluate(self, look: Callable[[], None] | None = None) -> None:
        self.evaluated = evaluate(self.job, self.eval_source, look)
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
