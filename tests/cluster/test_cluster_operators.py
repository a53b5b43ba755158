"""PyTorchJob and TrainJob with the operators that the product installs, their webhooks and permissions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster_manifests import pytorchjob, trainjob
from cluster_operators import JOBSET, PYTORCHJOB, TRAINER, Operator
from cluster_plane import Plane, wait_for
from test_cluster_jobs import condition, pods

Install = Callable[[Operator], None]
Nodes = Callable[..., list[str]]


@pytest.fixture
def training_operator(operators: Install) -> None:
    """Install the training operator v1."""
    operators(PYTORCHJOB)


@pytest.fixture
def trainer(operators: Install) -> None:
    """Install Kubeflow Trainer v2 and JobSet."""
    operators(JOBSET)
    operators(TRAINER)


def environment(pod: dict[str, Any], container: str) -> dict[str, str]:
    """Return the environment of a container."""
    (found,) = (each for each in pod["spec"]["containers"] if each["name"] == container)
    return {each["name"]: each.get("value", "") for each in found.get("env", [])}


def finished(plane: Plane, kind: str, namespace: str, condition_type: str) -> bool:
    """Return whether the job has a condition."""
    return condition(plane.get(kind, "train", "--namespace", namespace), condition_type).get("status") == "True"


def test_the_training_operator_sets_torchruns_nodes_and_processes(
    plane: Plane, namespace: str, gpu_nodes: Nodes, training_operator: None
) -> None:
    gpu_nodes(2)
    plane.apply([pytorchjob(namespace, 2, end="never")])
    found = wait_for("two pods", lambda: len(found := pods(plane, namespace)) == 2 and found)
    for pod in found:
        env = environment(pod, "pytorch")
        assert env["PET_NNODES"] == "1:2", "elastic from one node to two"
        assert env["PET_NPROC_PER_NODE"] == "8"
        assert env["PET_RDZV_BACKEND"] == "c10d"
        assert env["PET_RDZV_ENDPOINT"] == "train-worker-0:23456"


def test_a_pytorchjob_is_placed_on_the_gpu_nodes_and_succeeds(
    plane: Plane, namespace: str, gpu_nodes: Nodes, training_operator: None
) -> None:
    nodes = gpu_nodes(2)
    plane.apply([pytorchjob(namespace, 2, seconds="3s")])
    placed = lambda: sorted(pod["spec"].get("nodeName", "") for pod in pods(plane, namespace))  # noqa: E731
    wait_for(f"one pod on each of {nodes}", lambda: placed() == nodes)
    wait_for("succeeded PyTorchJob", lambda: finished(plane, "pytorchjob", namespace, "Succeeded"))


def test_a_pytorchjob_without_a_container_named_pytorch_is_denied(
    plane: Plane, namespace: str, training_operator: None
) -> None:
    message = plane.rejection(pytorchjob(namespace, 2, container="trainer"))
    assert "validator.pytorchjob.training-operator.kubeflow.org" in message
    assert "must have at least one container with name pytorch" in message


def test_an_unknown_field_of_a_pytorchjob_is_refused(plane: Plane, namespace: str, training_operator: None) -> None:
    job = pytorchjob(namespace, 2)
    job["spec"]["elasticPolicy"]["maxRestart"] = 3
    # kubectl checks the field itself, with another message, until the server publishes the new kind.
    assert "maxRestart" in plane.rejection(job)


def test_a_trainjob_becomes_a_jobset_and_completes_on_the_gpu_nodes(
    plane: Plane, namespace: str, gpu_nodes: Nodes, trainer: None
) -> None:
    nodes = gpu_nodes(2)
    plane.apply(trainjob(namespace, 2, seconds="3s"))
    found = wait_for("two pods", lambda: len(found := pods(plane, namespace)) == 2 and found)
    env = environment(found[0], "node")
    assert env["PET_NNODES"] == "2"
    assert env["PET_NPROC_PER_NODE"] == "8"
    placed = lambda: sorted(pod["spec"].get("nodeName", "") for pod in pods(plane, namespace))  # noqa: E731
    wait_for(f"one pod on each of {nodes}", lambda: placed() == nodes)
    wait_for("completed TrainJob", lambda: finished(plane, "trainjob", namespace, "Complete"))


def test_a_trainjob_with_an_unknown_runtime_is_denied(plane: Plane, namespace: str, trainer: None) -> None:
    _runtime, job = trainjob(namespace, 2)
    job["spec"]["runtimeRef"]["name"] = "none-of-these"
    message = plane.rejection(job)
    assert "validator.trainjob.trainer.kubeflow.org" in message
