"""A process that has imported the trainer and forks one process of a job per line of standard input.

Importing torch and TorchRec takes seconds, a fork milliseconds, so a test can afford dozens of restarts. What is forked
is a process like any other: it runs `main(argv)` of a module (`trainer.main`, as a rule), has its own process id, and
dies of kill -9.

Input: {"start": {"module": NAME, "argv": [...], "env": {...}, "log": PATH, "fault": {...} or null}} -> {"pid": N};
{"ended": null} -> {"ended": {pid: exit code}} of those that have ended since, negative for signals.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

import small_jobs  # noqa: F401  # imports the trainer with everything it needs
from injected import inject

import trainer.main
import trainer.training.loop  # noqa: F401


def child(order: dict[str, Any]) -> None:
    """Never returns."""
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["env"])
        if order["fault"]:
            inject(order["fault"])
        code = importlib.import_module(order["module"]).main(order["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended() -> dict[int, int]:
    """Exit codes of the children that have ended, once each."""
    found = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found[pid] = os.waitstatus_to_exitcode(status)


def serve() -> None:
    """Until standard input closes."""
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            pid = os.fork()
            if pid == 0:
                child(order["start"])
            answer: dict[str, Any] = {"pid": pid}
        else:
            answer = {"ended": {str(pid): code for pid, code in ended().items()}}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
