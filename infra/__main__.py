"""`python -m infra`: a stack from preview to destroy, what it costs, and the tables that it is chosen from."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.cli import tables
from infra.cli.arguments import Parser

if TYPE_CHECKING:
    from infra.cost import CostLine

# What takes its time to load, Pulumi, pydantic, YAML, is imported by the commands that need it: help comes at once.
ROOT = Path(__file__).resolve().parents[1]
POLICY_PACK = ROOT / "infra" / "policy"
_ENGINE = {
    "preview": "show what `up` would change",
    "up": "make the cloud what the settings say: preview, ask, update",
    "refresh": "make the state what the cloud holds",
    "destroy": "take the stack's resources away; asks for its name",
    "outputs": "print what the last `up` told: where things are, what to run next",
}
_COST = {"cost": "print what an hour costs, item by item; needs neither engine nor login"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 2 for a mistake that a person can fix, 1 for an operation that failed."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.command in _ENGINE:
            return _engine(arguments)
        if arguments.command == "doctor":
            from infra.doctor import command

            return command.run(arguments)
        return _cost(arguments) if arguments.command == "cost" else _table(arguments)
    except ValueError as error:  # of settings too
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("cancelled\n")
        return 130


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    program = Parser(prog="python -m infra", description=__doc__)
    commands = program.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (_ENGINE | _COST).items():
        _stack_options(commands.add_parser(name, help=text, description=text), name)
    _doctor_options(commands)
    instances = commands.add_parser("instances", help="compare GPU instance types: hardware, network, price")
    instances.add_argument("--cloud", help="only this cloud's types")
    charts = commands.add_parser("charts", help="the pinned Helm charts and how to check for newer ones")
    for command in (instances, charts):
        command.add_argument("--json", action="store_true", help="machine-readable, every field")
    return program


def _doctor_options(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "find what stands in the way of a stack, before `up` and after it: result and what to do, check by check"
    more = "Exit status: 0 fine, 1 something to fix, 2 something could not be looked at."
    command = commands.add_parser("doctor", help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
    command.add_argument("--stack", metavar="S", help="the stack: Pulumi.<S>.yaml has its settings")
    command.add_argument("--json", action="store_true", help="print the findings as JSON; progress goes to stderr")
    command.add_argument(
        "--cwd", metavar="DIR", type=Path, default=ROOT, help="folder of Pulumi.yaml [this repository]"
    )
    command.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, help="what each check may take [30; 60 for the job]"
    )
    command.add_argument(
        "--markdown", action="store_true", help="write the tables of causes into the guides, and nothing else"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: legal is more than 0")
    return value


def _stack_options(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("--stack", metavar="S", required=True, help="the stack: Pulumi.<S>.yaml has its settings")
    command.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    command.add_argument(
        "--cwd", metavar="DIR", type=Path, default=ROOT, help="folder of Pulumi.yaml [this repository]"
    )
    if name in {"preview", "up", "cost"}:
        keeps = "and keep it in Pulumi.<S>.yaml" if name == "up" else "this time"
        text = f"set a key {keeps}, such as gpu.nodes.max=4"
        command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=text)
    if name in {"preview", "up"}:
        command.add_argument(
            "--policy-pack", metavar="DIR", nargs="?", type=Path, const=POLICY_PACK, help="enforce infra/policy, or DIR"
        )
        command.add_argument("--policy-config", metavar="FILE", type=Path, help="JSON that configures the pack's rules")
        command.add_argument(
            "--secrets-provider", metavar="URI", help="what encrypts a new stack's secrets: passphrase, awskms://..."
        )
    if name in {"up", "destroy"}:
        command.add_argument("--yes", action="store_true", help="do not ask")
    if name == "outputs":
        command.add_argument("--show-secrets", action="store_true", help="print the kubeconfig too")


def _engine(arguments: argparse.Namespace) -> int:
    from infra import stack_files as configuration
    from infra.automation import command

    # `kill` and a closed terminal end an operation as Ctrl-C does: at the next point that leaves a usable state.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` asked for that
            signal.signal(number, signal.default_int_handler)
    return command.run(arguments, configuration.parse_assignments(getattr(arguments, "set", [])))


def _cost(arguments: argparse.Namespace) -> int:
    from infra import stack_files as configuration
    from infra.outputs import hourly_cost

    if arguments.stack not in configuration.list_stacks(arguments.cwd):
        known = ", ".join(configuration.list_stacks(arguments.cwd)) or "none"
        raise ValueError(f"no file Pulumi.{arguments.stack}.yaml; stacks that have one: {known}")
    overrides = configuration.parse_assignments(arguments.set)
    settings = configuration.read(arguments.stack, overrides, arguments.cwd).parse().settings
    nodes = settings.gpu.nodes
    at_max = {line.what: line for line in settings.cost_lines(nodes.max)}
    rows: list[tables.Row] = [_cost_row(line, at_max[line.what]) for line in settings.cost_lines(nodes.desired)]
    sums = hourly_cost(settings)
    if arguments.json:
        sys.stdout.write(json.dumps({"hourly_cost_usd": sums, "items": rows}, indent=2) + "\n")
        return 0
    sys.stdout.write(tables.table(tables.COST, rows) if rows else "nothing of this stack is billed by the hour\n")
    for what, spot, count in (("on_demand", "spot", nodes.desired), ("on_demand_at_max", "spot_at_max", nodes.max)):
        known = "not known" if sums[spot] is None else f"{sums[spot]:.2f}"
        sys.stdout.write(f"{count} GPU nodes: {sums[what]:.2f} USD/h on demand, {known} with GPU nodes at spot\n")
    return 0


def _cost_row(line: CostLine, at_max: CostLine) -> tables.Row:
    """One item with its sums: the price of a unit may depend on how many there are."""
    spot = line.spot_usd_per_hour if line.interruptible else None
    return {
        "what": line.what,
        "count": line.count,
        "on_demand_usd_per_hour": line.count * line.on_demand_usd_per_hour,
        "spot_usd_per_hour": None if spot is None else round(line.count * spot, 4),
        "count_at_max": at_max.count,
        "on_demand_usd_per_hour_at_max": at_max.count * at_max.on_demand_usd_per_hour,
    }


def _table(arguments: argparse.Namespace) -> int:
    from infra import catalog

    charts = arguments.command == "charts"
    rows = tables.charts() if charts else tables.instances(arguments.cloud)
    if not rows:
        legal = ", ".join(sorted({item.cloud for item in catalog.instances()}))
        raise ValueError(f"no instance types for cloud {arguments.cloud!r}; legal: {legal}")
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    sys.stdout.write(tables.table(tables.CHARTS if charts else tables.INSTANCES, rows))
    if charts:
        sys.stdout.write(
            "\nNewer versions: run a row's check, read the release notes, change infra/addons/charts.toml.\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
