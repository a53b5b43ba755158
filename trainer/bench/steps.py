"""Ours and stock in turn, block by block, on the same batches: a drift of the machine's speed hits both."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.bench.stock import build_stock, stock_batch
from trainer.config import TrainConfig
from trainer.data import Batch, SourceContext, open_source
from trainer.data.loader import train_batches
from trainer.job import build_job
from trainer.runtime import Runtime
from trainer.step import Pipeline

if TYPE_CHECKING:
    from trainer.bench.command import BenchOptions

_CACHED_BATCHES = 10


def bench_steps(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> dict[str, Any]:
    """Collective: samples/s of the whole job for both steps, and the median of their ratios pair by pair.

    Each side has its own model and optimizer state and sees the same cached batches; a rate is
    steps x global batch / seconds between two barriers. The device is waited for once a block.
    """
    source = open_source(SourceContext(config, "train", runtime.device))
    batches = list(train_batches(source, config, 0, _CACHED_BATCHES, runtime.rank, runtime.world_size, runtime.device))
    sides: dict[str, Callable[[int], float]] = {
        "ours": _ours(config, runtime, batches),
        "stock": _stock(config, runtime, batches),
    }
    for measure in sides.values():
        measure(options.warmup)
    blocks: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.blocks):
        for name, measure in sides.items():
            blocks[name].append(options.steps * config.train.batch_size / measure(options.steps))
    ratios = [ours / stock for ours, stock in zip(blocks["ours"], blocks["stock"], strict=True)]
    return {
        "ours": statistics.median(blocks["ours"]),
        "stock": statistics.median(blocks["stock"]),
        "ratio": statistics.median(ratios),
        "ours_blocks": blocks["ours"],
        "stock_blocks": blocks["stock"],
        "ours_precision": runtime.precision,
        "stock_precision": "tf32" if runtime.precision == "tf32" else "fp32",
        "processes": runtime.world_size,
        "batch_per_process": config.train.batch_size // runtime.world_size,
        "device": runtime.device.type,
        "blocks": options.blocks,
        "steps": options.steps,
    }


def _ours(config: TrainConfig, runtime: Runtime, batches: list[Batch]) -> Callable[[int], float]:
    job = build_job(config, runtime)
    job.dmp.train()
    pipeline = Pipeline(job)
    return _timed(pipeline.progress, itertools.cycle(batches), runtime)


def _stock(config: TrainConfig, runtime: Runtime, batches: list[Batch]) -> Callable[[int], float]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    job = build_stock(config, runtime)
    job.dmp.train()
    pipeline: Any = TrainPipelineSparseDist(job.dmp, job.optimizers.combined, runtime.device, execute_all_batches=True)
    return _timed(pipeline.progress, itertools.cycle([stock_batch(batch) for batch in batches]), runtime)


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
