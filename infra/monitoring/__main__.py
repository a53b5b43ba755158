"""`python -m infra.monitoring dashboard|alerts`: prints them for a Grafana or Prometheus outside the stack."""

from __future__ import annotations

import json
import sys

from infra.cli.arguments import Parser
from infra.monitoring.alerts import rules
from infra.monitoring.board import dashboard


def main() -> int:
    """Print one of the two documents as JSON, which Prometheus reads as YAML."""
    program = Parser(prog="python -m infra.monitoring", description=__doc__)
    program.add_argument("what", choices=["dashboard", "alerts"], help="the dashboard's JSON, or a rules file")
    document = dashboard() if program.parse_args().what == "dashboard" else rules()
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
