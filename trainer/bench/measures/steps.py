"""Compare our step with stock in the same processes, for GPUs and for jobs that are already launched.

Both run in turn, block by block, on the same batches, so that changes of the machine's speed affect both. On CPU
`variants` gives each its own processes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.bench.measures.stock import build_stock, stock_batch
from trainer.bench.progress import progress
from trainer.config import TrainConfig
from trainer.data import Batch, SourceContext, open_source
from trainer.data.loader import train_batches
from trainer.runtime.process_group import Runtime
from trainer.sharding.sharded_model import build_sharded_model
from trainer.training.pipeline import Pipeline

if TYPE_CHECKING:
    from trainer.bench.options import BenchOptions

_CACHED_BATCHES = 10

Variant = tuple[Callable[[int], float], dict[str, Any]]  # a function that times a number of steps; facts about it


def bench_steps(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> dict[str, Any]:
    """Measure samples/s of the whole job for both steps, and the median of their ratios pair by pair (collective).

    Each variant has its own model and optimizer state and gets the same cached batches. A rate is
    steps x global batch / seconds between two barriers, with one device synchronization per block.
    """
    variants = {
        "ours": ours(config, runtime, cached_batches(config, runtime)),
        "stock": stock(config, runtime, cached_batches(config, runtime)),
    }
    for measure, _ in variants.values():
        measure(options.warmup)
    blocks: dict[str, list[float]] = {name: [] for name in variants}
    with progress("measuring", options.blocks, "blocks", runtime.is_main) as advance:
        for _ in range(options.blocks):
            for name, (measure, _) in variants.items():
                blocks[name].append(options.steps * config.train.batch_size / measure(options.steps))
            advance()
    ratios = [ours / stock for ours, stock in zip(blocks["ours"], blocks["stock"], strict=True)]
    return {
        "ours": statistics.median(blocks["ours"]),
        "stock": statistics.median(blocks["stock"]),
        "ratio": statistics.median(ratios),
        "ours_blocks": blocks["ours"],
        "stock_blocks": blocks["stock"],
        "ours_precision": variants["ours"][1]["precision"],
        "stock_precision": variants["stock"][1]["precision"],
        "ours_fast": variants["ours"][1]["fast"],
        "processes": runtime.world_size,
        "batch_per_process": config.train.batch_size // runtime.world_size,
        "device": runtime.device.type,
        "blocks": options.blocks,
        "steps": options.steps,
    }


def read_batches(config: TrainConfig, runtime: Runtime) -> Iterator[Batch]:
    """Return this process's share of all steps, prefetched as in training."""
    source = open_source(SourceContext(config, "train", runtime.device))
    return train_batches(source, config, 0, sys.maxsize, runtime.rank, runtime.world_size, runtime.device)


def cached_batches(config: TrainConfig, runtime: Runtime) -> Iterator[Batch]:
    """Return this process's share of the first steps, held in memory and repeated."""
    source = open_source(SourceContext(config, "train", runtime.device))
    ranks = (runtime.rank, runtime.world_size, runtime.device)
    return itertools.cycle(list(train_batches(source, config, 0, _CACHED_BATCHES, *ranks)))


def ours(config: TrainConfig, runtime: Runtime, batches: Iterator[Batch]) -> Variant:
    """Build the step of `python -m trainer` (collective)."""
    model = build_sharded_model(config, runtime)
    model.dmp.train()
    facts = {"precision": runtime.precision, "fast": {"malloc": runtime.malloc, **model.resolved}}
    return _timed(Pipeline(model).progress, batches, runtime), facts


def stock(config: TrainConfig, runtime: Runtime, batches: Iterator[Batch]) -> Variant:
    """Build the step of TorchRec's examples (collective)."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = build_stock(config, runtime)
    model.dmp.train()
    pipeline: Any = TrainPipelineSparseDist(
        model.dmp, model.optimizers.combined, runtime.device, execute_all_batches=True
    )
    stream = map(stock_batch, batches)
    facts: dict[str, Any] = {"precision": "tf32" if runtime.precision == "tf32" else "fp32", "fast": {}}
    return _timed(pipeline.progress, stream, runtime), facts


def _timed(progress: Callable[[Iterator[Any]], Any], stream: Iterator[Any], runtime: Runtime) -> Callable[[int], float]:
    def run(steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            progress(stream)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        dist.barrier()
        return time.perf_counter() - began

    return run
