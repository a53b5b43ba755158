"""How a run is at one moment: its job, its pods, what they wait for, its companions, its newest numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from infra.kube_api import KubeApi, KubeApiError, Object, api_path
from infra.text import one_line
from workloads.cli import metrics
from workloads.cli.target import Target
from workloads.cli.why import Room, explain
from workloads.facts import COMPONENT_LABEL, PART_OF
from workloads.objects.arguments import QUEUE_LABEL

#: Where each kind keeps the switch that holds its pods back.
SUSPEND: Mapping[str, tuple[str, ...]] = {
    "Job": ("spec", "suspend"),
    "PyTorchJob": ("spec", "runPolicy", "suspend"),
    "TrainJob": ("spec", "suspend"),
}
#: Labels that name the job of a pod, one for each kind.
_OWNER = ("batch.kubernetes.io/job-name", "training.kubeflow.org/job-name", "jobset.sigs.k8s.io/jobset-name")
_INDEX = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")
_DONE, _FAILED, _HELD = ("Complete", "Succeeded"), ("Failed",), ("Suspended",)
_ENDED = ("succeeded", "failed")


@dataclass(frozen=True)
class PodState:
    """One pod; `why` says what it waits for or how it ended, None where nothing is wrong."""

    name: str
    index: int | None
    node: str | None
    phase: str
    ready: bool
    restarts: int
    age_seconds: int | None
    why: str | None


@dataclass(frozen=True)
class Companion:
    """A helper beside the training: the dataset's Job, the netcheck's, TensorBoard."""

    component: str
    name: str
    state: str
    why: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. `state`: running, waiting, queued, stopped, succeeded, failed or absent."""

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
    def ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.state in _ENDED


def take(target: Target, *, with_metrics: bool = True) -> Snapshot:
    """Look at everything once. Raises CliError where the cluster does not let us."""
    api, namespace = target.api, target.namespace
    found = target.job()
    pods = api.items(api_path(namespace, "Pod"), labelSelector=target.selector)
    helpers = companions(api, namespace)
    if found is None:
        state, why = _without_job(target, helpers)
        return Snapshot(target.run, namespace, state, why=why, companions=helpers, checkpoints=target.checkpoints)
    kind, job = found
    own = newest_of_each(of_job(pods, str(job["metadata"]["name"])))
    wanted = wanted_pods(kind, job) or target.nodes or len(own)
    events = _events(api, namespace)
    room = Room(_nodes(api) if any(_phase(pod) == "Pending" for pod, _ in own) else None, wanted)
    states = [_pod_state(pod, earlier, events, room) for pod, earlier in own]
    workload = workload_of(api, namespace, kind, job)
    state = _state(kind, job, states, wanted, workload)
    return Snapshot(
        run=target.run,
        namespace=namespace,
        state=state,
        kind=kind,
        name=str(job["metadata"]["name"]),
        age_seconds=_age(job),
        why=_why(target, kind, job, state, states, helpers, events.get(str(job["metadata"]["name"]), []), workload),
        pods_wanted=wanted,
        checkpoints=target.checkpoints,
        pods=states,
        companions=helpers,
        metrics=metrics.newest(api, namespace, [pod for pod, _ in own]) if with_metrics else {},
    )


def _without_job(target: Target, helpers: Sequence[Companion]) -> tuple[str, str]:
    """State and reason where there is no job: one that comes after a check or a copy is waiting."""
    unfinished = _unfinished(helpers)
    if unfinished:
        return "waiting", f"{_told(unfinished)}; the job of the run comes after it"
    return "absent", f"no job of this run; `{target.again}` starts it"


def _unfinished(helpers: Sequence[Companion]) -> Companion | None:
    return next((item for item in helpers if item.state != "succeeded" and item.component != "tensorboard"), None)


def _told(helper: Companion) -> str:
    more = f": {helper.why}" if helper.why else ""
    return f"{helper.component} is not finished ({helper.name}: {helper.state}{more})"


# --- pods ------------------------------------------------------------------------------------------------------------


def of_job(pods: Sequence[Object], job: str) -> list[Object]:
    """The pods of this job, without those of a job that it replaced."""
    return [pod for pod in pods if _owner(pod) in (None, job)]


