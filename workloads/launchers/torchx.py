"""The Indexed Job for TorchX users: `pulumi up` prepares everything, and `torchx run` starts the job.

    python -m workloads.launchers.torchx run --scheduler torchrec-cloud workloads/launchers/torchx.py:dlrm --stack aws

is TorchX's command line (run, status, log, list, cancel) with one more scheduler, `workloads.torchx_adapter`. TorchX's
own `kubernetes` scheduler creates Volcano jobs and builds their pods itself. Without security context, tolerations,
shared memory and fabric devices they would not train on these clusters.
"""

# Without `from __future__ import annotations`: TorchX needs the component's parameter types as objects, not as text.

import sys
from typing import TYPE_CHECKING

from workloads.facts import Facts
from workloads.launchers import JobObjects, job
from workloads.objects.manifest import Manifest
from workloads.torchx_adapter import COMPONENT, SCHEDULER

if TYPE_CHECKING:
    from torchx.specs import AppDef
else:
    AppDef = object  # TorchX looks for this word in the source; an import would load TorchX in `pulumi up`


def build(facts: Facts, config_map: str) -> JobObjects:
    """Return the headless service only; `torchx run` creates the Job."""
    return JobObjects(None, job.build(facts, config_map).dependencies)


def job_manifest(facts: Facts, config_map: str) -> Manifest:
    """Return the Job that `torchx run` submits, which equals the Job of launcher `job`."""
    manifest = job.build(facts, config_map).job
    assert manifest is not None, "launcher job always builds a Job"
    return manifest


def run_line(stack: str) -> str:
    """Return the command that starts the run."""
    return f"python -m workloads.launchers.torchx run --scheduler {SCHEDULER} {COMPONENT} --stack {stack}"


def dlrm(stack: str = "", facts: str = "") -> AppDef:
    """Return the stack's training as `pulumi up` has prepared it.

    Args:
        stack: Pulumi stack whose output `job` describes the run
        facts: JSON file with that output instead, from `pulumi stack output job --json`
    """
    from workloads.torchx_adapter.app import read_app

    return read_app(stack, facts)


if __name__ == "__main__":
    from workloads.torchx_adapter.command import main

    sys.exit(main(sys.argv[1:]))
