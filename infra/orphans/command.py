"""`python -m infra orphans`, and the last lines of `python -m infra destroy`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TextIO

from infra.automation import OperationError
from infra.cli import tables
from infra.exit_codes import SUCCESS
from infra.findings.model import Finding
from infra.findings.orphans import Leftover
from infra.orphans.search import Report, search


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        report = search(arguments.stack, arguments.cwd, is_only_state=arguments.only_state)
    except OperationError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if arguments.json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        show(report, sys.stdout)
    return report.exit_code


def after_destroy(arguments: argparse.Namespace) -> None:
    """Print what `destroy`, which has just succeeded, left; a failed search does not change its result."""
    again = f"python -m infra orphans --stack {arguments.stack}"
    try:
        show(search(arguments.stack, arguments.cwd), sys.stderr)
    except (OperationError, ValueError) as error:
        reason = " ".join(str(error).split())
        sys.stderr.write(f"stack {arguments.stack}: deleted; not searched for leftovers: {reason}. Fix: {again}\n")
    except KeyboardInterrupt:
        sys.stderr.write(f"stack {arguments.stack}: deleted; the search for leftovers was cancelled. Fix: {again}\n")


def show(report: Report, stream: TextIO) -> None:
    """Print the orphans, what is kept, what was not checked, and a summary line."""
    if report.orphans:
        stream.write(tables.table(tables.ORPHANS, list(map(_row, report.orphans))) + "\n")
    if report.kept:
        stream.write("kept on purpose, or deleted by the cloud:\n")
        stream.write(tables.table(tables.KEPT, list(map(_row, report.kept))) + "\n")
    stream.write("".join(f"not checked: {line}\n" for line in _reasons(report.not_checked)))
    stream.write("".join(f"{line}\n" for line in report.withheld))
    stream.write(f"stack {report.stack}: {summary(report)}\n")


def summary(report: Report) -> str:
    """Return the last line: how much is left, what it costs, and where the search looked."""
    count = len(report.orphans)
    where = f"{report.num_kinds} kinds of resources searched, {report.account}" if report.num_kinds else report.account
    if not count:
        state = "nothing found, but not all was checked" if report.exit_code != SUCCESS else "nothing is left"
        return f"{state} ({where})"
    priced = report.usd_per_hour
    cost = f", at least {priced:.2f} USD/h" if priced >= 0.005 else ""
    noun = "orphan" if count == 1 else "orphans"
    if report.withheld:
        return f"{count} possible {noun}{cost}: delete nothing until the owner is known ({where})"
    return f"{count} {noun}{cost}: run the commands from top to bottom ({where})"


def _row(item: Leftover) -> tables.Row:
    price = None if item.usd_per_hour is None else f"{item.usd_per_hour:.4f}"
    return dataclasses.asdict(item) | {"usd_per_hour": price, "remove": item.remove or f"none: {item.withheld}"}


def _reasons(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each reason, with all kinds that it concerns: one permission may be missing for several."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for item in findings:
        kinds.setdefault((item.result, item.fix), []).append(item.check)
    return [f"{', '.join(names)}: {reason}. Fix: {fix}" for (reason, fix), names in kinds.items()]
