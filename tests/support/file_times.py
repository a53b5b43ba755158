"""The seconds that each file of tests took, printed at the end of a run with `--slow-files N`."""

from __future__ import annotations

from collections import Counter

import pytest


def add_option(parser: pytest.Parser) -> None:
    """Add `--slow-files`."""
    parser.addoption("--slow-files", type=int, default=0, metavar="N", help="print the N slowest files of tests")


def print_slowest(reporter: pytest.TerminalReporter, count: int) -> None:
    """Print the `count` files that took longest, with setup and teardown."""
    seconds: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    reporter.section(f"slowest {count} files of tests")
    for name, total in seconds.most_common(count):
        reporter.write_line(f"{total:8.1f} s  {name}")
