"""The state of a run at one moment: its job, pods and companions, why they wait, and its newest metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from infra.kube_api import KubeApi, KubeApiError, Object, api_path
from infra.text import one_line
from workloads.runs import jobs
from workloads.runs.companions import Companion, find_companions, first_unfinished
from workloads.runs.diagnosis import NodeCapacity
from workloads.runs.metrics import newest_metrics
from workloads.runs.pods import PodState, age_seconds, newest_per_index, pod_phase, pod_state, pods_of_job
from workloads.runs.run import Run


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. `state` is running, waiting, queued, stopped, succeeded, failed or absent.

    The fields are those of `status --json`.
    """

    run: str
    namespace: str
    state: str
    kind: str | None = None
    name: str | None = None
    age_seconds: int | None = None
    why: str | None = None
    pods_wanted: int | None = None
    checkpoints: str | None = None
    pods: Sequence[PodState] = ()
    companions: Sequence[Companion] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Return whether the run has ended, so that nothing changes any more."""
        return self.state in ("succeeded", "failed")


def take_snapshot(run: Run, *, with_metrics: bool = True) -> Snapshot:
    """Return the state of a run; raise KubeApiError if the cluster refuses a request."""
    found = run.find_job()
    pods = run.list_pods()
    companions = find_companions(run.api, run.namespace)
    if found is None:
        state, why = _explain_missing_job(run, companions)
        return Snapshot(run.name, run.namespace, state, why=why, companions=companions, checkpoints=run.checkpoints)
    kind, job = found
    name = str(job["metadata"]["name"])
    own = newest_per_index(pods_of_job(pods, name))
    num_pods = jobs.expected_pods(kind, job) or run.nodes or len(own)
    events = _events_by_object(run.api, run.namespace)
    some_pending = any(pod_phase(pod) == "Pending" for pod, _ in own)
    capacity = NodeCapacity(_allocatable(run.api) if some_pending else None, num_pods)
    view = _JobView(
        run=run,
        kind=kind,
        job=job,
        num_pods=num_pods,
        pods=[pod_state(pod, predecessors, events, capacity) for pod, predecessors in own],
        companions=companions,
        events=events.get(name, []),
        workload=jobs.find_workload(run.api, run.namespace, kind, job),
    )
    return Snapshot(
        run=run.name,
        namespace=run.namespace,
        state=view.state,
        kind=kind,
        name=name,
        age_seconds=age_seconds(job),
        why=view.explain(),
        pods_wanted=num_pods,
        checkpoints=run.checkpoints,
        pods=view.pods,
        companions=companions,
        metrics=newest_metrics(run.api, run.namespace, [pod for pod, _ in own]) if with_metrics else {},
    )


@dataclass(frozen=True)
class _JobView:
    """A run's job with everything that explains its state."""

    run: Run
    kind: str
    job: Object
    num_pods: int
    pods: Sequence[PodState]
    companions: Sequence[Companion]
    events: Sequence[Object]
    workload: Object | None

    @property
    def state(self) -> str:
        """Return the state of the job."""
        return jobs.job_state(self.kind, self.job, self.pods, self.num_pods, self.workload)

    def explain(self) -> str | None:
        """Return why the run is not running, None if it runs or its pods explain it themselves."""
        state = self.state
        if state == "stopped":
            return f"suspended; `python -m workloads resume {self.run.options}` continues from the last checkpoint"
        if state == "queued":
            return f"Kueue has not admitted it: {jobs.queue_message(self.workload)}"
        if state == "failed":
            failed = (f"; pod {pod.name}: {pod.why}" for pod in self.pods if pod.why and pod.phase == "Failed")
            return jobs.failure_reason(self.job) + next(failed, "")
        if state == "waiting" and not self.pods:
            return self._explain_missing_pods()
        return None

    def _explain_missing_pods(self) -> str:
        """Return why a job has no pods yet."""
        warnings = [event for event in self.events if event.get("type") == "Warning"]
        if warnings:
            return f"{warnings[-1].get('reason')}: {one_line(warnings[-1].get('message'))}"
        unfinished = first_unfinished(self.companions)
        if unfinished:
            return unfinished.summary
        if self.kind != "Job" and not (self.job.get("status") or {}).get("conditions"):
            return f"no operator has processed this {self.kind}: is the operator for {self.kind} installed and running?"
        return "no pod was created yet"


def _explain_missing_job(run: Run, companions: Sequence[Companion]) -> tuple[str, str]:
    """Return the state and the reason of a run without a job; the job is created after its companions finish."""
    unfinished = first_unfinished(companions)
    if unfinished:
        return "waiting", f"{unfinished.summary}; the run's job starts after it"
    return "absent", f"no job of this run; `{run.start_command}` starts it"


def _events_by_object(api: KubeApi, namespace: str) -> dict[str, list[Object]]:
    """Return events by the name of their object, the newest last; empty if these credentials may not list events."""
    try:
        found = api.items(api_path(namespace, "Event"))
    except KubeApiError as error:
        if error.status != HTTPStatus.FORBIDDEN:  # the conditions still explain most problems
            raise
        return {}
    by_name: dict[str, list[Object]] = {}
    for event in sorted(found, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or "")):
        by_name.setdefault(str((event.get("involvedObject") or {}).get("name")), []).append(event)
    return by_name


def _allocatable(api: KubeApi) -> list[Mapping[str, str]] | None:
    """Return the allocatable resources of each node, None if these credentials may not list nodes."""
    try:
        nodes = api.items("/api/v1/nodes")
    except KubeApiError as error:
        if error.status != HTTPStatus.FORBIDDEN:  # a user of one namespace may not list nodes
            raise
        return None
    return [(node.get("status") or {}).get("allocatable") or {} for node in nodes]
