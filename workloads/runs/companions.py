"""The companions of a training: the dataset's Job, the netcheck's Job and TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from infra.kube_api import KubeApi, Object, api_path
from infra.text import one_line
from workloads.facts import COMPONENT_LABEL, PART_OF
from workloads.runs.diagnosis import NodeCapacity, explain_pod
from workloads.runs.jobs import true_conditions
from workloads.runs.pods import pod_owner, pod_phase, pods_of_job


@dataclass(frozen=True)
class Companion:
    """A companion and its state; `why` explains why it is not ready or not finished."""

    component: str
    name: str
    state: str
    why: str | None = None

    @property
    def summary(self) -> str:
        """Return one clause on an unfinished companion."""
        reason = f": {self.why}" if self.why else ""
        return f"{self.component} is not finished ({self.name}: {self.state}{reason})"


def find_companions(api: KubeApi, namespace: str) -> list[Companion]:
    """Return the companions of a stack."""
    part_of = ",".join(f"{key}={value}" for key, value in PART_OF.items())
    selector = f"{part_of},{COMPONENT_LABEL} in (dataset,netcheck,tensorboard)"
    with ThreadPoolExecutor() as pool:
        kinds = ("Job", "Deployment", "Pod")
        jobs, deployments, pods = pool.map(
            lambda kind: api.items(api_path(namespace, kind), labelSelector=selector), kinds
        )
    return [_from_job(job, pods) for job in jobs] + [_from_deployment(item, pods) for item in deployments]


def first_unfinished(companions: Sequence[Companion]) -> Companion | None:
    """Return the first Job that has to finish before the training starts, None if all have."""
    return next((item for item in companions if item.state != "succeeded" and item.component != "tensorboard"), None)


def _from_job(job: Object, pods: Sequence[Object]) -> Companion:
    """Return the companion that is a Job."""
    name, conditions = str(job["metadata"]["name"]), true_conditions(job)
    component = _component(job)
    if "Complete" in conditions:
        return Companion(component, name, "succeeded")
    own = pods_of_job([pod for pod in pods if pod_owner(pod) == name], name)
    reason = _explain_newest(own)
    if "Failed" in conditions:
        return Companion(component, name, "failed", reason or one_line(conditions["Failed"].get("message") or ""))
    running = any(pod_phase(pod) == "Running" for pod in own)
    return Companion(component, name, "running" if running else "waiting", reason)


def _from_deployment(item: Object, pods: Sequence[Object]) -> Companion:
    """Return the companion that is a Deployment."""
    component, name = _component(item), str(item["metadata"]["name"])
    if (item.get("status") or {}).get("availableReplicas"):
        return Companion(component, name, "running")
    return Companion(component, name, "waiting", _explain_newest([pod for pod in pods if _component(pod) == component]))


def _explain_newest(pods: Sequence[Object]) -> str | None:
    """Return the explanation of the last pod that has one."""
    reasons = (explain_pod(pod, [], NodeCapacity(None, 1)) for pod in reversed(pods))
    return next(filter(None, reasons), None)


def _component(item: Object) -> str:
    """Return the component label of an object."""
    return str((item["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))
