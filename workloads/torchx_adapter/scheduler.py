"""TorchX's scheduler for these clusters: it submits an AppDef as an Indexed Job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from torchx import specs
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, filter_regex

from infra.kube_api import KubeApi, KubeApiError, api_path
from workloads.errors import UserError
from workloads.facts import COMPONENT_LABEL, PART_OF, RUN_LABEL
from workloads.objects.manifest import TRAINING, Manifest
from workloads.runs.jobs import true_conditions
from workloads.runs.outputs import stack_outputs
from workloads.runs.pods import main_container, newest_per_index, pod_index
from workloads.runs.run import Run
from workloads.runs.snapshot import take_snapshot
from workloads.torchx_adapter import SCHEDULER
from workloads.torchx_adapter.app import ROLE, to_job

_STATES = {
    "running": specs.AppState.RUNNING,
    "waiting": specs.AppState.PENDING,
    "queued": specs.AppState.PENDING,
    "stopped": specs.AppState.PENDING,
    "succeeded": specs.AppState.SUCCEEDED,
    "failed": specs.AppState.FAILED,
}
_PHASES = {
    "Pending": specs.AppState.PENDING,
    "Running": specs.AppState.RUNNING,
    "Succeeded": specs.AppState.SUCCEEDED,
    "Failed": specs.AppState.FAILED,
}


def create_scheduler(session_name: str, **_: object) -> IndexedJobScheduler:
    """Return the scheduler; TorchX calls this function."""
    return IndexedJobScheduler(session_name)


class IndexedJobScheduler(Scheduler[Mapping[str, Any]]):
    """Submits, describes, lists, cancels and reads Indexed Jobs.

    The ID of an application is `<stack>:<namespace>:<job>`; without a stack it is in the current context of
    $KUBECONFIG.
    """

    def __init__(self, session_name: str) -> None:
        """Create the scheduler; clients are created on first use."""
        super().__init__(SCHEDULER, session_name)
        self._apis: dict[str, KubeApi] = {}

    def _submit_dryrun(self, app: specs.AppDef, cfg: Mapping[str, Any]) -> specs.AppDryRunInfo[Manifest]:
        """Return the Job with the current values of the AppDef."""
        del cfg
        return specs.AppDryRunInfo(to_job(app), lambda manifest: json.dumps(manifest, indent=2))

    def schedule(self, dryrun_info: specs.AppDryRunInfo[Manifest]) -> str:
        """Create the Job and return its application ID; raise UserError if it already exists."""
        app, manifest = dryrun_info._app, dryrun_info.request
        assert app is not None, "submit_dryrun keeps the AppDef"
        stack = app.roles[0].metadata[SCHEDULER]["stack"]
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        app_id = _app_id(stack, manifest)
        try:
            self._api(stack).create(api_path(namespace, "Job"), manifest)
        except KubeApiError as error:
            if error.status == HTTPStatus.CONFLICT:
                fix = f"torchx cancel {SCHEDULER}://{self.session_name}/{app_id}, or change a setting"
                raise UserError(f"job {name} already exists. Fix: {fix}") from None
            raise
        return app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the state of the Job and of each pod, None if the Job does not exist."""
        stack, namespace, name = _parse_app_id(app_id)
        api = self._api(stack)
        job = api.find(api_path(namespace, "Job", name))
        if job is None:
            return None
        run = Run(api, namespace, str(job["metadata"]["labels"][RUN_LABEL]), job_kind="Job", job_name=name)
        snapshot = take_snapshot(run, with_metrics=False)
        replicas = [
            specs.ReplicaStatus(
                id=pod.index or 0,
                state=_PHASES.get(pod.phase, specs.AppState.UNKNOWN),
                role=ROLE,
                hostname=pod.node or "",
                structured_error_msg=pod.why or specs.NONE,
            )
            for pod in snapshot.pods
        ]
        container = job["spec"]["template"]["spec"]["containers"][0]
        return DescribeAppResponse(
            app_id=app_id,
            state=_STATES[snapshot.state],
            num_restarts=sum(pod.restarts for pod in snapshot.pods),
            msg=snapshot.why or next((pod.why for pod in snapshot.pods if pod.why), specs.NONE),
            roles_statuses=[specs.RoleStatus(ROLE, replicas)],
            roles=[specs.Role(ROLE, container["image"], num_replicas=int(job["spec"]["completions"]))],
        )

    def list(self) -> list[ListAppResponse]:
        """Return the training Jobs in the cluster of the stack in $PULUMI_STACK, or of $KUBECONFIG."""
        stack = os.environ.get("PULUMI_STACK", "")
        part_of = ",".join(f"{key}={value}" for key, value in PART_OF.items())
        selector = f"{part_of},{COMPONENT_LABEL}={TRAINING}"
        jobs = self._api(stack).items("/apis/batch/v1/jobs", labelSelector=selector)
        return [ListAppResponse(app_id=_app_id(stack, job), state=_state_without_pods(job)) for job in jobs]

    def _cancel_existing(self, app_id: str) -> None:
        """Delete the Job; its pods get SIGTERM and save, and another `torchx run` resumes the run."""
        stack, namespace, name = _parse_app_id(app_id)
        self._api(stack).delete(api_path(namespace, "Job", name))

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Return the lines of the newest pod of index `k`."""
        if streams not in (None, Stream.COMBINED) or until is not None:
            message = f"Kubernetes splits no streams and ends no log at a time: got {streams=}, {until=}"
            raise ValueError(f"{message}. Fix: leave both options out")
        stack, namespace, name = _parse_app_id(app_id)
        api = self._api(stack)
        pods = api.items(api_path(namespace, "Pod"), labelSelector=f"batch.kubernetes.io/job-name={name}")
        found = [pod for pod, _ in newest_per_index(pods) if pod_index(pod) == k]
        if not found:
            raise UserError(f"{role_name}/{k} has no pod: job {name} has {len(pods)} pods")
        query = {"container": main_container(found[0])} | ({"follow": "true"} if should_tail else {})
        if since is not None:
            query["sinceTime"] = since.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        path = f"{api_path(namespace, 'Pod', str(found[0]['metadata']['name']))}/log"
        lines = (f"{line}\n" for line in api.lines(path, **query))
        return filter_regex(regex, lines) if regex else lines

    def _api(self, stack: str) -> KubeApi:
        """Return the client of a stack's cluster; an empty stack stands for $KUBECONFIG."""
        if stack not in self._apis:
            if stack:
                fix = f"log in to the cloud again, and run `pulumi up --stack {stack}`"
                self._apis[stack] = KubeApi.from_text(str(stack_outputs(stack).get("kubeconfig", "")), fix)
            else:
                default = Path.home() / ".kube" / "config"
                self._apis[stack] = KubeApi.from_file(os.environ.get("KUBECONFIG", str(default)), None)
        return self._apis[stack]


def _app_id(stack: str, job: Mapping[str, Any]) -> str:
    """Return the application ID of a Job."""
    return f"{quote(stack, safe='')}:{job['metadata']['namespace']}:{job['metadata']['name']}"


def _parse_app_id(app_id: str) -> tuple[str, str, str]:
    """Return the stack, the namespace and the Job of an application ID."""
    stack, _, rest = app_id.partition(":")
    namespace, colon, name = rest.partition(":")
    if not colon:
        allowed = "STACK:NAMESPACE:JOB, as `list` prints them"
        raise UserError(f"not an application of {SCHEDULER}: got {app_id!r}; allowed: {allowed}")
    return unquote(stack), namespace, name


def _state_without_pods(job: Mapping[str, Any]) -> specs.AppState:
    """Return the state of a Job from its own status only."""
    conditions = true_conditions(job)
    if "Complete" in conditions:
        return specs.AppState.SUCCEEDED
    if "Failed" in conditions:
        return specs.AppState.FAILED
    return specs.AppState.RUNNING if (job.get("status") or {}).get("ready") else specs.AppState.PENDING
