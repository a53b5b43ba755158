"""Cost of checkpoints: training with a save in every block compared with training without, and how long saves block."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.bench.measures.uploads import bench_uploads
from trainer.checkpoint import Checkpointer, Progress, Saver, open_store
from trainer.checkpoint.store import is_local
from trainer.config import TrainConfig
from trainer.config.run_paths import run_uri
from trainer.data import SourceContext, open_source
from trainer.data.loader import train_batches
from trainer.runtime.process_group import Runtime
from trainer.runtime.vote import AsyncVote, Ballot
from trainer.sharding.sharded_model import build_sharded_model
from trainer.training.pipeline import Pipeline

if TYPE_CHECKING:
    from trainer.bench.options import BenchOptions

_CACHED_BATCHES = 10


class _Bench:
    """A job that saves the run `<train.run>-bench`, which it deletes at the end."""

    def __init__(self, config: TrainConfig, runtime: Runtime) -> None:
        source = open_source(SourceContext(config, "train", runtime.device))
        ranks = (runtime.rank, runtime.world_size, runtime.device)
        self._batches = itertools.cycle(list(train_batches(source, config, 0, _CACHED_BATCHES, *ranks)))
        self._config, self._runtime = config, runtime
        self._model = build_sharded_model(config, runtime)
        self._model.dmp.train()
        self._pipeline = Pipeline(self._model)
        self._run = f"{config.train.run}-bench"[:42]
        self._store = open_store(config.checkpoint.uri, self._run, config.checkpoint)
        self.checkpointer = Checkpointer(self._model, self._store)
        self.events: list[dict[str, Any]] = []
        self.saver = Saver(self.checkpointer, config.checkpoint, lambda _, **fields: self.events.append(fields))
        self._vote = AsyncVote(timedelta(seconds=config.train.timeout_seconds))
        self._step = 0
        self.overheads: list[float | None] = []  # of each block with a save

    def seconds(self, steps: int, with_save: bool) -> float:
        """Return the seconds of `steps` steps between two barriers, each followed by the vote of normal training.

        A save starts after the first step and is complete at the end.
        """
        dist.barrier()
        began = time.perf_counter()
        steps_during, other_steps, ended = list[float](), list[float](), began
        for number in range(steps):
            self._step += 1
            during = self.saver.busy
            self._pipeline.progress(self._batches)
            self._vote.submit(Ballot(self._step, writing=self.saver.busy))
            if with_save and number == 0:
                self.saver.start(self.progress)
                during = True
            last, ended = ended, time.perf_counter()
            (steps_during if during else other_steps).append(ended - last)
        if with_save:
            self.saver.wait()
            self.overheads.append(save_overhead(steps_during, other_steps))
        self._vote.close()
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)
        dist.barrier()
        return time.perf_counter() - began

    @property
    def progress(self) -> Progress:
        """Return the progress of the job."""
        return Progress(self._step, self._step * self._config.train.batch_size)

    def synchronous_seconds(self) -> float:
        """Return the seconds of a save that training waits for, from the same state."""
        dist.barrier()
        began = time.perf_counter()
        self.checkpointer.save(Progress(self._step + 1, 0))
        return time.perf_counter() - began

    def uploads(self) -> dict[str, Any] | None:
        """Measure uploads; return None if checkpoints are on a local disk (collective)."""
        checkpoint = self._config.checkpoint
        if is_local(checkpoint.uri):
            return None
        _log_progress(self._runtime, "upload, compared with one large file")
        return bench_uploads(self.checkpointer, self._store, run_uri(checkpoint.uri, self._run), self._step + 2)

    def close(self) -> None:
        """Delete the checkpoints."""
        if self._runtime.is_main:
            for step in [*self._store.complete_steps(), *self._store.incomplete_steps()]:
                self._store.delete(step)


def save_overhead(steps_during: list[float], other_steps: list[float]) -> float | None:
    """Return the share that a save adds to the time of its block, or None if it lasted for the whole block.

    It compares the steps during the save with the other steps of the same block. Unlike the ratio of whole blocks, it
    does not depend on changes of the machine's speed between blocks.
    """
    if not other_steps:
        return None
    usual = statistics.mean(other_steps)
    return (sum(steps_during) - usual * len(steps_during)) / (usual * (len(steps_during) + len(other_steps)))


def bench_checkpoints(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> dict[str, Any]:
    """Measure samples/s of blocks with and without a save, in turn, and the median of their ratios (collective)."""
    bench = _Bench(config, runtime)
    try:
        bench.seconds(options.warmup, with_save=False)
        bench.seconds(options.warmup, with_save=True)  # the first save allocates its buffers
        bench.events.clear()
        bench.overheads.clear()
        blocks: dict[str, list[float]] = {"with": [], "without": []}
        synchronous = []
        for number in range(options.blocks):
            _log_progress(runtime, f"block {number + 1} of {options.blocks}")
            for name in blocks if number % 2 else reversed(blocks):
                rate = options.steps * config.train.batch_size / bench.seconds(options.steps, name == "with")
                blocks[name].append(rate)
            synchronous.append(bench.synchronous_seconds())
        uploads = bench.uploads()
    finally:
        bench.close()
    ratios = [on / off for on, off in zip(blocks["with"], blocks["without"], strict=True)]
    overheads = [overhead for overhead in bench.overheads if overhead is not None]
    timed = overheads and runtime.device.type == "cpu"  # a GPU's steps are queued, so single steps cannot be timed
    blocked = [event["blocked_seconds"] for event in bench.events]
    return {
        "with": statistics.median(blocks["with"]),
        "without": statistics.median(blocks["without"]),
        "ratio": statistics.median(ratios),
        "with_blocks": blocks["with"],
        "without_blocks": blocks["without"],
        "save_share": statistics.median(overheads) if timed else None,
        "steps_per_save": options.steps,
        "synchronous_seconds": statistics.median(synchronous),
        "blocked_seconds": statistics.median(blocked),
        "background_seconds": statistics.median(event["seconds"] for event in bench.events),
        "blocked_share": statistics.median(blocked) / statistics.median(synchronous),
        "upload": uploads,
        "processes": runtime.world_size,
        "device": runtime.device.type,
    }


def _log_progress(runtime: Runtime, text: str) -> None:
    """Print a line of progress on rank 0."""
    if runtime.is_main:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
