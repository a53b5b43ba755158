"""Profile steps: a Chrome trace of rank 0, and its ten heaviest operators."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from trainer.bench.measures.steps import cached_batches
from trainer.bench.progress import progress
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.runtime.process_group import Runtime
from trainer.sharding.sharded_model import build_sharded_model
from trainer.storage.atomic_write import atomic_replace
from trainer.training.pipeline import Pipeline

if TYPE_CHECKING:
    from trainer.bench.options import BenchOptions

_HEAVIEST = 10


def bench_profile(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> dict[str, Any]:
    """Profile `options.steps` steps after the warm-up and write the trace to `options.trace` (collective).

    Raise UserError if that file cannot be written.
    """
    trace = Path(options.trace)
    _check_trace_path(trace, runtime)
    model = build_sharded_model(config, runtime)
    model.dmp.train()
    # A finite stream: a collective of a prefetched batch that is still running when the profiler stops crashes.
    pipeline, stream = Pipeline(model), islice(cached_batches(config, runtime), options.warmup + options.steps)
    for _ in range(options.warmup):
        pipeline.progress(stream)
    dist.barrier()
    on_device = runtime.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with (
        progress("profiling", options.steps, "steps", runtime.is_main) as advance,
        profile(activities=kinds) as profiler,
    ):
        for _ in range(options.steps):
            pipeline.progress(stream)
            advance()
        dist.barrier()
        if on_device:
            torch.cuda.synchronize(runtime.device)
    if runtime.is_main:
        with atomic_replace(trace) as part:
            profiler.export_chrome_trace(str(part))
    dist.barrier()
    return {
        "operators": _heaviest(profiler, options.steps, on_device),
        "trace": str(trace),
        "steps": options.steps,
        "processes": runtime.world_size,
        "batch_per_process": config.train.batch_size // runtime.world_size,
        "device": runtime.device.type,
    }


def _check_trace_path(trace: Path, runtime: Runtime) -> None:
    """Raise UserError on every process if rank 0 could not write the trace at the end."""
    if not trace.parent.is_dir() or trace.is_dir():
        error = UserError(f"bench: --trace cannot be written: got {trace}; allowed: a file in an existing folder")
        error.reported = not runtime.is_main
        raise error


def _heaviest(profiler: Any, steps: int, on_device: bool) -> list[dict[str, Any]]:
    """Return operators by their own time, without their callees and the pipeline's annotations (`## ... ##`)."""

    def own_time(row: Any) -> float:  # microseconds
        return float(row.self_device_time_total if on_device else row.self_cpu_time_total)

    rows = [row for row in profiler.key_averages() if not row.is_user_annotation and own_time(row) > 0]
    total = sum(own_time(row) for row in rows)
    return [
        {
            "name": row.key,
            "ms_per_step": own_time(row) / 1e3 / steps,
            "share": own_time(row) / total,
            "calls_per_step": row.count / steps,
        }
        for row in sorted(rows, key=own_time, reverse=True)[:_HEAVIEST]
    ]
