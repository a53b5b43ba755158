"""How a process of a side notices that the bench that started it is gone. Imports no torch: it must listen at once."""

from __future__ import annotations

import os
import sys
import threading

from trainer.exit_codes import EXIT_USER_ERROR


def end_with_the_bench() -> None:
    """End at once when the bench does, however that ends: then the pipe that is this process's input, handed on by its
    launcher, has no other end. The launcher follows its processes."""
    threading.Thread(target=_await_end_of_input, name="bench", daemon=True).start()


def _await_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(EXIT_USER_ERROR)  # for the launcher a mistake that has been told: no restart, and nothing to say