def newest_of_each(pods: Sequence[Object]) -> list[tuple[Object, int]]:
    """One pod for each index, the newest, and how many went before it; in the order of the indices."""
    by_index: dict[object, list[Object]] = {}
    for pod in sorted(pods, key=lambda item: str(item["metadata"].get("creationTimestamp", ""))):
        index = index_of(pod)
        by_index.setdefault(pod["metadata"]["name"] if index is None else index, []).append(pod)
    newest = [(same[-1], len(same) - 1) for same in by_index.values()]
    return sorted(newest, key=lambda item: (index_of(item[0]) or 0, str(item[0]["metadata"]["name"])))


def index_of(pod: Object) -> int | None:
    """The pod's number in its job, from the label of whoever made it."""
    metadata = pod["metadata"]
    words = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    return next((int(words[key]) for key in _INDEX if str(words.get(key, "")).isdigit()), None)


def _owner(pod: Object) -> str | None:
    labels = pod["metadata"].get("labels") or {}
    # A JobSet's Job has a name of its own, so the JobSet's label comes first.
    return next((str(labels[key]) for key in reversed(_OWNER) if key in labels), None)


def _pod_state(pod: Object, earlier: int, events: Mapping[str, list[Object]], room: Room) -> PodState:
    status, name = pod.get("status") or {}, str(pod["metadata"]["name"])
    containers = status.get("containerStatuses") or ()
    return PodState(
        name=name,
        index=index_of(pod),
        node=pod["spec"].get("nodeName"),
        phase="Terminating" if pod["metadata"].get("deletionTimestamp") else _phase(pod),
        ready=bool(containers) and all(item.get("ready") for item in containers),
        restarts=earlier + sum(int(item.get("restartCount") or 0) for item in containers),
        age_seconds=_age(pod),
        why=explain(pod, events.get(name, []), room),
    )


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _events(api: KubeApi, namespace: str) -> dict[str, list[Object]]:
    """Events by the name of what they are about, the newest last; none where these credentials may not read them."""
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


def _nodes(api: KubeApi) -> list[Mapping[str, str]] | None:
    try:
        nodes = api.items("/api/v1/nodes")
    except KubeApiError as error:
        if error.status != HTTPStatus.FORBIDDEN:  # a user of one namespace may not list nodes
            raise
        return None
    return [(node.get("status") or {}).get("allocatable") or {} for node in nodes]


# --- the job ---------------------------------------------------------------------------------------------------------


def wanted_pods(kind: str, job: Object) -> int | None:
    """How many pods the job's specification asks for."""
    spec = job["spec"]
    if kind == "Job":
        found = spec.get("parallelism")
    elif kind == "PyTorchJob":
        found = sum(int(item.get("replicas") or 1) for item in spec["pytorchReplicaSpecs"].values())
    else:
        found = (spec.get("trainer") or {}).get("numNodes")
    return int(found) if found else None


def suspended(kind: str, job: Object) -> bool:
    """Whether the specification holds the pods back."""
    node: Any = job
    for key in SUSPEND[kind]:
        node = (node or {}).get(key)
    return bool(node)


def _conditions(job: Object) -> dict[str, Object]:
    listed = (job.get("status") or {}).get("conditions") or ()
    return {str(item["type"]): item for item in listed if item.get("status") == "True"}


def _state(kind: str, job: Object, pods: Sequence[PodState], wanted: int, workload: Object | None) -> str:
    true = _conditions(job)
    if any(name in true for name in _DONE):
        return "succeeded"
    if any(name in true for name in _FAILED):
        return "failed"
    if suspended(kind, job) or (any(name in true for name in _HELD) and not pods):
        return "queued" if workload and (workload["spec"].get("active", True)) else "stopped"
    running = sum(pod.phase == "Running" for pod in pods)
    return "running" if running >= max(1, min(wanted, least_pods(kind, job, wanted))) else "waiting"


def least_pods(kind: str, job: Object, wanted: int) -> int:
    """Pods with which the job trains: fewer than it wants where it is elastic."""
    elastic = job["spec"].get("elasticPolicy") if kind == "PyTorchJob" else None
    return int((elastic or {}).get("minReplicas") or wanted)


