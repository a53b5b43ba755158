"""A training job of any kind: its size, its conditions, whether it is suspended, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.kube_api import KubeApi, Object, api_path
from infra.text import one_line
from workloads.objects.arguments import QUEUE_LABEL
from workloads.runs.pods import PodState

#: The path of the field that suspends a job, by kind.
SUSPEND_PATHS: Mapping[str, tuple[str, ...]] = {
    "Job": ("spec", "suspend"),
    "PyTorchJob": ("spec", "runPolicy", "suspend"),
    "TrainJob": ("spec", "suspend"),
}
_SUCCEEDED, _FAILED, _SUSPENDED = ("Complete", "Succeeded"), "Failed", "Suspended"


def true_conditions(item: Object) -> dict[str, Object]:
    """Return the conditions of an object whose status is True, by type."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return {str(condition["type"]): condition for condition in conditions if condition.get("status") == "True"}


def final_conditions(job: Object) -> list[str]:
    """Return the types of the conditions that end a job; empty while it has not ended."""
    return [kind for kind in true_conditions(job) if kind in (*_SUCCEEDED, _FAILED)]


def expected_pods(kind: str, job: Object) -> int | None:
    """Return how many pods the specification of a job requests."""
    spec = job["spec"]
    if kind == "Job":
        count = spec.get("parallelism")
    elif kind == "PyTorchJob":
        count = sum(int(item.get("replicas") or 1) for item in spec["pytorchReplicaSpecs"].values())
    else:
        count = (spec.get("trainer") or {}).get("numNodes")
    return int(count) if count else None


def min_pods(kind: str, job: Object, num_pods: int) -> int:
    """Return the fewest pods with which a job trains: less than `num_pods` if it is elastic."""
    elastic = job["spec"].get("elasticPolicy") if kind == "PyTorchJob" else None
    return int((elastic or {}).get("minReplicas") or num_pods)


def is_suspended(kind: str, job: Object) -> bool:
    """Return whether the specification of a job suspends it."""
    value: Any = job
    for key in SUSPEND_PATHS[kind]:
        value = (value or {}).get(key)
    return bool(value)


def job_state(kind: str, job: Object, pods: Sequence[PodState], num_pods: int, workload: Object | None) -> str:
    """Return the state of a job: succeeded, failed, queued, stopped, running or waiting."""
    conditions = true_conditions(job)
    if any(name in conditions for name in _SUCCEEDED):
        return "succeeded"
    if _FAILED in conditions:
        return "failed"
    if is_suspended(kind, job) or (_SUSPENDED in conditions and not pods):
        return "queued" if workload and workload["spec"].get("active", True) else "stopped"
    running = sum(pod.phase == "Running" for pod in pods)
    return "running" if running >= max(1, min(num_pods, min_pods(kind, job, num_pods))) else "waiting"


def failure_reason(job: Object) -> str:
    """Return the reason and the message of a failed job."""
    condition = true_conditions(job)[_FAILED]
    return f"{condition.get('reason') or _FAILED}: {one_line(condition.get('message') or 'no message')}"


def find_workload(api: KubeApi, namespace: str, kind: str, job: Object) -> Object | None:
    """Return Kueue's Workload of a job with a queue label; None for other jobs."""
    if QUEUE_LABEL not in (job["metadata"].get("labels") or {}):
        return None
    reference = {"kind": kind, "name": job["metadata"]["name"]}.items()
    for workload in api.items(api_path(namespace, "Workload")):
        if any(reference <= owner.items() for owner in workload["metadata"].get("ownerReferences") or ()):
            return workload
    return None


def queue_message(workload: Object | None) -> str:
    """Return why Kueue has not admitted a job."""
    conditions = ((workload or {}).get("status") or {}).get("conditions") or ()
    found = [item for item in conditions if item.get("type") in ("QuotaReserved", "Admitted", "Evicted")]
    return one_line(found[0].get("message")) if found else "it has not processed the job yet"
