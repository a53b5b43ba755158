"""Training jobs of a simulated cluster: how many pods each has, what they request, and what protects them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_values import at
from engine_world import ACTIVE, Inputs, Resource, World

_JOB, _PYTORCHJOB = "kubernetes:batch/v1:Job", "kubernetes:kubeflow.org/v1:PyTorchJob"
_TRAINJOB = "kubernetes:trainer.kubeflow.org/v1alpha1:TrainJob"
_RUNTIME = "kubernetes:trainer.kubeflow.org/v1alpha1:TrainingRuntime"
_BUDGET = "kubernetes:policy/v1:PodDisruptionBudget"
#: Owners with a scale subresource: only for their pods can a budget have `maxUnavailable` or a percentage
#: (kubernetes.io/docs/concepts/workloads/pods/disruptions, "arbitrary workloads and arbitrary selectors"). The CRD of
#: PyTorchJob has one: kubeflow/trainer v1.9, manifests/base/crds/kubeflow.org_pytorchjobs.yaml.
_WITH_SCALE = (_PYTORCHJOB,)


def training_jobs(world: World) -> list[Resource]:
    """Return the jobs that have pods: neither suspended nor finished."""
    return [job for job in world.of_type(_JOB, _PYTORCHJOB, _TRAINJOB) if job.status == ACTIVE and num_pods(job)]


def finish_jobs(world: World) -> None:
    """End every training job successfully; its pods release their nodes."""
    for job in training_jobs(world):
        job.status = "COMPLETE"


def num_pods(job: Resource) -> int:
    """Return the number of pods, each of which fills a node."""
    spec = job.inputs["spec"]
    if spec.get("suspend") or at(spec, "runPolicy.suspend"):
        return 0
    if job.type == _PYTORCHJOB:
        return sum(one.get("replicas", 1) for one in spec["pytorchReplicaSpecs"].values())
    return int(at(spec, "trainer.numNodes") or spec.get("parallelism", 1))


def requested_resources(world: World, job: Resource) -> set[str]:
    """Return the names of the resources of devices that a pod requests, such as `nvidia.com/gpu`."""
    runtime = at(job.inputs, "spec.runtimeRef.name")
    manifests = [job.inputs, *(one.inputs for one in world.of_type(_RUNTIME) if _name(one) == runtime)]
    names = {name for manifest in manifests for limits in _values("limits", manifest) for name in limits}
    return {name for name in names if "/" in name}


def blocking_budget(world: World) -> str | None:
    """Return the budget that allows no eviction of a running training pod, if there is one."""
    for job in training_jobs(world):
        for budget in world.of_type(_BUDGET):
            same = at(budget.inputs, "metadata.namespace") == at(job.inputs, "metadata.namespace")
            if same and num_allowed_disruptions(job, budget.inputs["spec"]) <= 0:
                return _name(budget)
    return None


def num_allowed_disruptions(job: Resource, spec: Inputs) -> int:
    """Return how many pods of a running job may be evicted at a time; 0 where Kubernetes cannot count its pods."""
    pods, least, most = num_pods(job), spec.get("minAvailable"), spec.get("maxUnavailable")
    if isinstance(least, int):
        return pods - least
    if job.type not in _WITH_SCALE:
        return 0
    return most if isinstance(most, int) else pods


def _name(resource: Resource) -> str:
    return str(at(resource.inputs, "metadata.name"))


def _values(key: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping under this key, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get(key), dict):
            yield value[key]
        for item in value.values():
            yield from _values(key, item)
    elif isinstance(value, list):
        for item in value:
            yield from _values(key, item)
