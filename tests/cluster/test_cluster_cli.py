"""`python -m workloads` against a real API server and the real operators: what a person sees and does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_manifests import cpu_node
from cluster_operators import PYTORCHJOB, Operator
from cluster_plane import Plane, wait_for
from cluster_runs import Commands, gpu_facts, made
from test_cluster_product import claim

Nodes = Callable[..., list[str]]
Start = Callable[..., str]
TRAINING = "app.kubernetes.io/component=training"


@pytest.fixture
def run(plane: Plane, namespace: str) -> Commands:
    return Commands(plane, namespace)


@pytest.fixture
def start(plane: Plane, namespace: str, operators: Callable[[Operator], None]) -> Iterator[Start]:
    """Apply the product's objects by a launcher; the job's name. Pods never end unless annotations say so."""

    def applied(launcher: str = "job", **annotations: str) -> str:
        if launcher == "pytorchjob":
            operators(PYTORCHJOB)
        found = made(gpu_facts(plane, namespace, {"launcher": launcher}), **annotations or {"end": "never"})
        plane.apply([*claim(namespace), *(item for key, item in found.items() if key != "job")])
        plane.apply([found["job"]])
        return str(found["job"]["metadata"]["name"])

    yield applied
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


def workers(plane: Plane, namespace: str) -> list[dict[str, Any]]:
    """The pods that train; TensorBoard has one of its own beside them."""
    found: list[dict[str, Any]] = plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")
    return found


def seen(run: Commands, state: str, *phases: str) -> dict[str, Any]:
    """The status once the pods are in some phases; asked anew only while the job itself lags behind them."""
    phase = lambda: sorted(pod["status"]["phase"] for pod in workers(run.plane, run.namespace))  # noqa: E731
    wait_for(f"pods {phases}", lambda: phase() == sorted(phases))
    shot: dict[str, Any] = wait_for(f"run that is {state}", lambda: (now := run.status())["state"] == state and now)
    assert sorted(pod["phase"] for pod in shot["pods"]) == sorted(phases)
    return shot


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_status_says_that_the_surplus_pod_waits_for_gpus(
    run: Commands, gpu_nodes: Nodes, start: Start, launcher: str
) -> None:
    (node,) = gpu_nodes(1)
    gpu_nodes(1, cpu_node)
    name = start(launcher)
    shot = seen(run, "waiting", "Running", "Pending")
    assert (shot["name"], shot["pods_wanted"]) == (name, 2)
    placed = next(pod for pod in shot["pods"] if pod["phase"] == "Running")
    assert (placed["node"], placed["ready"], placed["why"]) == (node, True, None)
    held = next(pod for pod in shot["pods"] if pod["phase"] == "Pending")
    wanted = "Insufficient nvidia.com/gpu: 1 node has 8 GPUs, 2 are needed"
    why = wait_for(
        "the scheduler's word on GPUs",  # until the claim is bound, it names that first
        lambda: next((pod["why"] for pod in run.status()["pods"] if wanted in (pod["why"] or "")), None),
    )
    assert "1 node: without the labels that the pod selects (nvidia.com/gpu.present=true)" in why
    text = run("status").stdout
    assert f"run default in {run.namespace}: waiting" in text
    assert wanted in text
    assert held["name"] in text


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_a_stopped_run_gives_its_nodes_back_and_a_resumed_one_takes_them_again(
    plane: Plane, run: Commands, gpu_nodes: Nodes, start: Start, launcher: str
) -> None:
    gpu_nodes(2)
    name = start(launcher)
    first = {pod["name"] for pod in seen(run, "running", "Running", "Running")["pods"]}
    uids = {pod["metadata"]["uid"] for pod in workers(plane, run.namespace)}

    assert f"{name} is suspended" in run("stop", "--yes").stdout
    stopped = seen(run, "stopped")
    assert "resume" in stopped["why"]
    assert "is stopped already" in run("stop", "--yes").stdout

    assert f"{name} goes on" in run("resume").stdout
    again = seen(run, "running", "Running", "Running")
    assert again["name"] == name, "the same job goes on"
    assert uids.isdisjoint(pod["metadata"]["uid"] for pod in workers(plane, run.namespace))
    assert len(first) == len(again["pods"])
    assert "is not stopped" in run("resume").stdout


def test_stop_without_a_terminal_wants_a_yes_and_stops_nothing(
    plane: Plane, run: Commands, gpu_nodes: Nodes, start: Start
) -> None:
    gpu_nodes(2)
    start()
    seen(run, "running", "Running", "Running")
    assert "add --yes" in run("stop", code=2).stderr
    (job,) = plane.get("jobs", "--namespace", run.namespace)
    assert not job["spec"].get("suspend")


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_a_run_that_has_succeeded_is_said_to_and_cannot_be_stopped(
    run: Commands, gpu_nodes: Nodes, start: Start, launcher: str
) -> None:
    gpu_nodes(2)
    start(launcher, end="Succeeded")
    wait_for("succeeded run", lambda: run.status()["state"] == "succeeded")
    said = run("stop", "--yes", code=2).stderr
    assert "has ended" in said
    assert len(said.strip().splitlines()) == 1, said


def test_a_mistake_in_the_settings_fails_the_run_and_status_names_the_exit_code(
    run: Commands, gpu_nodes: Nodes, start: Start
) -> None:
    gpu_nodes(2)
    start(end="Failed", **{"exit-code": "2"})
    wait_for("failed job", lambda: any(map(is_failed, run.plane.get("jobs", "--namespace", run.namespace))))
    shot = run.status(code=1)
    assert shot["state"] == "failed"
    assert shot["why"].startswith("PodFailurePolicy: ")
    assert any("exit code 2, a mistake in the settings" in (pod["why"] or "") for pod in shot["pods"])


def is_failed(job: dict[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(item["type"] == "Failed" and item["status"] == "True" for item in conditions)


def test_a_run_that_is_not_there_is_absent(run: Commands) -> None:
    shot = run.status(code=1)
    assert (shot["state"], shot["pods"]) == ("absent", [])
    assert "has no job in namespace" in run("stop", "--yes", code=2).stderr


def test_logs_of_a_node_that_does_not_answer_are_one_line_for_each_pod(
    run: Commands, gpu_nodes: Nodes, start: Start
) -> None:
    gpu_nodes(2)
    start()
    shot = seen(run, "running", "Running", "Running")
    said = run("logs", code=1).stderr.strip().splitlines()
    assert [line.split(":")[0] for line in said] == [pod["name"] for pod in shot["pods"]]


def test_a_user_without_any_right_is_told_so_in_one_line(plane: Plane, run: Commands) -> None:
    account(plane, run.namespace, "nobody")
    said = run.as_user("nobody")("status", code=2).stderr
    assert len(said.strip().splitlines()) == 1, said
    assert "forbidden" in said
    assert "ask the cluster's owner" in said


def test_a_user_of_one_namespace_sees_why_a_pod_waits(
    plane: Plane, run: Commands, gpu_nodes: Nodes, start: Start, operators: Callable[[Operator], None]
) -> None:
    """`view` of Kubernetes itself lists neither nodes nor the operators' kinds: the rest is there without them."""
    operators(PYTORCHJOB)
    gpu_nodes(1)
    start()
    account(plane, run.namespace, "viewer")
    plane.kubectl(
        "create", "rolebinding", "viewer", "--clusterrole=view", "--namespace", run.namespace,
        f"--serviceaccount={run.namespace}:viewer",
    )  # fmt: skip
    viewer = run.as_user("viewer")
    wanted = "Insufficient nvidia.com/gpu: 1 node too few of it free, the pod wants 8"
    wait_for("its reason", lambda: any(wanted in (pod["why"] or "") for pod in viewer.status()["pods"]))


def account(plane: Plane, namespace: str, name: str) -> None:
    """A service account of a namespace and a kubeconfig under its name."""
    plane.kubectl("create", "serviceaccount", name, "--namespace", namespace)
    plane.tokens[name] = plane.kubectl("create", "token", name, "--namespace", namespace).stdout.strip()
    plane.write_kubeconfig(name)
