"""Loss, quality and speed of training between two reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import Progress
from trainer.metrics import Quality, Reporter
from trainer.sharding.sharded_model import ShardedModel
from trainer.training.pipeline import Output

_GIB = 1024**3


class IntervalMetrics:
    """Loss, quality and speed between two reports. Only `report` waits for the device."""

    def __init__(self, model: ShardedModel, reporter: Reporter) -> None:
        config = model.config
        self._model, self._reporter = model, reporter
        self._losses: list[Tensor] = []
        self._learning_rate_factor = 1.0
        self._since = time.perf_counter()
        self._trained_seconds, self._trained_steps, self._reports = 0.0, 0, 0
        self._last_rate: float | None = None
        self._quality: Quality | None = None
        if config.metrics.train_metrics:
            piece = config.train.batch_size // model.runtime.world_size * config.metrics.log_every
            self._quality = Quality(model.runtime, config.metrics.window_samples, piece)

    def add(self, output: Output, learning_rate_factor: float) -> None:
        """Add the output of a step."""
        loss, logits, labels, weights = output
        self._losses.append(loss)
        self._learning_rate_factor = learning_rate_factor
        if self._quality is not None:
            self._quality.add(logits, labels, weights)

    def report(self, progress: Progress) -> None:
        """Send a train event about the steps since the last one. Collective."""
        if not self._losses:
            return
        loss = torch.stack(self._losses).mean().double()
        dist.all_reduce(loss)
        mean = float(loss) / self._model.runtime.world_size  # waits for the device
        seconds, steps = time.perf_counter() - self._since, len(self._losses)
        samples = steps * self._model.config.train.batch_size
        if self._reports or steps < 3:  # the first interval contains the start of the pipeline
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
            learning_rate_factor=self._learning_rate_factor,
            memory_gib=peak_memory_gib(self._model.runtime.device),
            samples_since_last=samples,
        )
        self._losses = []
        self._since = time.perf_counter()
        self._last_rate = samples / seconds

    def samples_per_second(self) -> float | None:
        """Return the rate of the whole job over all intervals but the first, without evaluations and saves."""
        if self._trained_steps:
            return self._trained_steps * self._model.config.train.batch_size / self._trained_seconds
        return self._last_rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a block from the training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: of the GPU's allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
