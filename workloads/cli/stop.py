"""`stop` and `resume`: hold a run's pods back, which makes the trainer save, and let them come again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from infra.kube_api import KubeApiError, Object, api_path
from workloads.cli import snapshot
from workloads.cli.errors import EXIT_OK, CliError
from workloads.cli.target import Target, open_target

_TRIES = 5


def stop_command(arguments: argparse.Namespace) -> int:
    """Suspend the job: its pods get SIGTERM and their grace period, in which the trainer saves."""
    target = open_target(arguments)
    kind, job = target.found_job()
    name = str(job["metadata"]["name"])
    _refuse_ended(target, kind, job)
    resume = f"python -m workloads resume {target.options}"
    if _held(target, kind, job):
        sys.stdout.write(f"{kind} {name} is stopped already; `{resume}` goes on\n")
        return EXIT_OK
    if not arguments.yes:
        _ask(target, kind, name)
    _switch(target, kind, job, stopped=True)
    sys.stdout.write(
        f"{kind} {name} is suspended: its pods are asked to end, and the trainer saves a checkpoint first\n"
        f"see it end:  python -m workloads status {target.options} --watch\n"
        f"go on:       {resume}   (from that checkpoint; `pulumi up` alone leaves it suspended)\n"
    )
    return EXIT_OK


def resume_command(arguments: argparse.Namespace) -> int:
    """Let the pods of a stopped run come again; they go on from its newest checkpoint."""
    target = open_target(arguments)
    kind, job = target.found_job()
    name = str(job["metadata"]["name"])
    _refuse_ended(target, kind, job)
    if not _held(target, kind, job):
        sys.stdout.write(
            f"{kind} {name} is not stopped; `python -m workloads status {target.options}` says how it is\n"
        )
        return EXIT_OK
    _switch(target, kind, job, stopped=False)
    sys.stdout.write(
        f"{kind} {name} goes on from the newest checkpoint of run {target.run}\n"
        f"see it start:  python -m workloads status {target.options} --watch\n"
    )
    return EXIT_OK


def _refuse_ended(target: Target, kind: str, job: Object) -> None:
    """A job that has ended cannot be held back; patching it would be refused in words that help nobody."""
    listed = (job.get("status") or {}).get("conditions") or ()
    done = {item["type"] for item in listed if item.get("status") == "True"} & {"Complete", "Succeeded", "Failed"}
    if done:
        name = job["metadata"]["name"]
        raise CliError(
            f"{kind} {name} has ended ({', '.join(done)}), there is nothing to stop or resume; to train on, "
            f"raise trainer.train.steps or choose another job.run, then `{target.again}`"
        )


def _held(target: Target, kind: str, job: Object) -> bool:
    workload = snapshot.workload_of(target.api, target.namespace, kind, job)
    if workload is not None:
        return workload["spec"].get("active", True) is False
    return snapshot.suspended(kind, job)


def _switch(target: Target, kind: str, job: Object, *, stopped: bool) -> None:
    """Kueue owns the switch of a job in a queue and would turn it back: there its own object is told."""
    workload = snapshot.workload_of(target.api, target.namespace, kind, job)
    if workload is not None:
        path = api_path(target.namespace, "Workload", str(workload["metadata"]["name"]))
        _patch(target, path, {"spec": {"active": not stopped}})
        return
    body: Mapping[str, Any] | bool = stopped
    for key in reversed(snapshot.SUSPEND[kind]):
        body = {key: body}
    assert not isinstance(body, bool), f"no switch for {kind}"
    _patch(target, api_path(target.namespace, kind, str(job["metadata"]["name"])), body)


def _patch(target: Target, path: str, body: Mapping[str, Any]) -> None:
    """A controller that writes at the same moment makes a conflict, which the next try does not have."""
    for left in reversed(range(_TRIES)):
        try:
            target.api.patch(path, body)
        except KubeApiError as error:
            if error.status != HTTPStatus.CONFLICT or not left:
                raise
        else:
            return


def _ask(target: Target, kind: str, name: str) -> None:
    if not sys.stdin.isatty():
        raise CliError(f"stopping {kind} {name} asks for the run's name, and there is no terminal to ask; add --yes")
    sys.stdout.write(f"This stops {kind} {name} for everybody. Type the run's name ({target.run}) to go on: ")
    sys.stdout.flush()
    answer = sys.stdin.readline().strip()
    if answer != target.run:
        raise CliError(f"{answer!r} is not {target.run!r}: nothing was stopped")
