"""A snapshot as text: a line on the run, a table of its pods, and the reasons why they wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workloads.runs.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"running": "green", "succeeded": "green", "failed": "red", "absent": "red"}
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def render_snapshot(snapshot: Snapshot) -> RenderableType:
    """Return a snapshot for a terminal or a file."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(snapshot), style=_COLOURS.get(snapshot.state, "yellow"))]
    if snapshot.why:
        parts.append(Text(f"  {snapshot.why}"))
    if snapshot.pods:
        table = Table(box=None, pad_edge=False)
        for column in ("POD", "INDEX", "NODE", "PHASE", "READY", "RESTARTS", "AGE", "WHY"):
            table.add_column(column, no_wrap=column in ("POD", "PHASE"), overflow="fold")
        for pod in snapshot.pods:
            ready, index = "yes" if pod.ready else "no", "-" if pod.index is None else str(pod.index)
            row = (pod.name, index, pod.node or "-", pod.phase, ready, str(pod.restarts), format_age(pod.age_seconds))
            table.add_row(*(Text(cell) for cell in (*row, pod.why or "-")))
        parts.append(table)
    parts += [
        Text(f"{item.component}: {item.state}" + (f" ({item.why})" if item.why else "")) for item in snapshot.companions
    ]
    if snapshot.metrics:
        parts.append(Text(f"training: {format_progress(snapshot.metrics)}"))
    saved = snapshot.metrics.get("checkpoint") or snapshot.checkpoints
    if saved:
        when = snapshot.metrics.get("checkpoint_time")
        parts.append(Text(f"checkpoints: {saved}" + (f", last saved {when}" if when else "")))
    return Group(*parts)


def headline(snapshot: Snapshot) -> str:
    """Return the state of a run in one line."""
    job = f", {snapshot.kind} {snapshot.name}" if snapshot.name else ""
    age = f", {format_age(snapshot.age_seconds)} old" if snapshot.age_seconds is not None else ""
    ready = sum(pod.ready for pod in snapshot.pods)
    pods = f", {ready}/{snapshot.pods_wanted} pods ready" if snapshot.pods_wanted else ""
    return f"run {snapshot.run} in {snapshot.namespace}: {snapshot.state}{job}{age}{pods}"


def format_progress(metrics: Mapping[str, Any]) -> str:
    """Return the available metrics in one line."""
    total = f"/{metrics['total_steps']:,}" if metrics.get("total_steps") else ""
    formats = [
        ("step", "{:,}" + total),
        ("samples_per_second", "{:,.0f} samples/s"),
        ("loss", "loss {:.4f}"),
        ("ne", "NE {:.4f}"),
        ("auc", "AUC {:.4f}"),
        ("eval_auc", "held-out AUC {:.4f}"),
        ("memory_gib", "{:.1f} GiB"),
    ]
    parts = [form.format(metrics[key]) for key, form in formats if metrics.get(key) is not None]
    if metrics.get("step") is not None:
        parts[0] = f"step {parts[0]}"
    return ", ".join(parts)


def format_age(seconds: int | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return "-"
    if seconds < _MINUTE:
        return f"{seconds}s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE}m{seconds % _MINUTE:02}s"
    if seconds < _DAY:
        return f"{seconds // _HOUR}h{seconds % _HOUR // _MINUTE:02}m"
    return f"{seconds // _DAY}d{seconds % _DAY // _HOUR:02}h"
