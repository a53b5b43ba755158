"""Retry an operation with exponential backoff."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class RetriesExhaustedError(Exception):
    """The last allowed attempt failed; `error` is what it raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class RetryPolicy:
    """How often an operation is attempted, and how long the delays between attempts are."""

    attempts: int = 5
    first_delay_seconds: float = 0.5
    factor: float = 2.0
    max_delay_seconds: float = 30.0
    jitter: float = 0.25  # share of a delay; spreads out processes that were throttled together

    def delay_seconds(self, failures: int) -> float:
        """Return the delay after so many failures in a row."""
        delay = min(self.first_delay_seconds * self.factor ** (failures - 1), self.max_delay_seconds)
        return delay * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311  # not a secret

    def run(
        self,
        operation: Callable[[], T],
        is_permanent: Callable[[Exception], bool],
        on_retry: Callable[[Exception, int, float], Any] = lambda *_: None,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> T:
        """Return the operation's result, after retries where needed.

        A permanent error is raised unchanged, without a retry. The error of the last attempt is raised as
        RetriesExhaustedError. Before each delay `on_retry` gets the error, the number of the next attempt and the
        delay in seconds.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except Exception as error:  # each client of a store has its own exceptions
                if is_permanent(error):
                    raise
                if attempt == self.attempts:
                    raise RetriesExhaustedError(error) from error
                delay = self.delay_seconds(attempt)
                on_retry(error, attempt + 1, delay)
            sleep(delay)
        raise AssertionError(f"a retry policy needs at least one attempt: got {self.attempts}")


# Requests to object stores. Tests replace it with one of short delays.
STORE_RETRY = RetryPolicy()
