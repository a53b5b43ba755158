"""Loss, quality and speed of training between two reports."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import Progress
from trainer.metrics import Quality, Reporter
from trainer.sharding.sharded_model import ShardedModel
from trainer.training.pipeline import Output

_GIB = 1024**3


class Clock:
    """Loss, quality and speed between two reports. The device is waited for in `report` alone."""

    def __init__(self, job: ShardedModel, reporter: Reporter) -> None:
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
