"""What the program does when the engine interrupts it."""

from __future__ import annotations

import os
import signal
import threading

#: Pulumi's own code for a program that ended after the cause was shown: nothing more is said.
_CAUSE_WAS_SHOWN = 32


def end_without_a_trace() -> None:
    """End at once and silently on SIGINT, which is how the engine stops the program after a resource failed.

    Python's trace of a KeyboardInterrupt would stand above the failed resource's own line. Only in a process that the
    engine started: an inline program runs in a thread of somebody else's process.
    """
    if "PULUMI_CONFIG" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(_CAUSE_WAS_SHOWN))
