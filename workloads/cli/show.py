"""A snapshot as text: one line about the run, a table of its pods, and what stands in the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workloads.cli.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"running": "green", "succeeded": "green", "failed": "red", "absent": "red"}
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def rendered(shot: Snapshot) -> RenderableType:
    """The whole picture for a terminal or a file."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(shot), style=_COLOURS.get(shot.state, "yellow"))]
    if shot.why:
        parts.append(Text(f"  {shot.why}"))
    if shot.pods:
        table = Table(box=None, pad_edge=False)
        for column in ("POD", "INDEX", "NODE", "PHASE", "READY", "RESTARTS", "AGE", "WHY"):
            table.add_column(column, no_wrap=column in ("POD", "PHASE"), overflow="fold")
        for pod in shot.pods:
            ready, index = "yes" if pod.ready else "no", "-" if pod.index is None else str(pod.index)
            row = (pod.name, index, pod.node or "-", pod.phase, ready, str(pod.restarts), age(pod.age_seconds))
            table.add_row(*(Text(cell) for cell in (*row, pod.why or "-")))
        parts.append(table)
    parts += [
        Text(f"{item.component}: {item.state}" + (f" ({item.why})" if item.why else "")) for item in shot.companions
    ]
    if shot.metrics:
        parts.append(Text(f"training: {progress(shot.metrics)}"))
    saved = shot.metrics.get("checkpoint") or shot.checkpoints
    if saved:
        when = shot.metrics.get("checkpoint_time")
        parts.append(Text(f"checkpoints: {saved}" + (f", last saved {when}" if when else "")))
    return Group(*parts)


def headline(shot: Snapshot) -> str:
    """The run in one line."""
    job = f", {shot.kind} {shot.name}" if shot.name else ""
    old = f", {age(shot.age_seconds)} old" if shot.age_seconds is not None else ""
    pods = f", {sum(pod.ready for pod in shot.pods)}/{shot.pods_wanted} pods ready" if shot.pods_wanted else ""
    return f"run {shot.run} in {shot.namespace}: {shot.state}{job}{old}{pods}"


def progress(numbers: Mapping[str, Any]) -> str:
    """The newest numbers in one line, those that there are."""
    total = f"/{numbers['total_steps']:,}" if numbers.get("total_steps") else ""
    shown = [
        ("step", "{:,}" + total),
        ("samples_per_second", "{:,.0f} samples/s"),
        ("loss", "loss {:.4f}"),
        ("ne", "NE {:.4f}"),
        ("auc", "AUC {:.4f}"),
        ("eval_auc", "held-out AUC {:.4f}"),
        ("memory_gib", "{:.1f} GiB"),
    ]
    words = [form.format(numbers[key]) for key, form in shown if numbers.get(key) is not None]
    if numbers.get("step") is not None:
        words[0] = f"step {words[0]}"
    return ", ".join(words)


def age(seconds: int | None) -> str:
    """A time that has passed, in the two largest units."""
    if seconds is None:
        return "-"
    if seconds < _MINUTE:
        return f"{seconds}s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE}m{seconds % _MINUTE:02}s"
    if seconds < _DAY:
        return f"{seconds // _HOUR}h{seconds % _HOUR // _MINUTE:02}m"
    return f"{seconds // _DAY}d{seconds % _DAY // _HOUR:02}h"
