"""Print the results of the benches: a readable table, then one JSON object as the last line for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def show_steps(result: dict[str, Any]) -> None:
    """Show both steps, and the choices that `auto` options resolved to in ours."""
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
    if result.get("ours_fast"):
        table.caption += "; ours: " + ", ".join(f"{key} {value}" for key, value in result["ours_fast"].items())
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def show_checkpoints(result: dict[str, Any]) -> None:
    """Show training with and without saves."""
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
    if result["save_share"] is not None:
        table.caption += f"; it adds {result['save_share']:.1%} to the time of a block, measured by the steps around it"
    upload = result["upload"]
    if upload:
        table.caption += (
            f"; {upload['bytes'] / 1e6:,.0f} MB are uploaded at {upload['checkpoint_mb_per_s']:,.0f} MB/s, "
            f"{upload['ratio']:.2f} of one file's {upload['one_file_mb_per_s']:,.0f} MB/s"
        )
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def show_sources(result: dict[str, Any]) -> None:
    """Show one rate per source, and the step with and without reading the configured source."""
    table = Table(title="Sources, read by one thread from the page cache")
    table.add_column("source")
    table.add_column("samples/s", justify="right")
    table.add_column("share of Arrow's read rate", justify="right")
    for name, rate in result["sources"].items():
        share = result["of_arrow"].get(name)
        table.add_row(name, f"{rate:,.0f}", "" if share is None else f"{share:.0%}")
    step = result["step"]
    table.add_section()
    for variant in step["ratios"]:
        name = variant.removeprefix("reading-")
        table.add_row(f"step of {step['processes']} processes that read {name}", f"{step[variant]:,.0f}")
    table.add_row("the same with batches in memory", f"{step['cached']:,.0f}")
    ratios = ", ".join(f"{name.removeprefix('reading-')} {ratio:.3f}" for name, ratio in step["ratios"].items())
    table.caption = f"ratio reading / in memory, median of block pairs: {ratios}"
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def show_preprocess(result: dict[str, Any]) -> None:
    """Show both conversions."""
    table = Table(title="Preprocessing Criteo text, raw ids to npy, in interleaved blocks")
    table.add_column("command")
    table.add_column("rows/s (median)", justify="right")
    names = {"ours": "trainer preprocess", "stock": "torchrec tsv_to_npys"}
    for name, rate in result["preprocess"].items():
        table.add_row(names[name], f"{rate:,.0f}")
    table.caption = f"ratio ours / stock, median of block pairs: {result['ratio']:.1f}"
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def show_profile(result: dict[str, Any]) -> None:
    """Show the ten heaviest operators by their own time."""
    device = result["device"].upper()
    table = Table(title=f"The heaviest operators of {result['steps']} steps on rank 0, by their own time")
    for column in ("operator", f"{device} ms per step", "share", "calls per step"):
        table.add_column(column, justify="left" if column == "operator" else "right", overflow="fold")
    for row in result["operators"]:
        table.add_row(row["name"], f"{row['ms_per_step']:.2f}", f"{row['share']:.1%}", f"{row['calls_per_step']:.1f}")
    table.caption = f"Chrome trace: {result['trace']} (open in chrome://tracing or https://ui.perfetto.dev)"
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")


def show_quality(result: dict[str, Any]) -> None:
    """Show the AUC of each mode per seed, and whether it is close enough to stock."""
    table = Table(
        title=f"AUC after {result['samples']:,} samples, {result['processes']} processes, {result['device']}; "
        f"best achievable: {result['best_auc']:.4f}"
    )
    table.add_column("mode")
    for seed in range(result["seeds"]):
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean", justify="right")
    table.add_column("against stock", justify="right")
    for mode in result["modes"]:
        aucs = [f"{auc:.4f}" for auc in mode["auc"]]
        table.add_row(mode["name"], *aucs, f"{mode['mean']:.4f}", f"{mode['against_stock']:+.4f}")
    verdict = "all modes are" if result["kept"] else "NOT all modes are"
    table.caption = f"{verdict} at most {result['bound']} below fp32 stock"
    Console().print(table)
    sys.stdout.write(json.dumps(result) + "\n")
