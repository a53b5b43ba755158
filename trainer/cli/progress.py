"""Progress of the commands that move data: a bar on a terminal, a JSON line every few seconds elsewhere."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

Kind = Literal["auto", "bar", "lines", "none"]
KINDS: tuple[Kind, ...] = ("auto", "bar", "lines", "none")
_SECONDS_BETWEEN_LINES = 5.0


class JobProgress:
    """Progress of a job, for users or for programs. Every method is thread-safe."""

    def __init__(self, kind: Kind) -> None:
        if kind == "auto":
            kind = "bar" if sys.stdout.isatty() else "lines"
        self._kind = kind
        self._lock = threading.Lock()
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._bar: Any = None

    def event(self, name: str, text: str, **fields: Any) -> None:
        """Report an event: `text` for users, the fields for programs."""
        if self._kind == "lines":
            self._line(name, fields)
        elif self._kind == "bar":
            (self._bar.console.print if self._bar else print)(text)

    def result(self, text: str, **fields: Any) -> None:
        """Report the end of the job, also with `--progress none`."""
        if self._kind == "lines":
            self._line("result", fields)
        else:
            sys.stdout.write(text + "\n")

    @contextmanager
    def task(self, name: str, total: int | None, unit: str, **fields: Any) -> Iterator[Task]:
        """Start a part of the job that has `total` units, and end it with the block."""
        task = Task(self, name, total, unit, fields)
        if self._kind == "bar":
            self._bar = _rich_bar(unit)
            self._bar.start()
            task.bar_task = self._bar.add_task(name, total=total)
        try:
            yield task
        finally:
            if self._bar:
                self._bar.stop()
                self._bar = None

    def show(self, task: Task) -> None:
        """Show the progress of a task."""
        if self._bar:
            self._bar.update(task.bar_task, completed=task.done)
        elif self._kind == "lines":
            with self._lock:
                if time.monotonic() < self._next_line:
                    return
                self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._line("progress", task.fields())

    def _line(self, name: str, fields: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"event": name, "time": round(time.time(), 3)} | fields) + "\n")
        sys.stdout.flush()


class Task:
    """A part of a job, with the units done so far."""

    def __init__(self, progress: JobProgress, name: str, total: int | None, unit: str, more: dict[str, Any]) -> None:
        self._progress, self._name, self._total, self._unit, self._more = progress, name, total, unit, more
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.done = 0
        self.bar_task: Any = None

    def advance(self, count: int) -> None:
        """Add `count` units to those done."""
        with self._lock:
            self.done += count
        self._progress.show(self)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a progress event."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = round(self.done / seconds, 1)
        return {
            "task": self._name,
            "done": self.done,
            "total": self._total,
            "unit": self._unit,
            f"{self._unit}_per_second": rate,
        } | self._more


def _rich_bar(unit: str) -> Any:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    return Progress(TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn(), transient=True)
