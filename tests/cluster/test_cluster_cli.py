"""`python -m workloads` on a real API server with the real operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_manifests import cpu_node
from cluster_operators import PYTORCHJOB, Operator
from cluster_plane import Plane, wait_for
from cluster_runs import Commands, build_objects, gpu_facts
from test_cluster_product import claim

Nodes = Callable[..., list[str]]
Start = Callable[..., str]
TRAINING = "app.kubernetes.io/component=training"


@pytest.fixture
def run(plane: Plane, namespace: str) -> Commands:
    """Return the commands for the test's namespace."""
    return Commands(plane, namespace)


@pytest.fixture
def start(plane: Plane, namespace: str, operators: Callable[[Operator], None]) -> Iterator[Start]:
    """Return a function that starts the product's job; its pods never end unless annotations change that."""

    def start_job(launcher: str = "job", **annotations: str) -> str:
        """Apply the product's objects and return the name of the job."""
        if launcher == "pytorchjob":
            operators(PYTORCHJOB)
        found = build_objects(gpu_facts(plane, namespace, {"launcher": launcher}), **annotations or {"end": "never"})
        plane.apply([*claim(namespace), *(item for key, item in found.items() if key != "job")])
        plane.apply([found["job"]])
        return str(found["job"]["metadata"]["name"])

    yield start_job
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


def workers(plane: Plane, namespace: str) -> list[dict[str, Any]]:
    """Return the pods that train, without TensorBoard's."""
    found: list[dict[str, Any]] = plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")
    return found


def wait_for_status(run: Commands, state: str, *phases: str) -> dict[str, Any]:
    """Wait until the pods have these phases and the run has this state; return the status."""
    phase = lambda: sorted(pod["status"]["phase"] for pod in workers(run.plane, run.namespace))  # noqa: E731
    wait_for(f"pods {phases}", lambda: phase() == sorted(phases))
    status: dict[str, Any] = wait_for(f"run that is {state}", lambda: (now := run.status())["state"] == state and now)
    assert sorted(pod["phase"] for pod in status["pods"]) == sorted(phases)
    return status


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_status_explains_that_a_pod_waits_for_gpus(
    run: Commands, gpu_nodes: Nodes, start: Start, launcher: str
) -> None:
    (node,) = gpu_nodes(1)
    gpu_nodes(1, cpu_node)
    name = start(launcher)
    status = wait_for_status(run, "waiting", "Running", "Pending")
    assert (status["name"], status["pods_wanted"]) == (name, 2)
    placed = next(pod for pod in status["pods"] if pod["phase"] == "Running")
    assert (placed["node"], placed["ready"], placed["why"]) == (node, True, None)
    pending = next(pod for pod in status["pods"] if pod["phase"] == "Pending")
    reason = "Insufficient nvidia.com/gpu: 1 node has 8 GPUs, 2 are needed"
    why = wait_for(
        "the scheduler's message on GPUs",  # until the claim is bound, it names the claim first
        lambda: next((pod["why"] for pod in run.status()["pods"] if reason in (pod["why"] or "")), None),
    )
    assert "1 node: without the labels that the pod selects (nvidia.com/gpu.present=true)" in why
    text = run("status").stdout
    assert f"run default in {run.namespace}: waiting" in text
    assert reason in text
    assert pending["name"] in text


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_a_stopped_run_frees_its_nodes_and_a_resumed_one_uses_them_again(
    plane: Plane, run: Commands, gpu_nodes: Nodes, start: Start, launcher: str
) -> None:
    gpu_nodes(2)
    name = start(launcher)
    first = {pod["name"] for pod in wait_for_status(run, "running", "Running", "Running")["pods"]}
    uids = {pod["metadata"]["uid"] for pod in workers(plane, run.namespace)}

    assert f"{name} is suspended" in run("stop", "--yes").stdout
    stopped = wait_for_status(run, "stopped")
    assert "resume" in stopped["why"]
    assert "is already stopped" in run("stop", "--yes").stdout

    assert f"{name} resumes" in run("resume").stdout
    again = wait_for_status(run, "running", "Running", "Running")
    assert again["name"] == name, "the same job resumes"
    assert uids.isdisjoint(pod["metadata"]["uid"] for pod in workers(plane, run.namespace))
    assert len(first) == len(again["pods"])
    assert "is not stopped" in run("resume").stdout


