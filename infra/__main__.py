"""Preview, create, check and destroy a stack, list what it left, print its cost, and compare types and charts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.cli import tables
from infra.cli.arguments import Parser
from infra.exit_codes import INTERRUPTED, SUCCESS, USER_ERROR

if TYPE_CHECKING:
    from infra.cost import CostLine

# Pulumi, pydantic and YAML are slow to import, so only the commands that need them do: help is fast.
ROOT = Path(__file__).resolve().parents[1]
POLICY_PACK = ROOT / "infra" / "policy"
_ENGINE = {
    "preview": "show the changes that `up` would make",
    "up": "preview the changes, ask for confirmation and apply them",
    "refresh": "update the state from the resources in the cloud",
    "destroy": "delete the stack's resources and list what is left; asks for the stack's name",
    "outputs": "print the outputs of the last `up`: addresses, cost and the next commands",
    "tunnel": "hold open the tunnel to a private Kubernetes API (network.api_access bastion) until Ctrl-C",
}
_ORPHANS = "list resources of the stack that are in no state, with the command that removes each"
_COST = {"cost": "print the hourly cost, item by item, without the engine or a login"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (see infra/exit_codes.py)."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.command in _ENGINE:
            return _engine(arguments)
        if arguments.command == "doctor":
            from infra.doctor import command

            return command.run(arguments)
        if arguments.command == "orphans":
            from infra.orphans import command as orphans

            return orphans.run(arguments)
        return _cost(arguments) if arguments.command == "cost" else _table(arguments)
    except ValueError as error:  # SettingsError is one
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("cancelled\n")
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    program = Parser(prog="python -m infra", description=__doc__)
    commands = program.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (_ENGINE | _COST).items():
        _stack_options(commands.add_parser(name, help=text, description=text), name)
    _doctor_options(commands)
    more = "Exit status: 0 nothing is left, 1 orphans, 2 no orphan found, but a kind could not be listed."
    description = f"{_ORPHANS[0].upper()}{_ORPHANS[1:]}. {more}"
    _stack_options(commands.add_parser("orphans", help=_ORPHANS, description=description), "orphans")
    instances = commands.add_parser("instances", help="compare GPU instance types by hardware, network and price")
    instances.add_argument("--cloud", help="show only the types of this cloud")
    charts = commands.add_parser(
        "charts", help="list the pinned Helm charts and the commands that check for newer versions"
    )
    for command in (instances, charts):
        command.add_argument("--json", action="store_true", help="print all fields as JSON")
    return program


def _doctor_options(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the doctor's command."""
    text = "check a stack before or after `up`, and print the fix for each problem"
    more = "Exit status: 0 no problem, 1 a problem to fix, 2 no problem, but a check could not run."
    command = commands.add_parser("doctor", help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
    command.add_argument("--stack", metavar="S", help="the stack: Pulumi.<S>.yaml has its settings")
    command.add_argument("--json", action="store_true", help="print the findings as JSON; progress goes to stderr")
    command.add_argument(
        "--cwd", metavar="DIR", type=Path, default=ROOT, help="folder of Pulumi.yaml [this repository]"
    )
    command.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, help="time limit of each check [30; 60 for the job]"
    )
    command.add_argument("--markdown", action="store_true", help="update the generated tables in the guides and exit")


def _seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: more than 0")
    return value


