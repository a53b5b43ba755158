"""Drains of nodes with training pods, by `kubectl drain` on the product's own objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from cluster_manifests import Manifest, cpu_node
from cluster_operators import PYTORCHJOB, Operator
from cluster_plane import Plane, wait_for
from cluster_runs import build_objects, gpu_facts
from test_cluster_changes import TRAINING, is_running
from test_cluster_jobs import condition
from test_cluster_product import claim

Nodes = Callable[..., list[str]]
Start = Callable[..., Manifest]
#: A simulated node sends no heartbeats: after 40 seconds its pods are unhealthy, and a budget does not protect them.
SOON = "--timeout=25s"
OPTIONS = ("--delete-emptydir-data", "--ignore-daemonsets", f"--pod-selector={TRAINING}")


@pytest.fixture
def start(plane: Plane, namespace: str, gpu_nodes: Nodes) -> Iterator[Start]:
    """Return a function that starts a run on two of `nodes` GPU nodes and returns its job."""

    def run(nodes: int, **job: Any) -> Manifest:
        gpu_nodes(nodes)
        gpu_nodes(1, cpu_node)
        objects = build_objects(gpu_facts(plane, namespace, job), end="never")
        plane.apply([*claim(namespace), *objects.values()])
        wait_for("two running pods", lambda: len(placed(plane, namespace)) == 2)
        return objects["job"]

    yield run
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


def placed(plane: Plane, namespace: str) -> dict[str, str]:
    """Return the nodes of the running training pods, by the pods' identities."""
    found = plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")
    return {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in found if is_running(pod)}


def _moved(plane: Plane, namespace: str, drained: str) -> bool:
    """Return whether both pods run on other nodes."""
    nodes = placed(plane, namespace).values()
    return len(nodes) == 2 and drained not in nodes


@pytest.mark.parametrize("launcher", ["job", "pytorchjob"])
def test_a_drain_moves_a_pod_and_the_job_continues(
    plane: Plane, namespace: str, start: Start, operators: Callable[[Operator], None], launcher: str
) -> None:
    if launcher == "pytorchjob":
        operators(PYTORCHJOB)
    # Every drain would fail a Job that counts evictions.
    job = start(3, launcher=launcher, **({"max_restarts": 0} if launcher == "job" else {}))
    for number in (1, 2):
        before = placed(plane, namespace)
        drained = sorted(before.values())[0]
        plane.kubectl("drain", drained, *OPTIONS, SOON)
        wait_for(f"two running pods after drain {number}", partial(_moved, plane, namespace, drained))
        assert len(set(placed(plane, namespace)) & set(before)) == 1, "the other pod keeps its node"
        plane.kubectl("uncordon", drained)
    (found,) = plane.get(job["kind"].lower(), "--namespace", namespace)
    assert condition(found, "Failed").get("status") != "True"


def test_a_drain_of_every_node_evicts_every_pod_of_a_job_that_needs_all(
    plane: Plane, namespace: str, start: Start
) -> None:
    start(2)
    before = placed(plane, namespace)
    plane.kubectl("drain", *before.values(), *OPTIONS, SOON)
    assert placed(plane, namespace) == {}
    plane.kubectl("uncordon", *before.values())
    wait_for("two running pods", lambda: len(placed(plane, namespace)) == 2)
    assert set(placed(plane, namespace)).isdisjoint(before)


def test_a_drain_leaves_an_elastic_job_its_smallest_number_of_pods(
    plane: Plane, namespace: str, start: Start, operators: Callable[[Operator], None]
) -> None:
    operators(PYTORCHJOB)
    start(2, launcher="pytorchjob", min_nodes=1)
    first, second = sorted(placed(plane, namespace).values())
    plane.kubectl("drain", first, *OPTIONS, SOON)
    done = plane.kubectl("drain", second, *OPTIONS, "--timeout=5s", check=False)
    assert done.returncode != 0
    assert "disruption budget" in done.stderr
    plane.kubectl("uncordon", first)
    wait_for("replacement", lambda: first in placed(plane, namespace).values())
    plane.kubectl("drain", second, *OPTIONS, SOON)
    plane.kubectl("uncordon", second)
