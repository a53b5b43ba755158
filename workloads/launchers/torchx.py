"""The same Job for people who launch with TorchX: `pulumi up` prepares everything and leaves the start to `torchx run`.

    python -m workloads.launchers.torchx run --scheduler torchrec-cloud workloads/launchers/torchx.py:dlrm --stack aws

is TorchX's own command line (run, status, log, list, cancel), with the scheduler of `workloads.torchx_scheduler` beside
its own. TorchX's `kubernetes` scheduler makes Volcano jobs, whose pods it builds itself: without security context,
tolerations, shared memory and fabric devices they would not train on these clusters.
"""

# Without `from __future__ import annotations`: TorchX reads the component's parameter types as objects, not as text.

import sys
from typing import TYPE_CHECKING

from workloads.facts import Facts
from workloads.launchers import Launched
from workloads.launchers import job as indexed
from workloads.objects.names import Manifest

if TYPE_CHECKING:
    from torchx.specs import AppDef
else:
    AppDef = object  # TorchX reads this word in the source; importing it here would load TorchX in `pulumi up`

SCHEDULER = "torchrec-cloud"
COMPONENT = "workloads/launchers/torchx.py:dlrm"


def launched(facts: Facts, config_map: str) -> Launched:
    """The headless service alone: the Job comes with `torchx run`."""
    return Launched(None, indexed.launched(facts, config_map).before)


def job_manifest(facts: Facts, config_map: str) -> Manifest:
    """What `torchx run` submits: the Job of launcher `job`, to the letter."""
    made = indexed.launched(facts, config_map).job
    assert made is not None, "launcher job always makes a Job"
    return made


def run_line(stack: str) -> str:
    """The command that starts the run."""
    return f"python -m workloads.launchers.torchx run --scheduler {SCHEDULER} {COMPONENT} --stack {stack}"


def dlrm(stack: str = "", facts: str = "") -> AppDef:
    """The stack's sharded DLRM training, as `pulumi up` has prepared it.

    Args:
        stack: stack of Pulumi whose output `job` describes the run
        facts: JSON file with that output instead, from `pulumi stack output job --json`
    """
    from workloads.torchx_scheduler import app_of

    return app_of(stack, facts)


if __name__ == "__main__":
    from workloads.torchx_scheduler import command_line

    sys.exit(command_line(sys.argv[1:]))
