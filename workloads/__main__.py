"""`python -m workloads`: shows and controls a run. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from infra.kube_api import KubeApiError
from trainer.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR
from workloads.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 on success, 1 if the run has a problem, 2 on a mistake, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    module, _, function = arguments.call.partition(":")
    try:
        command: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
        return command(arguments)
    except (UserError, KubeApiError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("workloads", "infra", "trainer"):
            raise
        sys.stderr.write(f"error: the Python package {error.name!r} is missing. Fix: make install-infra\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the run itself continues\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # a reader such as `head` has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


class _Parser(argparse.ArgumentParser):
    """A parser that prints a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message and the command that lists the options."""
        self.exit(EXIT_USER_ERROR, f"error: {message}. Allowed options: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from workloads.cli.options import add_run_options

    parser = _Parser(prog="python -m workloads", description="Show and control a training run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, call: str, text: str, *, on_cluster: bool = True) -> argparse.ArgumentParser:
        """Add a command that calls `module:function`."""
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        if on_cluster:
            add_run_options(command)
        return command

    status = add("status", "workloads.cli.status:status_command", "the state of the run, and why pods wait or failed")
    metrics = add("metrics", "workloads.cli.status:metrics_command", "the newest loss, quality, speed and checkpoint")
    for command in (status, metrics):
        command.add_argument("--json", action="store_true", help="print JSON; with --watch one line per change")
        command.add_argument("--watch", action="store_true", help="refresh until the run has ended or Ctrl-C")
        command.add_argument("--every", type=_seconds, default=5.0, metavar="SECONDS", help="interval of --watch [5]")
    _add_log_options(add("logs", "workloads.cli.logs:logs_command", "the logs of the run's pods"))
    stop = add("stop", "workloads.cli.stop:stop_command", "suspend the run: it saves and frees its nodes")
    stop.add_argument("--yes", action="store_true", help="do not ask for a confirmation")
    add("resume", "workloads.cli.stop:resume_command", "resume a stopped run from its newest checkpoint")
    board = add("tensorboard", "workloads.cli.tensorboard:tensorboard_command", "open TensorBoard on this machine")
    board.add_argument("--port", type=int, default=6006, metavar="N", help="local port, 0 for any free one [6006]")
    text = "predict whether the model fits the pool, its speed and its cost"
    _add_plan_options(add("plan", "workloads.plan:plan_command", text, on_cluster=False))
    return parser


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `logs`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="I", help="only the pod with this index [all pods]")
    which.add_argument("--pod", metavar="NAME", help="only the pod with this name, also if it was replaced")
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines as they arrive")
    parser.add_argument("--tail", type=_count, metavar="N", help="the last N lines of each pod [all]")
    parser.add_argument("--previous", action="store_true", help="the container that ran before the last restart")
    parser.add_argument(
        "--pretty", action=argparse.BooleanOptionalAction, default=None, help="reports as columns [on a terminal]"
    )


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.add_argument("--stack", metavar="S", help="stack whose Pulumi.<S>.yaml is read; nothing is provisioned")
    parser.add_argument("--cloud", metavar="C", help="cloud of --instance-type if two have it [the stack's]")
    parser.add_argument("--instance-type", metavar="T", help="another instance type of the catalog [the stack's]")
    parser.add_argument("--nodes", type=_count, metavar="N", help="another number of nodes [the stack's]")
    parser.add_argument("--config", metavar="FILE", help="trainer's settings, JSON, TOML or YAML [the stack's section]")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def _seconds(text: str) -> float:
    """Return a positive number of seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"not a duration: got {text}; allowed: more than 0")
    return value


def _count(text: str) -> int:
    """Return a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a count: got {text}; allowed: 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
