"""All manifests against published schemas: Kubernetes' own in strict mode, and those of Kubeflow's packages."""

from __future__ import annotations

import warnings
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models as trainer_models
from workload_facts import CLOUDS, EVERYTHING, LAUNCHERS, facts

from workloads.manifests import build_manifests

#: The versions of Kubernetes that the stacks use.
VERSIONS = ("1.34", "1.35")
#: Kinds of operators; `make test-cluster` checks them with the real definitions on a real API server.
OPERATOR_KINDS = {
    "PyTorchJob",
    "TrainJob",
    "TrainingRuntime",
    "PodMonitor",
    "ResourceFlavor",
    "ClusterQueue",
    "LocalQueue",
}


def build_all(cloud: str, launcher: str) -> list[dict[str, Any]]:
    """Return all objects of a launcher, with every companion."""
    return list(
        build_manifests(facts(cloud, EVERYTHING | {"launcher": launcher}, queued=True, monitored=True)).values()
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_objects_of_kubernetes_kinds_match_their_schema_without_unknown_fields(cloud: str, version: str) -> None:
    # An elastic job also has a disruption budget.
    elastic = build_manifests(facts(cloud, EVERYTHING | {"launcher": "job", "min_nodes": 1})).values()
    every = [*elastic, *(item for launcher in LAUNCHERS for item in build_all(cloud, launcher))]
    own = [item for item in every if item["kind"] not in OPERATOR_KINDS]
    assert {"Job", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= {item["kind"] for item in own}
    for item in own:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_schemas_refuse_a_wrong_type() -> None:
    (job,) = (
        item
        for item in build_all("local", "job")
        if item["kind"] == "Job" and item["metadata"]["name"].startswith("def")
    )
    job["spec"]["backoffLimitPerIndex"] = "ten"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.35", strict=True)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_pods_in_operators_kinds_match_the_schema_of_a_pod(cloud: str) -> None:
    """The models in the operators' packages do not check the fields of a pod."""
    for launcher, kind in (("pytorchjob", "PyTorchJob"), ("trainjob", "TrainingRuntime")):
        (item,) = (one for one in build_all(cloud, launcher) if one["kind"] == kind)
        template = _template(item)
        name = {"name": "x", "namespace": "training"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], **name},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, "1.35", strict=True)


def _template(item: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template of an operator's object."""
    spec = item["spec"]
    if item["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]
    return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_pytorchjob_is_unchanged_by_the_training_operators_model(cloud: str) -> None:
    """The model drops unknown fields, so a misspelt field would be missing afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kubeflow.training import models
        from kubeflow.training.api_client import ApiClient
    (item,) = (one for one in build_all(cloud, "pytorchjob") if one["kind"] == "PyTorchJob")
    client = ApiClient()
    response = type("Response", (), {"data": __import__("json").dumps(item)})()
    parsed = client.deserialize(response, models.KubeflowOrgV1PyTorchJob)
    assert client.sanitize_for_serialization(parsed) == item


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_trainjob_is_unchanged_by_kubeflow_trainers_model(cloud: str) -> None:
    found = {item["kind"]: item for item in build_all(cloud, "trainjob")}
    job = trainer_models.TrainerV1alpha1TrainJob.from_dict(found["TrainJob"])
    runtime = trainer_models.TrainerV1alpha1TrainingRuntime.from_dict(found["TrainingRuntime"])
    assert job is not None
    assert runtime is not None
    assert job.to_dict() == found["TrainJob"]
    assert _without_empty(runtime.to_dict()) == _without_empty(found["TrainingRuntime"])


def _without_empty(value: Any) -> Any:
    """Remove empty lists and maps, which mean the same as their absence."""
    if isinstance(value, dict):
        return {key: inner for key, item in value.items() if (inner := _without_empty(item)) not in ({}, [], None)}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value