def _why(
    target: Target,
    kind: str,
    job: Object,
    state: str,
    pods: Sequence[PodState],
    helpers: Sequence[Companion],
    events: Sequence[Object],
    workload: Object | None,
) -> str | None:
    """Why the run is not running; what only the job knows. The pods' own reasons stand beside them."""
    if state == "stopped":
        return f"suspended; `python -m workloads resume {target.options}` goes on from the last checkpoint"
    if state == "queued":
        return f"Kueue has not admitted it: {_queue_message(workload)}"
    if state == "failed":
        condition = next(iter(item for key, item in _conditions(job).items() if key in _FAILED))
        told = f"{condition.get('reason') or 'Failed'}: {one_line(condition.get('message') or 'nothing says why')}"
        blamed = next((f"; pod {pod.name}: {pod.why}" for pod in pods if pod.why and pod.phase == "Failed"), "")
        return told + blamed
    if state != "waiting" or pods:
        return None
    warnings = [event for event in events if event.get("type") == "Warning"]
    if warnings:
        return f"{warnings[-1].get('reason')}: {one_line(warnings[-1].get('message'))}"
    unfinished = _unfinished(helpers)
    if unfinished:
        return _told(unfinished)
    if kind != "Job" and not (job.get("status") or {}).get("conditions"):
        return f"no operator has looked at this {kind} yet: is the one for {kind} installed and running?"
    return "no pod has been made yet"


def workload_of(api: KubeApi, namespace: str, kind: str, job: Object) -> Object | None:
    """Kueue's object for a job that waits in a queue; None for any other job."""
    if QUEUE_LABEL not in (job["metadata"].get("labels") or {}):
        return None
    wanted = {"kind": kind, "name": job["metadata"]["name"]}.items()
    for workload in api.items(api_path(namespace, "Workload")):
        if any(wanted <= owner.items() for owner in workload["metadata"].get("ownerReferences") or ()):
            return workload
    return None


def _queue_message(workload: Object | None) -> str:
    listed = ((workload or {}).get("status") or {}).get("conditions") or ()
    told = [item for item in listed if item.get("type") in ("QuotaReserved", "Admitted", "Evicted")]
    return one_line(told[0].get("message")) if told else "it has not looked at the job yet"


# --- companions ------------------------------------------------------------------------------------------------------


def companions(api: KubeApi, namespace: str) -> list[Companion]:
    """The helpers of the stack, with why they are not finished."""
    part_of = ",".join(f"{key}={value}" for key, value in PART_OF.items())
    selector = f"{part_of},{COMPONENT_LABEL} in (dataset,netcheck,tensorboard)"
    with ThreadPoolExecutor() as pool:
        kinds = ("Job", "Deployment", "Pod")
        lists = pool.map(lambda kind: api.items(api_path(namespace, kind), labelSelector=selector), kinds)
        jobs, deployments, pods = lists
    found = [_helper_job(job, pods) for job in jobs]
    return found + [_deployment(item, pods) for item in deployments]


def _helper_job(job: Object, pods: Sequence[Object]) -> Companion:
    name, true = str(job["metadata"]["name"]), _conditions(job)
    state = "succeeded" if "Complete" in true else "failed" if "Failed" in true else "running"
    why = one_line(true["Failed"].get("message") or "") if state == "failed" else None
    own = of_job([pod for pod in pods if _owner(pod) == name], name)
    told = _first_why(own)
    if state == "running" and not any(_phase(pod) == "Running" for pod in own):
        state = "waiting"
    return Companion(_component(job), name, state, told or why if state != "succeeded" else None)


def _deployment(item: Object, pods: Sequence[Object]) -> Companion:
    component = _component(item)
    ready = bool((item.get("status") or {}).get("availableReplicas"))
    own = [pod for pod in pods if _component(pod) == component]
    state = "running" if ready else "waiting"
    return Companion(component, str(item["metadata"]["name"]), state, None if ready else _first_why(own))


def _first_why(pods: Sequence[Object]) -> str | None:
    reasons = (explain(pod, [], Room(None, 1)) for pod in reversed(pods))
    return next(filter(None, reasons), None)


def _component(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))


def _age(item: Object) -> int | None:
    """Seconds since the object was made."""
    made = item["metadata"].get("creationTimestamp")
    if not made:
        return None
    return max(0, round((datetime.now(UTC) - datetime.fromisoformat(made)).total_seconds()))