def _stack_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a command that works on one stack."""
    command.add_argument("--stack", metavar="S", required=True, help="the stack: Pulumi.<S>.yaml has its settings")
    command.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    command.add_argument(
        "--cwd", metavar="DIR", type=Path, default=ROOT, help="folder of Pulumi.yaml [this repository]"
    )
    if name == "orphans":
        text = "print the commands although a cluster is in no state: no other state backend has this stack"
        command.add_argument("--only-state", action="store_true", help=text)
    if name in {"preview", "up", "cost"}:
        scope = "and save it in Pulumi.<S>.yaml" if name == "up" else "for this command"
        text = f"set a key {scope}, such as gpu.nodes.max=4"
        command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=text)
    if name in {"preview", "up"}:
        command.add_argument(
            "--policy-pack", metavar="DIR", nargs="?", type=Path, const=POLICY_PACK, help="enforce infra/policy, or DIR"
        )
        command.add_argument(
            "--policy-config", metavar="FILE", type=Path, help="JSON file that configures the pack's rules"
        )
        command.add_argument(
            "--secrets-provider", metavar="URI", help="encryption of a new stack's secrets: passphrase, awskms://..."
        )
    if name in {"up", "destroy"}:
        command.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    if name == "up":
        text = "replace this resource even if nothing about it changes, such as a node group in the state CREATE_FAILED"
        command.add_argument("--replace", metavar="URN", action="append", default=[], help=text)
    if name == "outputs":
        command.add_argument("--show-secrets", action="store_true", help="also print the kubeconfig")


def _engine(arguments: argparse.Namespace) -> int:
    """Run a command of the Pulumi engine."""
    from infra import stack_files
    from infra.automation import command

    # `kill` and a closed terminal cancel an operation as Ctrl-C does, so that the state stays usable.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # set by `nohup`
            signal.signal(number, signal.default_int_handler)
    code = command.run(arguments, stack_files.parse_assignments(getattr(arguments, "set", [])))
    if arguments.command == "destroy" and code == SUCCESS:
        from infra.orphans import command as orphans

        orphans.after_destroy(arguments)
    return code


def _cost(arguments: argparse.Namespace) -> int:
    """Print the hourly cost of a stack."""
    from infra import stack_files
    from infra.outputs import hourly_cost

    stack_files.require_file(arguments.stack, arguments.cwd)
    overrides = stack_files.parse_assignments(arguments.set)
    settings = stack_files.read(arguments.stack, overrides, arguments.cwd).parse().settings
    nodes = settings.gpu.nodes
    at_max = {line.what: line for line in settings.cost_lines(nodes.max)}
    rows: list[tables.Row] = [_cost_row(line, at_max[line.what]) for line in settings.cost_lines(nodes.desired)]
    sums = hourly_cost(settings)
    if arguments.json:
        sys.stdout.write(json.dumps({"hourly_cost_usd": sums, "items": rows}, indent=2) + "\n")
        return SUCCESS
    sys.stdout.write(tables.table(tables.COST, rows) if rows else "no item of this stack is billed by the hour\n")
    totals = [("desired", nodes.desired, "on_demand", "spot"), ("max", nodes.max, "on_demand_at_max", "spot_at_max")]
    for key, count, on_demand, spot in totals[: 1 if nodes.desired == nodes.max else 2]:
        at_spot = "spot price unknown" if sums[spot] is None else f"{sums[spot]:.2f} with GPU nodes at spot"
        sys.stdout.write(f"at gpu.nodes.{key} ({count}): {sums[on_demand]:.2f} USD/h on demand, {at_spot}\n")
    return SUCCESS


def _cost_row(line: CostLine, at_max: CostLine) -> tables.Row:
    """Return the row of one item; `at_max` is separate, because the unit price may depend on the count."""
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
    """Print the table of instance types or charts."""
    charts = arguments.command == "charts"
    rows = _chart_rows() if charts else _instance_rows(arguments.cloud)
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return SUCCESS
    sys.stdout.write(tables.table(tables.CHARTS if charts else tables.INSTANCES, rows))
    if charts:
        sys.stdout.write(
            "\nTo update a chart, run its check, read the release notes and edit infra/addons/charts.toml.\n"
        )
    return SUCCESS


def _instance_rows(cloud: str | None) -> list[tables.Row]:
    """Return the rows of the catalog, or of one cloud; raise ValueError for an unknown cloud."""
    from infra import catalog

    rows: list[tables.Row] = [dataclasses.asdict(item) for item in catalog.instances(cloud)]
    if not rows:
        allowed = ", ".join(sorted({item.cloud for item in catalog.instances()}))
        raise ValueError(f"--cloud: no instance types: got {cloud!r}; allowed: {allowed}")
    return rows


def _chart_rows() -> list[tables.Row]:
    """Return the pinned charts, each with the command that looks for a newer version."""
    from infra.addons import charts

    return [dataclasses.asdict(row) | {"check": row.check} for row in charts.table().values()]


if __name__ == "__main__":
    sys.exit(main())
