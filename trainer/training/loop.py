"""The training loop: step, vote, save, evaluate and report until a run ends or is preempted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

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
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model
from trainer.training.evaluation import evaluate
from trainer.training.interval_metrics import IntervalMetrics, peak_memory_gib
from trainer.training.outcome import Outcome
from trainer.training.pipeline import Pipeline
from trainer.training.save_schedule import SaveSchedule
from trainer.training.start import count_steps, report_start, resume

_SAVE_AFTER_ERROR_SECONDS = 10.0


def train(config: TrainConfig, runtime: Runtime) -> int:
    """Train a run from its newest checkpoint to its end and return the exit code, 75 if preempted. Collective."""
    sources = {split: open_source(SourceContext(config, split, runtime.device)) for split in ("train", "eval")}
    model = build_sharded_model(config, runtime)
    checkpointer = Checkpointer(model, open_store(config.checkpoint.uri, config.train.run, config.checkpoint))
    start = resume(config, checkpointer)
    total_steps = count_steps(config, sources["train"], start.progress)
    with Reporter.open(config, runtime.is_main, total_steps) as reporter:
        report_start(model, start, total_steps, reporter)
        run = TrainingRun(model, sources["train"], sources["eval"], checkpointer, reporter, total_steps, start.progress)
        return EXIT_RESTART if run.execute() is Outcome.PREEMPTED else EXIT_OK


class EvaluationInterruptedError(Exception):
    """All processes agreed to stop during an evaluation."""


@dataclass
class TrainingRun:
    """A run on this process."""

    model: ShardedModel
    source: Source
    eval_source: Source
    checkpointer: Checkpointer
    reporter: Reporter
    total_steps: int
    progress: Progress
    quality: dict[str, float] | None = field(init=False, default=None)  # of the evaluation after the newest step
    votes: Ballot = field(init=False, default_factory=Ballot)  # of all processes, one step old
    metrics: IntervalMetrics = field(init=False)

    def __post_init__(self) -> None:
        config, runtime = self.model.config, self.model.runtime
        self.saver = Saver(self.checkpointer, config.checkpoint, self.reporter.event)
        self.saves = SaveSchedule(config, self.total_steps, runtime.is_main, self.saver)
        self.vote = AsyncVote(timedelta(seconds=config.train.timeout_seconds))
        self.preemption = Preemption(config.fault, runtime.rank, runtime.siblings)
        self.watchdog = Watchdog(config.fault.step_timeout_seconds, runtime.rank, runtime.store)
        self.notices = NoticeWatcher(config.fault, self._handle_notice)

    def execute(self) -> Outcome:
        """Run the remaining steps, then report the result or stop for a restart."""
        if self.progress.step:
            self.saver.mark_saved(self.progress.step)
        outcome = self._outcome_before_training()
        self.metrics = IntervalMetrics(self.model, self.reporter)
        if outcome is None:
            outcome = self._train_under_guard()
        if outcome is Outcome.PREEMPTED:
            self.preemption.stop_launcher()
        else:
            self.reporter.event("result", **self._result(outcome))
        return outcome

    def _outcome_before_training(self) -> Outcome | None:
        """Return the outcome of a run that ended before this start, None if there are steps to run."""
        if self.progress.step >= self.total_steps:
            return Outcome.ALREADY_COMPLETE
        if self.progress.step and self.model.config.train.target_auc is not None and self._reaches_target():
            return Outcome.ALREADY_AT_TARGET
        return None

    def _train_under_guard(self) -> Outcome:
        """Train and save the end, while signals, spot notices and hanging steps are watched for."""
        with self.preemption, self.watchdog:
            if self.model.runtime.local_rank == 0:
                self.notices.start()
            try:
                outcome = self._train()
            except BaseException:
                self.saver.wait_briefly(_SAVE_AFTER_ERROR_SECONDS)
                raise
            finally:
                self.notices.close()
                self.watchdog.pause()
            if outcome is not Outcome.PREEMPTED:
                self.saver.finish(self.progress)
            return outcome

    def _train(self) -> Outcome:
        config, runtime = self.model.config, self.model.runtime
        self.model.dmp.train()
        self.saver.reserve()
        pipeline = Pipeline(self.model)
        remaining = self.total_steps - self.progress.step
        stream = train_batches(
            self.source, config, self.progress.position, remaining, runtime.rank, runtime.world_size, runtime.device
        )
        with closing(cast("Generator[Batch]", stream)) as batches:
            outcome = self._run_steps(pipeline, batches)
        if outcome is not Outcome.PREEMPTED:
            self.vote.close()
            pipeline.detach()
            self.metrics.report(self.progress)
        return outcome

    def _run_steps(self, pipeline: Pipeline, batches: Iterator[Batch]) -> Outcome:
        """Run steps until the last one, the target, or a stop that all processes agree on."""
        while self.progress.step < self.total_steps:
            self.watchdog.start_step(self.progress.step + 1)
            self._step(pipeline, batches)
            self._exchange_votes()
            if self.votes.stop:
                return self._stop()
            self._save_if_due()
            if self._is_evaluation_due():
                try:
                    reached = self._evaluate_between_steps(pipeline)
                except EvaluationInterruptedError:
                    return self._stop()
                if reached:
                    return Outcome.REACHED_TARGET
        return Outcome.COMPLETE

    def _step(self, pipeline: Pipeline, batches: Iterator[Any]) -> None:
        config, step = self.model.config, self.progress.step
        factor = schedule_factor(config.optim.schedule, step, self.total_steps)
        self.model.optimizers.set_factor(factor)
        output = pipeline.progress(batches)
        self.progress = Progress(step + 1, self.progress.position + config.train.batch_size)
        self.quality = None
        self.metrics.add(output, factor)
        self.reporter.set_step(self.progress.step)
        if self.progress.step % config.metrics.log_every == 0:
            self.metrics.report(self.progress)

    def _exchange_votes(self) -> None:
        """Vote after a step and read all votes on the step before it. Collective."""
        self.votes = self.vote.submit(self.saves.ballot(self.progress.step, self.preemption.requested))

    def _save_if_due(self) -> None:
        """Report a save that has ended on all processes, and start one if it is due."""
        if self.saves.is_written(self.votes):
            self.saver.wait()
        self.saves.record(self.votes)
        if self.saves.should_start(self.progress.step):
            self.watchdog.pause()
            with self.metrics.paused():
                self.saver.start(self.progress)

    def _is_evaluation_due(self) -> bool:
        every = self.model.config.train.eval_every
        return bool(every) and self.progress.step % every == 0 and self.progress.step < self.total_steps

    def _evaluate_between_steps(self, pipeline: Pipeline) -> bool:
        """Return whether train.target_auc is reached; raise EvaluationInterruptedError if all must stop."""
        pipeline.detach()
        with self.metrics.paused():
            reached = self._reaches_target(self._vote_during_evaluation)
        pipeline.attach()
        return reached

    def _vote_during_evaluation(self) -> None:
        self.watchdog.start_step(self.progress.step)
        self._exchange_votes()
        self.saves.record(self.votes)
        if self.votes.stop:
            raise EvaluationInterruptedError

    def _stop(self) -> Outcome:
        """Stop all processes after this step, with a save if the last one is too old."""
        self.watchdog.pause()
        self.preemption.mark_stopping()
        self.vote.close()
        before = self.saver.saved_step
        try:
            self.saver.wait()
            if self.saves.should_save_before_stop(self.progress.step, self.votes):
                self.saver.start(self.progress)
                self.saver.wait()
        except UserError as error:  # there is no time for a retry, only for a report
            self.reporter.event("checkpoint_failed", step=self.progress.step, error=str(error))
        self.reporter.event(
            "preempted",
            step=self.progress.step,
            saved_step=self.saver.saved_step,
            saved_now=self.saver.saved_step != before,
            because=self.preemption.reason or "another process must stop",
            exit_code=EXIT_RESTART,
        )
        return Outcome.PREEMPTED

    def _handle_notice(self, notice: Notice) -> None:
        """Stop, or request a save; called from the thread that reads spot notices."""
        if notice.terminates:
            self.preemption.request(notice.text, machine_ends=True)
        else:
            self.saves.request_save()

    def _reaches_target(self, after_batch: Callable[[], None] | None = None) -> bool:
        """Evaluate, and return whether the AUC is at least train.target_auc."""
        quality = self._evaluate(after_batch)
        target = self.model.config.train.target_auc
        return target is not None and quality["auc"] >= target

    def _evaluate(self, after_batch: Callable[[], None] | None = None) -> dict[str, float]:
        self.quality = evaluate(self.model, self.eval_source, after_batch)
        self.reporter.event("eval", step=self.progress.step, **self.quality)
        return self.quality

    def _result(self, outcome: Outcome) -> dict[str, Any]:
        config, runtime = self.model.config, self.model.runtime
        return {
            "run": config.train.run,
            "state": outcome.describe(config),
            **(self.quality or self._evaluate()),
            "samples_per_second": self.metrics.samples_per_second(),
            "step": self.progress.step,
            "position": self.progress.position,
            "world_size": runtime.world_size,
            "checkpoint": self.checkpointer.location(self.progress.step),
            "logs": str(run_folder(config)),
            "memory_gib": peak_memory_gib(runtime.device),
        }
