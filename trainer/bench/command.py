"""The bench command: its options, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.errors import UserError
from trainer.options import load_config

_STEPS, _STEPS_PER_SAVE = 20, 100


@dataclass(frozen=True)
class BenchOptions:
    """How long to measure."""

    blocks: int
    steps: int
    warmup: int
    data: bool
    checkpoints: bool
    preprocess: bool


def bench_main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """`bench`: alone it starts one process per GPU, or two on CPU; under torchrun it measures in the given
    processes."""
    options, nproc, rest = _parse(arguments)
    from trainer.quiet import quiet_libraries

    quiet_libraries()
    if options.data:
        from trainer.bench.sources import bench_sources

        _show_sources(bench_sources(load_config(rest, environ)))
        return 0
    if options.preprocess:
        load_config(rest, environ)  # it reads none of them, but a wrong one is told
        from trainer.bench.preprocess import bench_preprocess

        _show_preprocess(bench_preprocess())
        return 0
    if "WORLD_SIZE" not in environ:
        from trainer.launch import launch

        # Without --nproc: the launcher would take it for a beginning of its own options.
        measured = [f"--blocks={options.blocks}", f"--steps={options.steps}", f"--warmup={options.warmup}"]
        measured += ["--checkpoints"] if options.checkpoints else []
        return launch(["--nproc", nproc, "bench", *measured, *rest])
    config = load_config(rest, environ)
    from trainer.bench.saves import bench_saves
    from trainer.bench.steps import bench_steps
    from trainer.runtime import running

    measure, show = (bench_saves, _show_saves) if options.checkpoints else (bench_steps, _show_steps)
    with running(config.train, dict(os.environ)) as runtime:
        result = measure(config.for_processes(runtime.world_size), runtime, options)
        if runtime.is_main:
            show(result)
    return 0


def _parse(arguments: list[str]) -> tuple[BenchOptions, str, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m trainer bench", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--nproc", default="auto")
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--preprocess", action="store_true")
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"bench: {error}; see `python -m trainer bench --help`") from None
    if found.steps is None:
        found.steps = _STEPS_PER_SAVE if found.checkpoints else _STEPS
    if min(found.blocks, found.steps, found.warmup) < 1:
        raise UserError(
            f"bench: --blocks is {found.blocks}, --steps {found.steps}, --warmup {found.warmup}; legal: 1 or more"
        )
    options = BenchOptions(found.blocks, found.steps, found.warmup, found.data, found.checkpoints, found.preprocess)
    return options, found.nproc, rest


def _show_steps(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['processes']} processes x {result['batch_per_process']} samples, {result['device']}, "
        f"{result['blocks']} interleaved blocks of {result['steps']} steps"
    )
    for column in ("step", "samples/s (median)", "min", "max"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name in ("ours", "stock"):
        rates = result[f"{name}_blocks"]
        table.add_row(
            f"{name} ({result[f'{name}_precision']})", *(f"{r:,.0f}" for r in (result[name], min(rates), max(rates)))
        )
    table.caption = f"ratio ours / stock, median of block pairs: {result['ratio']:.2f}"
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def _show_saves(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['processes']} processes, {result['device']}, a save every {result['steps_per_save']} steps"
    )
    for column in ("training", "samples/s (median)", "min", "max"):
        table.add_column(column, justify="left" if column == "training" else "right")
    for name in ("with", "without"):
        rates = result[f"{name}_blocks"]
        table.add_row(f"{name} checkpoints", *(f"{r:,.0f}" for r in (result[name], min(rates), max(rates))))
    table.caption = (
        f"ratio with / without, median of block pairs: {result['ratio']:.3f}; a save blocks training for "
        f"{result['blocked_seconds']:.3f} s, {result['blocked_share']:.0%} of a synchronous one's "
        f"{result['synchronous_seconds']:.2f} s"
    )
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def _show_sources(result: dict[str, Any]) -> None:
    table = Table(title="Sources, read warm by one thread")
    table.add_column("source")
    table.add_column("samples/s", justify="right")
    for name, rate in result["sources"].items():
        table.add_row(name, f"{rate:,.0f}")
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def _show_preprocess(result: dict[str, Any]) -> None:
    table = Table(title="Preprocessing Criteo text, raw ids to npy, in interleaved blocks")
    table.add_column("command")
    table.add_column("rows/s (median)", justify="right")
    names = {"ours": "trainer preprocess", "stock": "torchrec tsv_to_npys"}
    for name, rate in result["preprocess"].items():
        table.add_row(names[name], f"{rate:,.0f}")
    table.caption = f"ratio ours / stock, median of block pairs: {result['ratio']:.1f}"
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")
