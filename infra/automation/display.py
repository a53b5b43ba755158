"""Where progress is shown: a live list on a terminal, plain lines anywhere else."""

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

#: A terminal shows so many of the resources under way; the rest are counted.
_MOST_SHOWN = 12
#: Without a terminal, how often one line says that it goes on.
_BEAT_SECONDS = 20.0


class Display:
    """Shows one operation: `with display.following(progress): ...`; lines that last go above what moves."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self._console = Console(file=self.stream, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """One line that stays."""
        if self._console.is_terminal:
            self._console.print(Text(text, style=_style(text)))
        else:
            self.stream.write(text + "\n")
            self.stream.flush()

    def following(self, title: str, progress: Progress) -> _Terminal | _Plain:
        """A context in which what is under way is shown."""
        return _Terminal(self._console, title, progress) if self._console.is_terminal else _Plain(self, title, progress)


class Silent(Display):
    """Shows nothing, for scripts that want only the results."""

    def line(self, text: str) -> None:
        """Drop the line."""

    def following(self, title: str, progress: Progress) -> _Terminal | _Plain:
        """A context that shows nothing, because `line` does not."""
        return _Plain(self, title, progress)


class _Terminal:
    """The resources under way with the seconds each has taken, redrawn four times a second."""

    def __init__(self, console: Console, title: str, progress: Progress) -> None:
        self._title, self._progress, self._since = title, progress, time.monotonic()
        self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=4, transient=True)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def _drawn(self) -> RenderableType:
        now = time.monotonic()
        running = sorted(self._progress.running.copy().values(), key=lambda item: item[1])
        rows = [Text(f"  {step}  {now - since:.0f} s", style="dim") for step, since in running[:_MOST_SHOWN]]
        more = len(running) - _MOST_SHOWN
        rows += [Text(f"  and {more} more", style="dim")] if more > 0 else []
        return Group(Spinner("dots", f"{self._title}: {_standing(self._progress, now - self._since)}"), *rows)


class _Plain:
    """One line every so often, so that a log shows what takes its time."""

    def __init__(self, display: Display, title: str, progress: Progress) -> None:
        self._display, self._title, self._progress = display, title, progress
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        self._display.line(f"{self._title} ...")
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        since = time.monotonic()
        while not self._over.wait(_BEAT_SECONDS):
            names = ", ".join(step.name for step, _ in self._progress.running.copy().values())
            text = f"... {_standing(self._progress, time.monotonic() - since)}"
            self._display.line(f"{text}; now: {names}" if names else text)


def _standing(progress: Progress, seconds: float) -> str:
    return f"{len(progress.steps)} {'planned' if progress.planning else 'done'}, {seconds:.0f} s"


def _style(text: str) -> str:
    if text.startswith(("FAILED", "error")):
        return "bold red"
    if text.startswith("warning"):
        return "yellow"
    return "red" if text.startswith(("delete", "forgotten")) else ""
