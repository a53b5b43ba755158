"""A virtual clock in simulated minutes: it advances when no request arrives, so long operations cost no real time."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

#: Real seconds without a request after which everything that happens now has happened. The engine and the program
#: need less than this between an answer and their next request.
IDLE_SECONDS = 0.05


class Interrupted(Exception):  # noqa: N818 - the end of a provider, not an error
    """The operation ends before its time: its provider has stopped."""


class Clock:
    """The time of a world. Concurrent waits overlap, as concurrent operations of a cloud do.

    It shares the world's lock, which a wait releases, so callbacks may change the world.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.now = 0.0
        self._condition = threading.Condition(lock)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last_request = time.monotonic()
        self._stops = 0

    def touch(self) -> None:
        """Note a request: time stands still while requests arrive."""
        self._last_request = time.monotonic()

    def later(self, minutes: float, callback: Callable[[], None]) -> None:
        """Call back when `minutes` have passed."""
        with self._condition:
            heapq.heappush(self._events, (self.now + minutes, next(self._order), callback))

    def wait(self, minutes: float) -> None:
        """Return after `minutes`, or raise `Interrupted`."""
        if minutes <= 0:
            return
        with self._condition:
            due, stops = self.now + minutes, self._stops
            done: list[bool] = []

            def finish() -> None:
                done.append(True)
                # What finished is answered, and the answer may cause requests.
                self.touch()

            self.later(minutes, finish)
            while not done:
                quiet = time.monotonic() - self._last_request
                if quiet < IDLE_SECONDS:
                    self._condition.wait(IDLE_SECONDS - quiet)
                else:
                    self._run_next(due)
                if self._stops != stops:
                    raise Interrupted

    def advance(self, minutes: float) -> None:
        """Let `minutes` pass now, for tests between two runs of the engine."""
        with self._condition:
            end = self.now + minutes
            while self._events and self._events[0][0] <= end:
                self._run_next(end)
            self.now = end

    def interrupt(self) -> None:
        """End every wait."""
        with self._condition:
            self._stops += 1
            self._condition.notify_all()

    def _run_next(self, limit: float) -> None:
        """Advance to the next event, at most to `limit`, and run it with all events of the same time."""
        self.now = max(self.now, min(limit, self._events[0][0]))
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        self._condition.notify_all()
