"""The pods of a job: which belong to it, their indices, and the state of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from infra.kube_api import Object
from workloads.runs.diagnosis import NodeCapacity, explain_pod

#: Labels that name the job of a pod, one for each kind. Pods of a JobSet also have the label of a Job, so that is last.
_OWNER_LABELS = ("jobset.sigs.k8s.io/jobset-name", "training.kubeflow.org/job-name", "batch.kubernetes.io/job-name")
_INDEX_LABELS = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")


@dataclass(frozen=True)
class PodState:
    """One pod; `why` explains why it waits or how it failed, None if nothing is wrong."""

    name: str
    index: int | None
    node: str | None
    phase: str
    ready: bool
    restarts: int
    age_seconds: int | None
    why: str | None


def pod_owner(pod: Object) -> str | None:
    """Return the name of the job that owns a pod."""
    labels = pod["metadata"].get("labels") or {}
    return next((str(labels[key]) for key in _OWNER_LABELS if key in labels), None)


def pod_index(pod: Object) -> int | None:
    """Return the index of a pod in its job."""
    metadata = pod["metadata"]
    values = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    return next((int(values[key]) for key in _INDEX_LABELS if str(values.get(key, "")).isdigit()), None)


def pod_phase(pod: Object) -> str:
    """Return the phase of a pod, Pending if it has none yet."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def main_container(pod: Object) -> str:
    """Return the name of the trainer's container: the first one, as sidecars are init containers."""
    return str(pod["spec"]["containers"][0]["name"])


def pods_of_job(pods: Sequence[Object], job: str) -> list[Object]:
    """Return the pods of this job, without the pods of a job that it replaced."""
    return [pod for pod in pods if pod_owner(pod) in (None, job)]


def newest_per_index(pods: Sequence[Object]) -> list[tuple[Object, int]]:
    """Return the newest pod of each index with the number of its predecessors, ordered by index."""
    by_index: dict[object, list[Object]] = {}
    for pod in sorted(pods, key=lambda item: str(item["metadata"].get("creationTimestamp", ""))):
        index = pod_index(pod)
        by_index.setdefault(pod["metadata"]["name"] if index is None else index, []).append(pod)
    newest = [(same[-1], len(same) - 1) for same in by_index.values()]
    return sorted(newest, key=lambda item: (pod_index(item[0]) or 0, str(item[0]["metadata"]["name"])))


def newest_pods(pods: Sequence[Object], job: str) -> list[Object]:
    """Return the newest pod of each index of a job, ordered by index."""
    return [pod for pod, _ in newest_per_index(pods_of_job(pods, job))]


def pod_state(pod: Object, predecessors: int, events: Mapping[str, list[Object]], capacity: NodeCapacity) -> PodState:
    """Return the state of a pod; its replaced predecessors count as restarts."""
    name = str(pod["metadata"]["name"])
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return PodState(
        name=name,
        index=pod_index(pod),
        node=pod["spec"].get("nodeName"),
        phase="Terminating" if pod["metadata"].get("deletionTimestamp") else pod_phase(pod),
        ready=bool(containers) and all(item.get("ready") for item in containers),
        restarts=predecessors + sum(int(item.get("restartCount") or 0) for item in containers),
        age_seconds=age_seconds(pod),
        why=explain_pod(pod, events.get(name, []), capacity),
    )


def age_seconds(item: Object) -> int | None:
    """Return the seconds since an object was created."""
    created = item["metadata"].get("creationTimestamp")
    if not created:
        return None
    return max(0, round((datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()))
