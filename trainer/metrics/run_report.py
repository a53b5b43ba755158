"""The report command: a run's loss, speed, saves and restarts over time, as PNG and as one HTML file."""

from __future__ import annotations

import argparse
import html
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and line style of each kind of mark.
_MARKS = {
    "killed": ("tab:red", "-"),
    "preempted": ("tab:orange", "-"),
    "resumed": ("tab:green", "--"),
    "saved": ("tab:blue", ":"),
    "save failed": ("tab:purple", "-."),
}


@dataclass(frozen=True)
class Mark:
    """An incident of a run, `seconds` after its first event."""

    kind: str
    seconds: float
    step: int
    text: str


@dataclass(frozen=True)
class History:
    """The history of a run, read from its metrics.jsonl; times are in seconds after the first event."""

    name: str
    began: float
    points: list[dict[str, Any]]  # seconds, step, loss, samples_per_second, start (number of the start)
    marks: list[Mark]

    def count(self, kind: str) -> int:
        """Return the number of marks of a kind."""
        return sum(mark.kind == kind for mark in self.marks)


def report_main(arguments: Sequence[str]) -> int:
    """Run `report RUN [--out FOLDER]`; RUN is the folder with the run's metrics.jsonl, or that file."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer report", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    try:
        options, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UserError(f"report: {error}") from None
    if unknown:
        raise UserError(f"report: unknown argument: got {unknown[0]}; allowed: report RUN [--out FOLDER]")
    if options.run is None:
        raise UserError("report: RUN is missing. Fix: give the folder of a run's logs, for example runs/default")
    file = options.run / "metrics.jsonl" if options.run.is_dir() else options.run
    history = read_history(file)
    folder: Path = options.out or file.parent
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(history)
    figure.savefig(folder / "report.png", dpi=120)
    (folder / "report.html").write_text(page(history, figure), encoding="utf-8")
    sys.stdout.write(f"{summary(history)}\nwrote {folder / 'report.png'} and {folder / 'report.html'}\n")
    return EXIT_OK


def read_history(file: Path) -> History:
    """Read a run's events, without a line cut off by a kill; raise UserError for a file without train events."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"report: {file} cannot be read ({error}). Fix: give a run's log folder, written with --metrics.jsonl true"
        ) from None
    events = [event for event in map(_event, text.splitlines()) if event is not None]
    trained = [event for event in events if event["event"] == "train"]
    if not trained:
        raise UserError(f"report: {file} holds no train event. Fix: train for at least --metrics.log-every steps first")
    began = float(events[0]["time"])
    starts = 0
    points = []
    for event in events:
        starts += event["event"] == "start"
        if event["event"] == "train":
            kept = {key: event[key] for key in ("step", "loss", "samples_per_second")}
            points.append({"seconds": event["time"] - began, "start": starts, **kept})
    name = next((str(e["run"]) for e in events if e["event"] == "start"), file.parent.name)
    return History(name, began, points, _marks(events, began))


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "time" in event else None


def _marks(events: Sequence[Mapping[str, Any]], began: float) -> list[Mark]:
    """Return the marks; a start after neither a result nor a preemption means that the start before it was killed."""
    marks: list[Mark] = []
    alive: Mapping[str, Any] | None = None  # the newest event of a start that has not ended
    step = 0
    for event in events:
        kind, seconds = event["event"], float(event["time"]) - began
        if kind == "start" and alive is not None:
            marks.append(Mark("killed", float(alive["time"]) - began, step, f"last event after step {step}"))
        step = int(event.get("step", step))
        if kind == "checkpoint":
            marks.append(Mark("saved", seconds, step, str(event["path"])))
        elif kind == "checkpoint_failed":
            marks.append(Mark("save failed", seconds, step, str(event["error"])))
        elif kind == "resume":
            marks.append(Mark("resumed", seconds, step, f"at sample {event['position']:,}"))
        elif kind == "preempted":
            marks.append(Mark("preempted", seconds, step, str(event["because"])))
        alive = None if kind in ("result", "preempted") else event
    return marks


def summary(history: History) -> str:
    """Return the run and the number of its marks in one line."""
    last = history.points[-1]
    happened = ", ".join(f"{history.count(kind)} {kind}" for kind in _MARKS)
    return f"run {history.name}: step {last['step']:,} after {last['seconds']:,.0f} s; {happened}"


def draw(history: History) -> Figure:
    """Draw loss above and samples per second below, over seconds, with a line for each mark."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    figure.suptitle(summary(history))
    loss, rate = figure.subplots(2, 1, sharex=True)
    _plot(loss, history, "loss", "loss of training")
    _plot(rate, history, "samples_per_second", "samples/s of the whole job")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("seconds since the first start")
    for axes in (loss, rate):
        named: set[str] = set()
        for mark in history.marks:
            colour, style = _MARKS[mark.kind]
            label = None if mark.kind in named else mark.kind
            axes.axvline(mark.seconds, color=colour, linestyle=style, linewidth=1, alpha=0.7, label=label)
            named.add(mark.kind)
    if history.marks:
        loss.legend(loc="upper right")
    return figure


def _plot(axes: Axes, history: History, key: str, label: str) -> None:
    """Plot one line per start of the job, because there is no training between two starts."""
    for start in sorted({point["start"] for point in history.points}):
        mine = [p for p in history.points if p["start"] == start and p[key] is not None]
        axes.plot([p["seconds"] for p in mine], [p[key] for p in mine], color="black", linewidth=1.2)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def page(history: History, figure: Figure) -> str:
    """Return one self-contained HTML page with the picture and a table of the marks."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    rows = "\n".join(
        f"<tr><td>{_format_time(history.began + m.seconds)}</td><td>{m.seconds:,.1f}</td><td>{m.kind}</td>"
        f"<td>{m.step:,}</td><td>{html.escape(m.text)}</td></tr>"
        for m in history.marks
    )
    title = html.escape(summary(history))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} svg {{ max-width: 100%; height: auto }}
td, th {{ padding: 0.2em 0.8em; text-align: left; border-bottom: 1px solid #ddd }}</style></head>
<body><h1>{title}</h1>
{svg}
<table><tr><th>time (UTC)</th><th>seconds</th><th>event</th><th>step</th><th>details</th></tr>
{rows}
</table></body></html>
"""


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")
