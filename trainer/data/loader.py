"""The batches of one process: its share of every step, prefetched by a thread.

Step k has samples position + k B .. position + (k + 1) B - 1, where B is the global batch size. Rank r of w processes
reads the r-th of w equal parts. So the number of processes changes which rank reads a sample, but never its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch

from trainer.config import TrainConfig
from trainer.data.base import Batch, Source
from trainer.data.prefetch import prefetch
from trainer.errors import UserError


def train_batches(
    source: Source,
    config: TrainConfig,
    position: int,
    num_steps: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield this rank's batches of `num_steps` steps, starting at global sample `position`.

    Batches stay on the device of the source. If `device` is a GPU, batches in host memory are pinned. An error of
    `source.read` is raised in place of the batch. Close or drop the iterator to end its thread early.
    """
    size = _share(config.train.batch_size, world_size)
    starts = (position + (step * world_size + rank) * size for step in range(num_steps))
    return _batches((source.read(start, size) for start in starts), config.data.prefetch, device)


def eval_batches(
    source: Source, config: TrainConfig, num_samples: int, rank: int, world_size: int, device: torch.device
) -> Iterator[Batch]:
    """Yield this rank's part of samples 0 .. num_samples - 1; exactly one rank gets each with weight 1.

    All ranks get the same number of batches, of equal size. The last ones are padded with earlier samples of weight 0.
    """
    size = _share(config.eval_batch_size, world_size)
    num_steps = -(-num_samples // (size * world_size))
    starts = ((step * world_size + rank) * size for step in range(num_steps))
    return _batches(
        (_read_weighted(source, start, size, num_samples) for start in starts), config.data.prefetch, device
    )


def eval_size(source: Source, config: TrainConfig) -> int:
    """Return the samples of one evaluation; raise UserError for an endless source without a limit."""
    limit, available = config.data.eval_samples, source.samples_per_epoch
    if not limit and available is None:
        raise UserError(
            f"data.eval_samples is wrong for {config.data.source}, which has no end: got 0; allowed: 1 or more. "
            f"Fix: --data.eval-samples N"
        )
    return min(n for n in (limit, available) if n)


def _batches(batches: Iterator[Batch], depth: int, device: torch.device) -> Iterator[Batch]:
    """Prefetch batches in host memory; a device queues its work itself, so its batches need no thread."""
    first = next(batches, None)
    if first is None or first.labels_B.device.type != "cpu":
        yield from () if first is None else chain((first,), batches)
        return
    batches = chain((first,), batches)
    if device.type == "cuda":
        batches = map(Batch.pin_memory, batches)
        yield from prefetch(batches, depth, on_start=partial(torch.cuda.set_device, device))
    else:
        yield from prefetch(batches, depth, on_start=lambda: None)


def _read_weighted(source: Source, start: int, size: int, num_samples: int) -> Batch:
    """Read `size` samples from `start`, or the last ones before `num_samples` if fewer are left."""
    first = max(min(start, num_samples - size), 0)
    batch = source.read(first, size)
    index_B = torch.arange(first, first + size, device=batch.labels_B.device)
    batch.weights_B = ((index_B >= start) & (index_B < num_samples)).to(torch.float32)
    return batch


def _share(batch_size: int, world_size: int) -> int:
    assert batch_size % world_size == 0, "TrainConfig.check_world_size was not called"
    return batch_size // world_size
