"""The Pulumi program's reaction to an interrupt by the engine."""

from __future__ import annotations

import os
import signal
import threading

from infra.exit_codes import ERROR_ALREADY_SHOWN


def exit_silently_on_interrupt() -> None:
    """Exit without a stack trace on SIGINT, which the engine sends after a resource failed.

    The trace of a KeyboardInterrupt would hide the line of the failed resource. Inline programs keep their handler:
    they run in a thread of another process, which the engine did not start.
    """
    if "PULUMI_CONFIG" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(ERROR_ALREADY_SHOWN))
