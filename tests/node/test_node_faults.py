"""Faults in real pods: each ends with the loss of the undisturbed run, or with the error that is documented."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cluster_operators import JOBSET, PYTORCHJOB, TRAINER, Operator
from cluster_plane import wait_for
from node import Node
from node_runs import PATIENCE, Run, now, told

Start = Callable[..., Run]
#: The step at which faults come: after the first checkpoints, and long before the end.
WHEN = 250
#: Seconds that a fault may cost until the next step: twelve of a start, ten that the Job controller waits, and as much
#: again for two shared cores. The c10d hang that a survivor's stale store causes costs a minute more, twice.
AT_MOST_SECONDS = 60.0
#: Who makes the pods of each launcher, besides Kubernetes' own controllers.
OPERATORS: dict[str, tuple[Operator, ...]] = {"job": (), "pytorchjob": (PYTORCHJOB,), "trainjob": (JOBSET, TRAINER)}
#: Those whose processes meet by c10d's store and so can meet again while one pod is replaced.
MEETING_AGAIN = ("job", "pytorchjob")


@pytest.fixture(scope="module")
def undisturbed(node: Node) -> dict[str, Any]:
    """The result of the run that nothing happens to."""
    run = Run(node, "undisturbed").start()
    result = run.result()
    run.remove()
    return result


def recovered(run: Run, undisturbed: dict[str, Any], since: float, fault: str) -> None:
    """The run went on in time and ended with the undisturbed run's numbers, to the last bit."""
    seconds = run.seconds_to_next_step(since)
    result = run.result()
    told(f"{fault}: next step after {seconds:.0f} s")
    for key in ("state", "step", "position", "world_size", "loss", "auc"):
        assert result[key] == undisturbed[key], f"{key} after: {fault}"
    assert run.events("resume"), "it must have gone on from a checkpoint"
    assert seconds < AT_MOST_SECONDS


@pytest.mark.parametrize("launcher", OPERATORS)
@pytest.mark.parametrize("index", [1, 0])
def test_a_deleted_pod_is_replaced_and_the_run_goes_on(
    node: Node,
    start: Start,
    operators: Callable[[Operator], None],
    undisturbed: dict[str, Any],
    index: int,
    launcher: str,
) -> None:
    """Index 0 keeps the rendezvous; the survivor of the other must not keep the address of a store that has gone."""
    for operator in OPERATORS[launcher]:
        operators(operator)
    run = start(launcher)
    run.wait_for_step(WHEN)
    keeper, since = run.lives(0), now()
    node.kubectl("delete", "pod", run.pod(index), "--namespace", run.namespace, "--wait=false")
    recovered(run, undisturbed, since, f"launcher {launcher}: pod {index} deleted")
    if index and launcher in MEETING_AGAIN:
        assert run.lives(0) == keeper, "the hang ends with both pods given up, which would hide it from the numbers"


@pytest.mark.parametrize("index", [1, 0])
def test_a_pod_that_goes_without_grace_is_replaced_and_the_run_goes_on(
    node: Node, start: Start, undisturbed: dict[str, Any], index: int
) -> None:
    """A lost machine: no signal, no save, no farewell to the others."""
    run = start()
    run.wait_for_step(WHEN)
    since = now()
    pod = run.pod(index)
    node.within("sh", "-c", f"kill -KILL {' '.join(map(str, processes(node, run, pod)))}")
    node.kubectl("delete", "pod", pod, "--namespace", run.namespace, "--grace-period=0", "--force")
    recovered(run, undisturbed, since, f"pod {index} lost")


def test_a_killed_worker_is_started_again_in_its_pod(node: Node, start: Start, undisturbed: dict[str, Any]) -> None:
    run = start()
    run.wait_for_step(WHEN)
    before = [pod["metadata"]["uid"] for pod in run.pods()]
    since = now()
    # The last one that started is the worker: tini, the launcher, the worker.
    node.within("kill", "-KILL", str(processes(node, run, run.pod(1))[-1]))
    recovered(run, undisturbed, since, "a worker killed")
    assert [pod["metadata"]["uid"] for pod in run.pods()] == before, "torchrun restarts it, not Kubernetes"


