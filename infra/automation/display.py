"""Shows progress: a live list on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from infra.automation.progress import Progress

#: A terminal lists this many of the resources in progress and counts the others.
_MAX_LISTED = 12
#: Without a terminal, the interval of the lines that report progress.
_REPORT_SECONDS = 20.0


class Display:
    """Shows one operation: `with display.show(title, progress): ...`; lines stay above the live list."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self._console = Console(file=self.stream, highlight=False, soft_wrap=True)

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        if self._console.is_terminal:
            self._console.print(Text(text, style=_style(text)))
        else:
            self.stream.write(text + "\n")
            self.stream.flush()

    def show(self, title: str, progress: Progress) -> _Terminal | _Plain:
        """Return a context manager that shows the resources in progress."""
        return _Terminal(self._console, title, progress) if self._console.is_terminal else _Plain(self, title, progress)


class Silent(Display):
    """Shows nothing, for scripts that need only the results."""

    def print_line(self, text: str) -> None:
        """Drop the line."""

    def show(self, title: str, progress: Progress) -> _Terminal | _Plain:
        """Return a context manager that shows nothing, because `print_line` drops its lines."""
        return _Plain(self, title, progress)


class _Terminal:
    """A live list of the resources in progress with the seconds of each, redrawn four times a second."""

    def __init__(self, console: Console, title: str, progress: Progress) -> None:
        self._title, self._progress, self._start = title, progress, time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        now = time.monotonic()
        running = sorted(self._progress.running.copy().values(), key=lambda item: item[1])
        rows = [Text(f"  {step}  {now - since:.0f} s", style="dim") for step, since in running[:_MAX_LISTED]]
        more = len(running) - _MAX_LISTED
        rows += [Text(f"  and {more} more", style="dim")] if more > 0 else []
        return Group(Spinner("dots", f"{self._title}: {_summary(self._progress, now - self._start)}"), *rows)


class _Plain:
    """A line at regular intervals, so that a log shows which resources take long."""

    def __init__(self, display: Display, title: str, progress: Progress) -> None:
        self._display, self._title, self._progress = display, title, progress
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> None:
        self._display.print_line(f"{self._title} ...")
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._finished.set()
        self._thread.join()

    def _report(self) -> None:
        start = time.monotonic()
        while not self._finished.wait(_REPORT_SECONDS):
            names = ", ".join(step.name for step, _ in self._progress.running.copy().values())
            text = f"... {_summary(self._progress, time.monotonic() - start)}"
            self._display.print_line(f"{text}; now: {names}" if names else text)


def _summary(progress: Progress, seconds: float) -> str:
    return f"{len(progress.steps)} {'planned' if progress.planning else 'done'}, {seconds:.0f} s"


def _style(text: str) -> str:
    if text.startswith(("FAILED", "error")):
        return "bold red"
    if text.startswith("warning"):
        return "yellow"
    return "red" if text.startswith(("delete", "discarded")) else ""
