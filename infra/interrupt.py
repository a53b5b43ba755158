"""How the Pulumi program ends: after an interrupt by the engine, and after an error that it reports itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pulumi

from infra.exit_codes import ERROR_ALREADY_SHOWN


def exit_silently_on_interrupt() -> None:
    """Exit without a stack trace on SIGINT, which the engine sends after a resource failed.

    The trace of a KeyboardInterrupt would hide the line of the failed resource. Inline programs keep their handler:
    they run in a thread of another process, which the engine did not start.
    """
    if _is_started_by_engine():
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(ERROR_ALREADY_SHOWN))


@contextmanager
def report_errors_once() -> Iterator[None]:
    """Report a RunError and exit; the engine would add an `unhandled error` to the exit code 1 that it stands for.

    Inline programs raise it.
    """
    try:
        yield
    except pulumi.RunError as error:
        if not _is_started_by_engine():
            raise
        pulumi.log.error(str(error))
        sys.exit(ERROR_ALREADY_SHOWN)


def _is_started_by_engine() -> bool:
    """Return whether this process is a program of the engine, not an inline program in a thread of another process."""
    return "PULUMI_CONFIG" in os.environ and threading.current_thread() is threading.main_thread()
