"""Faults in real pods: each ends with the loss of the run without faults, or with the documented error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cluster_operators import JOBSET, PYTORCHJOB, TRAINER, Operator
from cluster_plane import wait_for
from node import Node
from node_runs import PATIENCE, Run, now, record_measurement

Start = Callable[..., Run]
#: The step of the faults: after the first checkpoints, and long before the end.
WHEN = 250
#: Limit from a fault to the next step: 12 s for a start and 10 s for the Job controller, doubled for shared cores, and
#: a margin. A hang of c10d caused by a survivor's stale store would add two minutes.
AT_MOST_SECONDS = 60.0
#: The operators that create the pods of each launcher, in addition to the controllers of Kubernetes.
OPERATORS: dict[str, tuple[Operator, ...]] = {"job": (), "pytorchjob": (PYTORCHJOB,), "trainjob": (JOBSET, TRAINER)}
TRAINING = "app.kubernetes.io/component=training"
#: Launchers with a c10d rendezvous, which can be repeated while one pod is replaced.
ELASTIC = ("job", "pytorchjob")


@pytest.fixture(scope="module")
def undisturbed(node: Node) -> dict[str, Any]:
    """Return the result of the run without faults."""
    run = Run(node, "undisturbed").start()
    result = run.result()
    run.remove()
    return result


def assert_recovered(run: Run, undisturbed: dict[str, Any], since: float, fault: str) -> None:
    """Assert that the run resumed in time and ended with exactly the numbers of the run without faults."""
    seconds = run.seconds_to_next_step(since)
    result = run.result()
    record_measurement(f"{fault}: next step after {seconds:.0f} s")
    for key in ("state", "step", "position", "world_size", "loss", "auc"):
        assert result[key] == undisturbed[key], f"{key} after: {fault}"
    assert run.events("resume"), "the run did not resume from a checkpoint"
    assert seconds < AT_MOST_SECONDS


@pytest.mark.parametrize("launcher", OPERATORS)
@pytest.mark.parametrize("index", [1, 0])
def test_a_deleted_pod_is_replaced_and_the_run_resumes(
    node: Node,
    start: Start,
    operators: Callable[[Operator], None],
    undisturbed: dict[str, Any],
    index: int,
    launcher: str,
) -> None:
    # Index 0 hosts the rendezvous; the surviving pod must not keep the address of a deleted store.
    for operator in OPERATORS[launcher]:
        operators(operator)
    run = start(launcher)
    run.wait_for_step(WHEN)
    counts, since = run.restart_counts(0), now()
    node.kubectl("delete", "pod", run.pod(index), "--namespace", run.namespace, "--wait=false")
    assert_recovered(run, undisturbed, since, f"launcher {launcher}: pod {index} deleted")
    if index and launcher in ELASTIC:
        assert run.restart_counts(0) == counts, "the healthy pod was replaced, too, which hides a hang"


@pytest.mark.parametrize("index", [1, 0])
def test_a_lost_pod_is_replaced_and_the_run_resumes(
    node: Node, start: Start, undisturbed: dict[str, Any], index: int
) -> None:
    # As on a lost machine: no signal, no save, no closed connection.
    run = start()
    run.wait_for_step(WHEN)
    since = now()
    pod = run.pod(index)
    node.run_inside("sh", "-c", f"kill -KILL {' '.join(map(str, container_processes(node, run, pod)))}")
    node.kubectl("delete", "pod", pod, "--namespace", run.namespace, "--grace-period=0", "--force")
    assert_recovered(run, undisturbed, since, f"pod {index} lost")


def test_a_killed_worker_is_restarted_in_its_pod(node: Node, start: Start, undisturbed: dict[str, Any]) -> None:
    run = start()
    run.wait_for_step(WHEN)
    before = [pod["metadata"]["uid"] for pod in run.pods()]
    since = now()
    # The processes in order of start: tini, the launcher, the worker.
    node.run_inside("kill", "-KILL", str(container_processes(node, run, run.pod(1))[-1]))
    assert_recovered(run, undisturbed, since, "a worker killed")
    assert [pod["metadata"]["uid"] for pod in run.pods()] == before, "torchrun must restart it, not Kubernetes"


def test_an_evicted_pod_saves_in_a_short_grace_period_and_the_run_resumes(
    node: Node, start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start(trainer={"checkpoint": {"every_steps": 0}, "fault": {"save_if_older_seconds": 0}})
    run.wait_for_step(WHEN)
    since = now()
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": run.pod(1), "namespace": run.namespace},
        "deleteOptions": {"gracePeriodSeconds": 15},
    }
    assert evict(node, run, body) == "", "a job that needs all of its pods saves and resumes"
    assert_recovered(run, undisturbed, since, "a pod evicted with 15 s of grace, without a checkpoint before")
    assert run.events("resume")[0]["step"] >= WHEN, "the run must resume from the save at SIGTERM"


@pytest.mark.parametrize("launcher", OPERATORS)
def test_a_drained_node_lets_the_run_save_and_resume_when_it_is_back(
    node: Node,
    start: Start,
    operators: Callable[[Operator], None],
    undisturbed: dict[str, Any],
    launcher: str,
) -> None:
    # As an upgrade of the only node: every pod is evicted, and none fits until the node is back.
    for operator in OPERATORS[launcher]:
        operators(operator)
    # An eviction is not a failure, so a Job may be drained however few of them it survives.
    job = {"max_restarts": 0} if launcher == "job" else {}
    run = start(launcher, job=job, trainer={"checkpoint": {"every_steps": 0}, "fault": {"save_if_older_seconds": 0}})
    run.wait_for_step(WHEN)
    before = {pod["metadata"]["uid"] for pod in run.pods()}
    (machine,) = (item["metadata"]["name"] for item in node.get("nodes"))
    options = ["--delete-emptydir-data", "--ignore-daemonsets", "--timeout=90s", f"--pod-selector={TRAINING}"]
    try:
        drained = node.kubectl("drain", machine, *options, check=False)
        assert drained.returncode == 0, drained.stderr
        assert before.isdisjoint(pod["metadata"]["uid"] for pod in run.pods() if pod["status"]["phase"] == "Running")
    finally:
        node.kubectl("uncordon", machine)
    assert_recovered(run, undisturbed, now(), f"launcher {launcher}: node drained and back")
    assert run.events("resume")[0]["step"] >= WHEN, "the run must resume from the save at SIGTERM"


def test_a_pod_that_exceeds_its_memory_is_killed_and_reported(node: Node, start: Start) -> None:
    run = start(job={"memory_gib": 0.25, "max_restarts": 1})
    wait_for("failed job", lambda: "Failed" in run.conditions(), 240)
    output = run.node.run([*status_command(run)], check=False).stdout
    assert "memory" in output.lower() or "OOM" in output, output


def test_a_full_volume_is_reported_and_saves_resume_when_there_is_space(
    node: Node, start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start(volume_mib=64)
    run.wait_for_step(WHEN)
    since = now()
    filler = f"{run.volume}/filler"
    node.run_inside("sh", "-c", f"cat /dev/zero > {filler} || true")
    failed = wait_for("failed save", lambda: run.events("checkpoint_failed"), 60)[0]
    record_measurement(f"volume full: reported after {failed['time'] - since:.0f} s: {failed['error'][:120]}")
    node.run_inside("rm", filler)
    result = run.result()
    assert result["loss"] == undisturbed["loss"], "training must continue without saves"
    assert any(event["time"] > failed["time"] for event in run.events("checkpoint"))
    assert not run.events("resume")


def test_a_full_volume_ends_the_run_after_the_allowed_failures(node: Node, start: Start) -> None:
    run = start(volume_mib=64, job={"max_restarts": 0}, trainer={"checkpoint": {"every_steps": 50, "max_failures": 2}})
    run.wait_for_step(100)
    node.run_inside("sh", "-c", f"cat /dev/zero > {run.volume}/filler || true")
    wait_for("failed job", lambda: "Failed" in run.conditions(), 120)
    status = run.node.run(status_command(run), check=False)
    assert status.returncode == 1
    assert "2 saves in a row have failed (checkpoint.max_failures 2)" in status.stdout, status.stdout


def test_a_restarted_kubelet_keeps_the_pods_running(node: Node, start: Start, undisturbed: dict[str, Any]) -> None:
    run = start()
    run.wait_for_step(WHEN)
    node.restart("kubelet")
    result = run.result()
    assert result["loss"] == undisturbed["loss"]
    assert not run.events("resume"), "no process may restart"


def test_a_minute_without_the_api_server_does_not_affect_the_run(
    node: Node, start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start()
    run.wait_for_step(WHEN)
    since = now()
    node.halt("kube-apiserver")
    wait_for("a minute", lambda: now() - since > 60, 90)
    node.resume("kube-apiserver")
    wait_for("API server", lambda: node.kubectl("get", "--raw", "/readyz", check=False).returncode == 0)
    # The result and not the Job's condition, which the kubelet and the controller update up to half a minute later.
    (result,) = wait_for("result", lambda: run.events("result"), PATIENCE)
    assert "Failed" not in run.conditions()
    during = [event for event in run.events("train") if since + 5 < event["time"] < since + 60]
    assert during, "training must continue while the API server is down"
    assert (result["step"], result["loss"]) == (undisturbed["step"], undisturbed["loss"])
    assert not run.events("resume"), "no process may restart"
    record_measurement("the API server stopped for 60 s: no step lost")


def container_processes(node: Node, run: Run, pod: str) -> list[int]:
    """Return the process ids, inside the node, of a pod's container, in order of start."""
    found = node.get("pod", pod, "--namespace", run.namespace)
    container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    paths = node.run_inside("sh", "-c", f"find /sys/fs/cgroup -type d -name '*{container}*' | head -n 1").stdout.strip()
    listed = node.run_inside("cat", f"{paths}/cgroup.procs").stdout.split()
    return sorted(int(number) for number in listed if int(number))


def evict(node: Node, run: Run, body: dict[str, Any]) -> str:
    """Request an eviction; return the error, or an empty string."""
    path = f"/api/v1/namespaces/{run.namespace}/pods/{body['metadata']['name']}/eviction"
    done = node.kubectl("create", "--raw", path, "--filename=-", check=False, input=json.dumps(body))
    return done.stderr if done.returncode else ""


def status_command(run: Run) -> list[str]:
    """Return the command `python -m workloads status` for a run."""
    where = ["--kubeconfig", str(run.node.kubeconfig), "--namespace", run.namespace, "--run", "default"]
    return [sys.executable, "-m", "workloads", "status", *where]
