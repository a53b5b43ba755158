"""Showing something once, or again every few seconds until it has ended."""

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

Seen = TypeVar("Seen")
#: A file has no width, and no line of it should be folded.
_WIDE = 220


@dataclass(frozen=True)
class View(Generic[Seen]):
    """`take` looks, `draw` and `plain` show for people and for programs, `over` says that nothing will change."""

    take: Callable[[], Seen]
    draw: Callable[[Seen], RenderableType]
    plain: Callable[[Seen], Mapping[str, Any]]
    over: Callable[[Seen], bool]

    def once(self, *, as_json: bool) -> Seen:
        """One look."""
        seen = self.take()
        if as_json:
            sys.stdout.write(json.dumps(self.plain(seen), indent=2) + "\n")
        else:
            self._console().print(self.draw(seen))
        return seen

    def watch(self, *, as_json: bool, every_seconds: float, sleep: Callable[[float], None] = time.sleep) -> Seen:
        """Until it is over or Ctrl-C, which is how one stops looking; the last that was seen.

        A terminal is redrawn in place; anything else gets what changed: one JSON line, or one picture. An API server
        that goes away for a moment is waited for, one that was never there is an error.
        """
        from rich.live import Live

        seen, console = self.take(), self._console()
        in_place = sys.stdout.isatty() and not as_json
        with Live(self.draw(seen), console=console, auto_refresh=False) if in_place else nullcontext() as live:
            shown = None
            try:
                while True:
                    if live is not None:
                        live.update(self.draw(seen), refresh=True)
                    elif (now := self._text(seen, as_json=as_json)) != shown:
                        sys.stdout.write(now)
                        sys.stdout.flush()
                        shown = now
                    if self.over(seen):
                        return seen
                    sleep(every_seconds)
                    seen = self._again(seen)
            except KeyboardInterrupt:
                return seen

    def _again(self, before: Seen) -> Seen:
        try:
            return self.take()
        except KubeApiError as error:
            if error.status:
                raise
            sys.stderr.write(f"{error}; looking again\n")
            return before

    def _text(self, seen: Seen, *, as_json: bool) -> str:
        if as_json:
            return json.dumps(self.plain(seen)) + "\n"
        console = self._console()
        with console.capture() as captured:
            console.print(self.draw(seen))
        text: str = captured.get()
        return text

    def _console(self) -> Any:
        from rich.console import Console

        return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