def test_stop_without_a_terminal_needs_yes(plane: Plane, run: Commands, gpu_nodes: Nodes, start: Start) -> None:
    gpu_nodes(2)
    start()
    wait_for_status(run, "running", "Running", "Running")
    assert "add --yes" in run("stop", code=2).stderr
    (job,) = plane.get("jobs", "--namespace", run.namespace)
    assert not job["spec"].get("suspend")


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_a_succeeded_run_is_shown_and_cannot_be_stopped(
    run: Commands, gpu_nodes: Nodes, start: Start, launcher: str
) -> None:
    gpu_nodes(2)
    start(launcher, end="Succeeded")
    wait_for("succeeded run", lambda: run.status()["state"] == "succeeded")
    error = run("stop", "--yes", code=2).stderr
    assert "has ended" in error
    assert len(error.strip().splitlines()) == 1, error


def test_a_mistake_in_the_settings_fails_the_run_and_status_shows_the_exit_code(
    run: Commands, gpu_nodes: Nodes, start: Start
) -> None:
    gpu_nodes(2)
    start(end="Failed", **{"exit-code": "2"})
    wait_for("failed job", lambda: any(map(is_failed, run.plane.get("jobs", "--namespace", run.namespace))))
    status = run.status(code=1)
    assert status["state"] == "failed"
    assert status["why"].startswith("PodFailurePolicy: ")
    assert any("exit code 2, a mistake in the settings" in (pod["why"] or "") for pod in status["pods"])


def is_failed(job: dict[str, Any]) -> bool:
    """Return whether a job has the condition Failed."""
    conditions = job.get("status", {}).get("conditions", [])
    return any(item["type"] == "Failed" and item["status"] == "True" for item in conditions)


def test_a_run_that_does_not_exist_is_absent(run: Commands) -> None:
    status = run.status(code=1)
    assert (status["state"], status["pods"]) == ("absent", [])
    assert "has no job in namespace" in run("stop", "--yes", code=2).stderr


def test_logs_of_a_node_that_does_not_answer_are_one_error_for_each_pod(
    run: Commands, gpu_nodes: Nodes, start: Start
) -> None:
    gpu_nodes(2)
    start()
    status = wait_for_status(run, "running", "Running", "Running")
    error = run("logs", code=1).stderr.strip().splitlines()
    assert [line.split(":")[0] for line in error] == [pod["name"] for pod in status["pods"]]


def test_a_user_without_permissions_gets_an_error_in_one_line(plane: Plane, run: Commands) -> None:
    account(plane, run.namespace, "outsider")
    error = run.as_user("outsider")("status", code=2).stderr
    assert len(error.strip().splitlines()) == 1, error
    assert "forbidden" in error
    assert "ask the cluster's owner" in error


def test_a_user_of_one_namespace_sees_why_a_pod_waits(
    plane: Plane, run: Commands, gpu_nodes: Nodes, start: Start, operators: Callable[[Operator], None]
) -> None:
    """Role `view` of Kubernetes lists neither nodes nor the operators' kinds."""
    operators(PYTORCHJOB)
    gpu_nodes(1)
    start()
    account(plane, run.namespace, "viewer")
    plane.kubectl(
        "create", "rolebinding", "viewer", "--clusterrole=view", "--namespace", run.namespace,
        f"--serviceaccount={run.namespace}:viewer",
    )  # fmt: skip
    viewer = run.as_user("viewer")
    reason = "Insufficient nvidia.com/gpu: 1 node with too little of it free, the pod requests 8"
    wait_for("its reason", lambda: any(reason in (pod["why"] or "") for pod in viewer.status()["pods"]))


def account(plane: Plane, namespace: str, name: str) -> None:
    """Create a service account in a namespace and a kubeconfig with its name."""
    plane.kubectl("create", "serviceaccount", name, "--namespace", namespace)
    plane.tokens[name] = plane.kubectl("create", "token", name, "--namespace", namespace).stdout.strip()
    plane.write_kubeconfig(name)
