"""From a source to the batches of one process: its share of every step, prepared ahead by a thread.

Samples of step k: position + k B .. position + (k + 1) B - 1 for the global batch size B; of these rank r of w
processes reads the r-th of w equal parts. So the number of processes changes who reads a sample, never its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch

from trainer.config import TrainConfig
from trainer.data.base import Batch, Source
from trainer.data.prefetch import made_ahead
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
    """This rank's batches of `num_steps` steps from global sample `position` on.

    Batches are where the source makes them; those in host memory are page-locked where `device` is a GPU. Raises what
    `source.read` raises, at the batch that it concerns. Close the iterator (or drop it) to end its thread early.
    """
    size = _share(config.train.batch_size, world_size)
    starts = (position + (step * world_size + rank) * size for step in range(num_steps))
    return _batches((source.read(start, size) for start in starts), config.data.prefetch, device)


def eval_batches(
    source: Source, config: TrainConfig, num_samples: int, rank: int, world_size: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's part of samples 0 .. num_samples - 1, each of which exactly one rank gets with weight 1.

    All ranks get the same number of equal batches with `weights_B`; what fills the last ones repeats earlier samples
    with weight 0.
    """
    size = _share(config.eval_batch_size, world_size)
    num_steps = -(-num_samples // (size * world_size))
    starts = ((step * world_size + rank) * size for step in range(num_steps))
    return _batches((_weighted(source, start, size, num_samples) for start in starts), config.data.prefetch, device)


def eval_size(source: Source, config: TrainConfig) -> int:
    """Samples of one evaluation; raises UserError for an endless source without a limit."""
    limit, available = config.data.eval_samples, source.samples_per_epoch
    if not limit and available is None:
        raise UserError(
            f"data.eval_samples is 0 (all of them), but {config.data.source} has no end; set --data.eval-samples N"
        )
    return min(n for n in (limit, available) if n)


def _batches(batches: Iterator[Batch], depth: int, device: torch.device) -> Iterator[Batch]:
    """Ahead of time where the host makes them; a device queues its work by itself, so its batches need no thread."""
    first = next(batches, None)
    if first is None or first.labels_B.device.type != "cpu":
        yield from () if first is None else chain((first,), batches)
        return
    batches = chain((first,), batches)
    if device.type == "cuda":
        batches = map(Batch.pin_memory, batches)
        yield from made_ahead(batches, depth, begin=partial(torch.cuda.set_device, device))
    else:
        yield from made_ahead(batches, depth, begin=lambda: None)


def _weighted(source: Source, start: int, size: int, num_samples: int) -> Batch:
    """Samples from `start` on, or the last ones before `num_samples` where fewer than `size` are left."""
    first = max(min(start, num_samples - size), 0)
    batch = source.read(first, size)
    index_B = torch.arange(first, first + size, device=batch.labels_B.device)
    batch.weights_B = ((index_B >= start) & (index_B < num_samples)).to(torch.float32)
    return batch


def _share(batch_size: int, world_size: int) -> int:
    assert batch_size % world_size == 0, "TrainConfig.check_world_size comes first"
    return batch_size // world_size
