"""The `bench` command: starts the processes for a measurement, and prints a table and a JSON object as last line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer.bench.options import BenchOptions, read_options
from trainer.bench.parent_watch import exit_with_bench
from trainer.config.options import load_config
from trainer.errors import UserError
from trainer.exit_codes import EXIT_FAILED, EXIT_OK
from trainer.launch.launcher import process_count


def bench_main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run the command: in one process per GPU, or two on CPU; under torchrun in the existing processes."""
    options, nproc, rest = read_options(arguments)
    if options.side:
        exit_with_bench()
    process_count(nproc)  # a wrong value is reported once, not by each variant
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs that there is no GPU
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    if (options.data or options.preprocess) and not options.side:
        _alone(options, nproc, rest, environ)
        return EXIT_OK
    if "WORLD_SIZE" in environ or options.side:
        return _in_job(options, rest, environ)
    if not (options.checkpoints or options.profile or options.quality) and _on_cpu(rest, environ):
        from trainer.bench.measures.variants import OURS_AND_STOCK, compare_variants
        from trainer.bench.tables import show_steps

        show_steps(compare_variants(options, nproc, rest, OURS_AND_STOCK))
        return EXIT_OK
    from trainer.launch.launcher import launch

    # Without --nproc: the launcher would read it as the start of its own options.
    return launch(["--nproc", nproc, "bench", *options.arguments(), *rest])


def _on_cpu(rest: list[str], environ: Mapping[str, str]) -> bool:
    """Return whether steps run on CPU, where each variant has its own processes (`measures.variants`)."""
    import torch

    return load_config(rest, environ).train.device == "cpu" or not torch.cuda.is_available()


def _alone(options: BenchOptions, nproc: str, rest: list[str], environ: Mapping[str, str]) -> None:
    """Measure outside a job; preprocessing does not use the configuration, but reports mistakes in it."""
    from trainer.bench import tables

    config = load_config(rest, environ)
    if options.preprocess:
        from trainer.bench.measures.preprocess import bench_preprocess

        tables.show_preprocess(bench_preprocess())
        return
    from trainer.bench.measures.sources import bench_sources, reading_variants, sample_files
    from trainer.bench.measures.variants import compare_variants

    with sample_files(config) as files:
        sources = bench_sources(config, files)
        step = compare_variants(options, nproc, rest, reading_variants(config, files))
        tables.show_sources(sources | {"step": step})


def _in_job(options: BenchOptions, rest: list[str], environ: Mapping[str, str]) -> int:
    config = load_config(rest, environ)
    from trainer.bench import tables
    from trainer.runtime.process_group import init_runtime

    with init_runtime(config.train, dict(os.environ)) as runtime:
        config = config.for_processes(runtime.world_size)
        try:
            config.check_world_size(runtime.world_size)
        except ValueError as error:
            raise UserError(str(error)) from None
        if options.side:
            from trainer.bench.measures.variants import serve_variant

            serve_variant(config, runtime, options)
            return EXIT_OK
        measure, show = _measurement(options, tables)
        result = measure(config, runtime, options)
        if runtime.is_main:
            show(result)
    return EXIT_OK if result.get("kept", True) else EXIT_FAILED


def _measurement(options: BenchOptions, tables: Any) -> tuple[Any, Any]:
    if options.checkpoints:
        from trainer.bench.measures.checkpoints import bench_checkpoints

        return bench_checkpoints, tables.show_checkpoints
    if options.profile:
        from trainer.bench.measures.profile import bench_profile

        return bench_profile, tables.show_profile
    if options.quality:
        from trainer.bench.measures.quality import bench_quality

        return bench_quality, tables.show_quality
    from trainer.bench.measures.steps import bench_steps

    return bench_steps, tables.show_steps
