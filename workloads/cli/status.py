"""`status` and `metrics`: the state of a run and its newest metrics."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from trainer.exit_codes import EXIT_FAILED, EXIT_OK
from workloads.cli.options import open_run
from workloads.cli.render import format_progress, render_snapshot
from workloads.cli.watch import T, View
from workloads.runs.metrics import newest_metrics
from workloads.runs.pods import newest_pods
from workloads.runs.run import Run
from workloads.runs.snapshot import take_snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType


def status_command(arguments: argparse.Namespace) -> int:
    """Show the state of a run; return 1 if it failed or does not exist."""
    run = open_run(arguments)
    view = View(lambda: take_snapshot(run), render_snapshot, dataclasses.asdict, lambda snapshot: snapshot.is_final)
    return EXIT_FAILED if _show(view, arguments).state in ("failed", "absent") else EXIT_OK


def metrics_command(arguments: argparse.Namespace) -> int:
    """Show the newest metrics of a run; return 1 if it has none yet."""
    run = open_run(arguments)
    view = View(lambda: _read_metrics(run), _render_metrics, dict, lambda metrics: bool(metrics.get("state")))
    return EXIT_OK if _show(view, arguments) else EXIT_FAILED


def _show(view: View[T], arguments: argparse.Namespace) -> T:
    """Show a view once or, with `--watch`, until it is final."""
    if arguments.watch:
        return view.watch(as_json=arguments.json, every_seconds=arguments.every)
    return view.show_once(as_json=arguments.json)


def _read_metrics(run: Run) -> dict[str, Any]:
    """Return the newest metrics of a run."""
    _, job = run.get_job()
    return newest_metrics(run.api, run.namespace, newest_pods(run.list_pods(), str(job["metadata"]["name"])))


def _render_metrics(metrics: dict[str, Any]) -> RenderableType:
    """Return the metrics as text."""
    if not metrics:
        return "no metrics yet; `python -m workloads status` shows the state of the pods"
    saved = [f"last checkpoint {metrics[key]}" for key in ("checkpoint", "checkpoint_time") if metrics.get(key)]
    return "\n".join([format_progress(metrics), *saved, f"from {metrics['source']}"])
