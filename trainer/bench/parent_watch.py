"""Exit when the bench that started this process exits. Imports no torch, to watch from the start."""

from __future__ import annotations

import os
import sys
import threading

from trainer.exit_codes import EXIT_USER_ERROR


def exit_with_bench() -> None:
    """Exit this process as soon as the bench exits or is killed.

    Standard input is a pipe from the bench, inherited through the launcher; it ends with the bench. The launcher exits
    after its processes.
    """
    threading.Thread(target=_exit_at_end_of_input, name="bench", daemon=True).start()


def _exit_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(EXIT_USER_ERROR)  # the launcher neither restarts nor reports after this code
