"""Events on a terminal: a progress bar, and tables of the sharding plan and the result."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from trainer.metrics.json_lines import JsonLines
from trainer.metrics.sink import Sink
from trainer.sharding.planner import PlannedTable

_MIB = 1024**2


def open_console(kind: str, total_steps: int) -> Sink:
    """Return the console sink for metrics.progress; `auto` means a bar on a terminal and JSON lines elsewhere."""
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "lines"
    if kind == "none":
        return ResultOnly()
    return ProgressBar(total_steps) if kind == "bar" else JsonLines(None)


class ProgressBar(Sink):
    """A progress bar, other events as lines above it, and tables of the plan and the result."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._total = total_steps
        self._task: TaskID | None = None

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Print the event, or update the bar for a train event."""
        if name == "plan":
            self._console.print(plan_table(fields["tables"]))
        elif name == "result":
            self._bar.stop()
            self._console.print(result_table(fields))
        elif name == "train":
            self._update_info(fields)
        else:
            text = "  ".join(f"{key} {_format(value)}" for key, value in fields.items())
            self._console.print(f"[bold]{name}[/bold]  {text}", soft_wrap=True)

    def close(self) -> None:
        """Stop drawing the bar."""
        self._bar.stop()

    def set_step(self, step: int) -> None:
        """Move the bar to `step`."""
        self._bar.update(self._get_task(), completed=step)

    def _update_info(self, fields: dict[str, Any]) -> None:
        info = f"loss {fields['loss']:.4f}" + (f"  auc {fields['auc']:.4f}" if "auc" in fields else "")
        self._bar.update(self._get_task(), info=f"{info}  {fields['samples_per_second']:,.0f} samples/s")

    def _get_task(self) -> TaskID:
        """Return the bar's task, and start the bar on the first call."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._total, info="")
        return self._task


class ResultOnly(Sink):
    """Prints the result table and nothing else."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Print the table of a result event."""
        if name == "result":
            Console().print(result_table(fields))


def plan_table(tables: list[PlannedTable]) -> Table:
    """Return the sharding plan as a table, with the bytes of fp32 weights per rank."""
    table = Table(title="Sharding plan")
    for column in ("table", "rows x columns", "sharding", "kernel", "ranks"):
        table.add_column(column)
    totals: dict[int, int] = {}
    for planned in tables:
        ranks = ", ".join(map(str, planned.ranks)) if len(planned.ranks) <= 8 else f"{len(planned.ranks)} ranks"
        table.add_row(planned.table, f"{planned.rows:,} x {planned.dim}", planned.sharding, planned.kernel, ranks)
        for rank, size in planned.bytes_per_rank.items():
            totals[rank] = totals.get(rank, 0) + size
    table.caption = "weights per rank: " + ", ".join(
        f"{rank}: {size / _MIB:,.1f} MiB" for rank, size in sorted(totals.items())
    )
    return table


def result_table(fields: dict[str, Any]) -> Table:
    """Return the result of a run as a table."""
    table = Table(title=f"Run {fields['run']}", show_header=False)
    rows = [
        ("state", fields["state"]),
        ("loss (held out)", _format(fields.get("loss"))),
        ("NE", _format(fields.get("ne"))),
        ("AUC", _format(fields.get("auc"))),
        ("best possible AUC of this data", _format(fields.get("best_auc"))),
        ("calibration", _format(fields.get("calibration"))),
        ("samples/s of the whole job", _format(fields.get("samples_per_second"))),
        ("steps", f"{fields['step']:,}"),
        ("samples", f"{fields['position']:,}"),
        ("peak memory of rank 0 (GiB)", _format(fields.get("memory_gib"))),
        ("processes", str(fields["world_size"])),
        ("checkpoint", str(fields.get("checkpoint"))),
        ("logs", str(fields.get("logs"))),
    ]
    for name, value in rows:
        table.add_row(name, value, style="bold" if name == "AUC" else None)
    return table


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4f}"
    return str(value)
