"""A view that is printed once, or refreshed until it is final."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from infra.kube_api import KubeApiError

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")
#: Width for files, in which no line should be folded.
_FILE_WIDTH = 220


@dataclass(frozen=True)
class View(Generic[T]):
    """A value that `load` reads and that is printed by `render` as text or by `to_json` as JSON.

    `is_final` says that the value will not change any more.
    """

    load: Callable[[], T]
    render: Callable[[T], RenderableType]
    to_json: Callable[[T], Mapping[str, Any]]
    is_final: Callable[[T], bool]

    def show_once(self, *, as_json: bool) -> T:
        """Print the value and return it."""
        value = self.load()
        if as_json:
            sys.stdout.write(json.dumps(self.to_json(value), indent=2) + "\n")
        else:
            self._console().print(self.render(value))
        return value

    def watch(self, *, as_json: bool, every_seconds: float, sleep: Callable[[float], None] = time.sleep) -> T:
        """Print the value whenever it changes, until it is final or Ctrl-C; return the last value.

        A terminal is redrawn in place; a file gets one JSON line or one text per change. A server that stops answering
        is retried; one that never answered is an error.
        """
        from rich.live import Live

        value, console = self.load(), self._console()
        in_place = sys.stdout.isatty() and not as_json
        with Live(self.render(value), console=console, auto_refresh=False) if in_place else nullcontext() as live:
            printed = None
            try:
                while True:
                    if live is not None:
                        live.update(self.render(value), refresh=True)
                    elif (text := self._to_text(value, as_json=as_json)) != printed:
                        sys.stdout.write(text)
                        sys.stdout.flush()
                        printed = text
                    if self.is_final(value):
                        return value
                    sleep(every_seconds)
                    value = self._reload(value)
            except KeyboardInterrupt:
                return value

    def _reload(self, previous: T) -> T:
        """Return the new value, or the previous one if the server does not answer."""
        try:
            return self.load()
        except KubeApiError as error:
            if error.status is not None:
                raise
            sys.stderr.write(f"{error}; retrying\n")
            return previous

    def _to_text(self, value: T, *, as_json: bool) -> str:
        """Return what to print for a value."""
        if as_json:
            return json.dumps(self.to_json(value)) + "\n"
        console = self._console()
        with console.capture() as captured:
            console.print(self.render(value))
        text: str = captured.get()
        return text

    def _console(self) -> Any:
        """Return a console as wide as the terminal, or wide enough for a file."""
        from rich.console import Console

        return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
