"""`python -m workloads`: a run from the terminal. Imports what a command needs in that command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from infra.kube_api import KubeApiError
from workloads.cli.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, CliError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 well, 1 the run is not well, 2 a mistake or no way to look, 130 Ctrl-C."""
    arguments = _parser().parse_args(argv)
    module, _, function = arguments.call.partition(":")
    try:
        command: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
        return command(arguments)
    except (CliError, KubeApiError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("workloads", "infra", "trainer"):
            raise
        sys.stderr.write(f"error: the Python package {error.name!r} is missing; `make install-infra` installs it\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the run itself goes on\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"error: {message}; `{self.prog} --help` lists what is legal\n")


def _parser() -> argparse.ArgumentParser:
    from workloads.cli.target import add_options

    parser = _Parser(prog="python -m workloads", description="A training run from the terminal.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, call: str, text: str, *, on_cluster: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        if on_cluster:
            add_options(command)
        return command

    status = add("status", "workloads.cli.status:status_command", "how the run is, and why a pod waits or failed")
    numbers = add("metrics", "workloads.cli.status:metrics_command", "the newest loss, quality, speed and checkpoint")
    for command in (status, numbers):
        command.add_argument("--json", action="store_true", help="for programs; with --watch one line per change")
        command.add_argument("--watch", action="store_true", help="again and again, until the run has ended or Ctrl-C")
        command.add_argument("--every", type=_seconds, default=5.0, metavar="SECONDS", help="pause of --watch [5]")
    _logs_options(add("logs", "workloads.cli.logs:logs_command", "what the pods wrote"))
    stop = add("stop", "workloads.cli.stop:stop_command", "suspend the run: it saves, and frees its nodes")
    stop.add_argument("--yes", action="store_true", help="do not ask for the run's name")
    add("resume", "workloads.cli.stop:resume_command", "go on with a stopped run, from its newest checkpoint")
    board = add("tensorboard", "workloads.cli.tensorboard:tensorboard_command", "TensorBoard on this machine")
    board.add_argument(
        "--port", type=int, default=6006, metavar="N", help="port on this machine; 0: any free one [6006]"
    )
    plan = add(
        "plan",
        "workloads.plan:plan_command",
        "does the model fit the pool, how fast, what does it cost",
        on_cluster=False,
    )
    _plan_options(plan)
    return parser


def _logs_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="I", help="the pod of this index alone [all pods]")
    which.add_argument("--pod", metavar="NAME", help="this pod alone, also one that was replaced")
    parser.add_argument("--follow", "-f", action="store_true", help="go on as lines come")
    parser.add_argument("--tail", type=_count, metavar="N", help="the last N lines of each pod [all]")
    parser.add_argument("--previous", action="store_true", help="the container that ran before the last restart")
    parser.add_argument(
        "--pretty", action=argparse.BooleanOptionalAction, default=None, help="reports as columns [on a terminal]"
    )


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stack", metavar="S", help="stack whose Pulumi.<S>.yaml is read; nothing is provisioned")
    parser.add_argument("--cloud", metavar="C", help="cloud of --instance-type where two have it [the stack's]")
    parser.add_argument("--instance-type", metavar="T", help="another type of the catalog [the stack's]")
    parser.add_argument("--nodes", type=_count, metavar="N", help="another number of nodes [the stack's]")
    parser.add_argument("--config", metavar="FILE", help="trainer's settings, JSON, TOML or YAML [the stack's section]")
    parser.add_argument("--json", action="store_true", help="every figure, for programs")


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: legal is more than 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: legal is 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
