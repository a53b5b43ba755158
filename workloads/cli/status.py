"""`status` and `metrics`: how a run is, and its newest numbers."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from infra.kube_api import api_path
from workloads.cli import metrics, snapshot
from workloads.cli.errors import EXIT_FAILED, EXIT_OK
from workloads.cli.show import progress, rendered
from workloads.cli.target import Target, open_target
from workloads.cli.watch import Seen, View

if TYPE_CHECKING:
    from rich.console import RenderableType


def status_command(arguments: argparse.Namespace) -> int:
    """0 while the run is well or has succeeded, 1 where it failed or is not there."""
    target = open_target(arguments)
    view = View(lambda: snapshot.take(target), rendered, dataclasses.asdict, lambda shot: shot.ended)
    return EXIT_FAILED if _look(view, arguments).state in ("failed", "absent") else EXIT_OK


def metrics_command(arguments: argparse.Namespace) -> int:
    """0 where the run has numbers, 1 where it has none yet."""
    target = open_target(arguments)
    view = View(lambda: _numbers(target), _lines, dict, lambda numbers: bool(numbers.get("state")))
    return EXIT_OK if _look(view, arguments) else EXIT_FAILED


def _look(view: View[Seen], arguments: argparse.Namespace) -> Seen:
    if arguments.watch:
        return view.watch(as_json=arguments.json, every_seconds=arguments.every)
    return view.once(as_json=arguments.json)


def _numbers(target: Target) -> dict[str, Any]:
    _, job = target.found_job()
    pods = target.api.items(api_path(target.namespace, "Pod"), labelSelector=target.selector)
    own = snapshot.newest_of_each(snapshot.of_job(pods, str(job["metadata"]["name"])))
    return metrics.newest(target.api, target.namespace, [pod for pod, _ in own])


def _lines(numbers: dict[str, Any]) -> RenderableType:
    if not numbers:
        return "no numbers yet; `python -m workloads status` says how the pods are"
    saved = [f"last checkpoint {numbers[key]}" for key in ("checkpoint", "checkpoint_time") if numbers.get(key)]
    return "\n".join([progress(numbers), *saved, f"from {numbers['source']}"])
