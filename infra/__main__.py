"""`python -m infra`: the catalog of instance types and the table of charts, in a terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 2 for a mistake in the arguments."""
    arguments = _parser().parse_args(argv)
    rows = _instances(arguments.cloud) if arguments.command == "instances" else _charts()
    if not rows:
        sys.stderr.write(f"no instance types for cloud {arguments.cloud!r}; legal: {', '.join(_clouds())}\n")
        return 2
    sys.stdout.write(json.dumps(rows, indent=2) + "\n" if arguments.json else _table(rows))
    if arguments.command == "charts" and not arguments.json:
        sys.stdout.write(
            "\nNewer versions: run a row's check, read the release notes, change infra/addons/charts.toml.\n"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra", description="What this project can provision.")
    commands = parser.add_subparsers(dest="command", required=True)
    instances = commands.add_parser("instances", help="compare GPU instance types: hardware, network, price")
    instances.add_argument("--cloud", help="only this cloud's types")
    charts = commands.add_parser("charts", help="the pinned Helm charts and how to check for newer ones")
    for command in (instances, charts):
        command.add_argument("--json", action="store_true", help="machine-readable, every field")
    charts.set_defaults(cloud=None)
    return parser


def _clouds() -> list[str]:
    from infra import catalog

    return sorted({item.cloud for item in catalog.instances()})


def _instances(cloud: str | None) -> list[dict[str, object]]:
    from infra import catalog

    return [dataclasses.asdict(item) for item in catalog.instances(cloud)]


def _charts() -> list[dict[str, object]]:
    from infra.addons import charts

    return [dataclasses.asdict(row) | {"check": row.check} for row in charts.table().values()]


#: Columns of each table: heading, and what a row shows there.
_COLUMNS = {
    "instances": {
        "CLOUD": "{cloud}",
        "TYPE": "{name}",
        "GPUS": "{num_gpus} x {gpu_model}",
        "VCPU": "{num_vcpus}",
        "RAM GIB": "{memory_gib}",
        "NETWORK": "{network_gbps} Gbps {fabric}",
        "USD/H": "{on_demand_usd_per_hour}",
        "SPOT USD/H": "{spot_usd_per_hour}",
        "AS OF": "{as_of}",
        "PRICE SOURCE": "{source}",
    },
    "charts": {
        "CHART": "{key}",
        "VERSION": "{version}",
        "NAMESPACE": "{namespace}",
        "WHY": "{why}",
        "CHECK": "{check}",
    },
}


def _table(rows: Sequence[dict[str, object]]) -> str:
    """Columns as wide as their widest cell; an absent figure shows as a dash."""
    columns = _COLUMNS["charts" if "chart" in rows[0] else "instances"]
    shown = [{key: "-" if value is None else value for key, value in row.items()} for row in rows]
    cells = [list(columns)] + [[form.format(**row) for form in columns.values()] for row in shown]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in cells
    )


if __name__ == "__main__":
    sys.exit(main())
