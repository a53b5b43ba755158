"""`stop` and `resume`: suspend a run, so that its trainer saves and its pods end, and resume it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from infra.kube_api import KubeApiError, Object, api_path
from trainer.exit_codes import EXIT_OK
from workloads.cli.options import open_run
from workloads.errors import UserError
from workloads.runs.jobs import SUSPEND_PATHS, final_conditions, find_workload, is_suspended
from workloads.runs.run import Run

_MAX_TRIES = 5


def stop_command(arguments: argparse.Namespace) -> int:
    """Suspend the job: its pods get SIGTERM and their grace period, in which the trainer saves."""
    run = open_run(arguments)
    kind, job = run.get_job()
    name = str(job["metadata"]["name"])
    _refuse_ended(run, kind, job)
    resume = f"python -m workloads resume {run.options}"
    if _is_stopped(run, kind, job):
        sys.stdout.write(f"{kind} {name} is already stopped; `{resume}` resumes it\n")
        return EXIT_OK
    if not arguments.yes:
        _confirm(run, kind, name)
    _set_stopped(run, kind, job, stopped=True)
    sys.stdout.write(
        f"{kind} {name} is suspended: its pods are terminating, and the trainer saves a checkpoint first\n"
        f"watch it end:  python -m workloads status {run.options} --watch\n"
        f"resume it:     {resume}   (from that checkpoint; `pulumi up` alone leaves it suspended)\n"
    )
    return EXIT_OK


def resume_command(arguments: argparse.Namespace) -> int:
    """Resume a stopped run from its newest checkpoint."""
    run = open_run(arguments)
    kind, job = run.get_job()
    name = str(job["metadata"]["name"])
    _refuse_ended(run, kind, job)
    if not _is_stopped(run, kind, job):
        sys.stdout.write(f"{kind} {name} is not stopped; `python -m workloads status {run.options}` shows its state\n")
        return EXIT_OK
    _set_stopped(run, kind, job, stopped=False)
    sys.stdout.write(
        f"{kind} {name} resumes from the newest checkpoint of run {run.name}\n"
        f"watch it start:  python -m workloads status {run.options} --watch\n"
    )
    return EXIT_OK


def _refuse_ended(run: Run, kind: str, job: Object) -> None:
    """Raise UserError if the job has ended: it cannot be suspended, and the API server's refusal is unclear."""
    conditions = final_conditions(job)
    if conditions:
        raise UserError(
            f"{kind} {job['metadata']['name']} has ended ({', '.join(conditions)}) and cannot be stopped or resumed. "
            f"Fix: to continue training, raise trainer.train.steps or set another job.run, then `{run.start_command}`"
        )


def _is_stopped(run: Run, kind: str, job: Object) -> bool:
    """Return whether the job, or the Workload of a queued job, is suspended."""
    workload = find_workload(run.api, run.namespace, kind, job)
    if workload is not None:
        return workload["spec"].get("active", True) is False
    return is_suspended(kind, job)


def _set_stopped(run: Run, kind: str, job: Object, *, stopped: bool) -> None:
    """Suspend or resume a job; for a queued job set its Workload, as Kueue would revert the job's own field."""
    workload = find_workload(run.api, run.namespace, kind, job)
    if workload is not None:
        path = api_path(run.namespace, "Workload", str(workload["metadata"]["name"]))
        _patch(run, path, {"spec": {"active": not stopped}})
        return
    body: Mapping[str, Any] | bool = stopped
    for key in reversed(SUSPEND_PATHS[kind]):
        body = {key: body}
    assert not isinstance(body, bool), f"no field suspends kind {kind}"
    _patch(run, api_path(run.namespace, kind, str(job["metadata"]["name"])), body)


def _patch(run: Run, path: str, body: Mapping[str, Any]) -> None:
    """Patch an object; retry if a controller wrote it at the same time."""
    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            run.api.patch(path, body)
        except KubeApiError as error:
            if error.status != HTTPStatus.CONFLICT or not tries_left:
                raise
        else:
            return


def _confirm(run: Run, kind: str, name: str) -> None:
    """Let the user type the name of the run; raise UserError if it differs or there is no terminal."""
    if not sys.stdin.isatty():
        raise UserError(f"stopping {kind} {name} needs a confirmation, and stdin is not a terminal. Fix: add --yes")
    sys.stdout.write(f"This stops {kind} {name} for all its users. Type the run's name ({run.name}) to continue: ")
    sys.stdout.flush()
    answer = sys.stdin.readline().strip()
    if answer != run.name:
        raise UserError(f"the name does not match, so nothing was stopped: got {answer!r}; allowed: {run.name!r}")
