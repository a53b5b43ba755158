"""Several processes on this machine by torch.distributed's own launcher, ended by one line instead of its report."""

from __future__ import annotations

import logging
import os
import sys

from trainer.errors import UserError


def launch(arguments: list[str]) -> int:
    """`launch [--nproc N] COMMAND ...`: run the trainer's COMMAND in N processes; returns the first failure's exit
    code."""
    wanted = "auto"
    if arguments and arguments[0].partition("=")[0] == "--nproc":
        option, equals, wanted = arguments.pop(0).partition("=")
        if not equals:
            if not arguments:
                raise UserError(f"option {option} lacks a value; legal: auto, or a number of processes")
            wanted = arguments.pop(0)
    count = _count(wanted)
    if count == 1:
        os.execv(sys.executable, [sys.executable, "-m", "trainer", *arguments])  # noqa: S606  # our own interpreter
    return _elastic(count, arguments)


def _count(wanted: str) -> int:
    if wanted == "auto":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return gpus or 2
    if not wanted.isdigit() or int(wanted) < 1:
        raise UserError(f"--nproc is {wanted!r}; legal: auto (one process per GPU, else 2), or a number of processes")
    return int(wanted)


def _elastic(count: int, arguments: list[str]) -> int:
    # The trainer sets its threads itself; without this the launcher explains at length that it chose 1.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # A failed worker has said what was wrong on its own standard error; the agent's summary adds nothing.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--nproc_per_node", str(count), "-m", "trainer", *arguments]
    try:
        run(get_args_parser().parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # Ctrl-C reaches the workers too; one of them has said what that means
        return 128 + int(error.sigval)
    return 0