def test_an_evicted_pod_saves_within_a_short_grace_and_the_run_goes_on(
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
    refused = evict(node, run, body)
    assert "disruption budget" in refused, "a job that cannot train with fewer pods is protected from a drain"
    node.kubectl("delete", "poddisruptionbudget", "--all", "--namespace", run.namespace)
    assert evict(node, run, body) == ""
    recovered(run, undisturbed, since, "a pod evicted with 15 s of grace, without a checkpoint before")
    assert run.events("resume")[0]["step"] >= WHEN, "the save that SIGTERM asked for is what it went on from"


def test_a_pod_beyond_its_memory_is_killed_named_and_replaced(node: Node, start: Start) -> None:
    run = start(job={"memory_gib": 0.25, "max_restarts": 1})
    wait_for("failed job", lambda: "Failed" in run.conditions(), 240)
    told = run.node.run([*status_command(run)], check=False).stdout
    assert "memory" in told.lower() or "OOM" in told, told


def test_a_full_volume_is_told_and_saves_go_on_once_there_is_room(
    node: Node, start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start(volume_mib=64)
    run.wait_for_step(WHEN)
    since = now()
    filler = f"{run.volume}/filler"
    node.within("sh", "-c", f"cat /dev/zero > {filler} || true")
    failed = wait_for("failed save", lambda: run.events("checkpoint_failed"), 60)[0]
    told(f"volume full: told after {failed['time'] - since:.0f} s: {failed['error'][:120]}")
    node.within("rm", filler)
    result = run.result()
    assert result["loss"] == undisturbed["loss"], "training went on meanwhile"
    assert any(event["time"] > failed["time"] for event in run.events("checkpoint"))
    assert not run.events("resume")


def test_a_volume_that_stays_full_ends_the_run_with_one_line(node: Node, start: Start) -> None:
    run = start(volume_mib=64, job={"max_restarts": 0}, trainer={"checkpoint": {"every_steps": 50, "max_failures": 2}})
    run.wait_for_step(100)
    node.within("sh", "-c", f"cat /dev/zero > {run.volume}/filler || true")
    wait_for("failed job", lambda: "Failed" in run.conditions(), 120)
    shown = run.node.run(status_command(run), check=False)
    assert shown.returncode == 1
    assert "2 saves in a row have failed (checkpoint.max_failures 2)" in shown.stdout, shown.stdout


def test_a_restarted_kubelet_leaves_the_pods_alone(node: Node, start: Start, undisturbed: dict[str, Any]) -> None:
    run = start()
    run.wait_for_step(WHEN)
    node.restart("kubelet")
    result = run.result()
    assert result["loss"] == undisturbed["loss"]
    assert not run.events("resume"), "no process was started again"


def test_a_minute_without_the_api_server_costs_the_run_nothing(
    node: Node, start: Start, undisturbed: dict[str, Any]
) -> None:
    run = start()
    run.wait_for_step(WHEN)
    since = now()
    node.halt("kube-apiserver")
    wait_for("a minute", lambda: now() - since > 60, 90)
    node.let_start("kube-apiserver")
    wait_for("API server", lambda: node.kubectl("get", "--raw", "/readyz", check=False).returncode == 0)
    # Not the Job's own condition: its controller and the kubelet, one after the other, look again up to half a minute
    # later.
    (result,) = wait_for("result", lambda: run.events("result"), PATIENCE)
    assert "Failed" not in run.conditions()
    during = [event for event in run.events("train") if since + 5 < event["time"] < since + 60]
    assert during, "the steps went on while nobody could ask for them"
    assert (result["step"], result["loss"]) == (undisturbed["step"], undisturbed["loss"])
    assert not run.events("resume"), "no process was started again"
    told("the API server stopped for 60 s: no step lost")


def processes(node: Node, run: Run, pod: str) -> list[int]:
    """Numbers, within the node, of the processes of a pod's container, the first to start first."""
    found = node.get("pod", pod, "--namespace", run.namespace)
    container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    paths = node.within("sh", "-c", f"find /sys/fs/cgroup -type d -name '*{container}*' | head -n 1").stdout.strip()
    listed = node.within("cat", f"{paths}/cgroup.procs").stdout.split()
    return sorted(int(number) for number in listed if int(number))


def evict(node: Node, run: Run, body: dict[str, Any]) -> str:
    """Ask for an eviction; the refusal, or nothing."""
    path = f"/api/v1/namespaces/{run.namespace}/pods/{body['metadata']['name']}/eviction"
    done = node.kubectl("create", "--raw", path, "--filename=-", check=False, input=json.dumps(body))
    return done.stderr if done.returncode else ""


def status_command(run: Run) -> list[str]:
    """`python -m workloads status` of a run."""
    where = ["--kubeconfig", str(run.node.kubeconfig), "--namespace", run.namespace, "--run", "default"]
    return [sys.executable, "-m", "workloads", "status", *where]
