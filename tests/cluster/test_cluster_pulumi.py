"""The life of stack `local` with the real engine and the real Kubernetes provider."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import pytest
from cluster_manifests import cpu_node
from cluster_plane import Plane, wait_for
from cluster_stack import PROGRAMS, Stack, cluster_wide

NAMESPACE = "training"
#: Settings with which the stack's pods fill the fake nodes.
SETTINGS = {
    "gpu.gpus_per_node": "8",
    "gpu.hbm_gib_per_gpu": "80",
    "job.image": "registry.example/trainer@sha256:" + "0" * 64,
}


@pytest.fixture(scope="module")
def stack(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Initialise the stack; destroy it after the tests."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH (pulumi.com/docs/install)")
    created = Stack(plane, tmp_path_factory.mktemp("stack"))
    created.pulumi("stack", "init", "local")
    for key, value in SETTINGS.items():
        created.set(key, value)
    yield created
    created.pulumi("destroy", "--yes", "--skip-preview", "--stack", "local")


def jobs(plane: Plane) -> list[str]:
    """Return the names of the jobs in the stack's namespace."""
    return [item["metadata"]["name"] for item in plane.get("jobs", "--namespace", NAMESPACE)]


def test_a_stack_is_created_unchanged_updated_and_destroyed(
    plane: Plane, stack: Stack, gpu_nodes: Callable[..., list[str]]
) -> None:
    gpu_nodes(2)
    gpu_nodes(1, cpu_node)
    initial = cluster_wide(plane)
    first = stack.up()
    assert {operation for operation, _ in first} == {"create"}
    (before,) = jobs(plane)
    assert stack.outputs()["job"]["name"] == before

    assert stack.up() == set(), "a second `up` changes nothing"
    assert jobs(plane) == [before]
    state = lambda: json.loads(stack.workloads("status", "--json"))["state"]  # noqa: E731
    wait_for("running job", lambda: state() == "running")

    stack.workloads("stop", "--yes")
    assert stack.up() == set(), "`up` must not resume a run that was stopped"
    wait_for("stopped job", lambda: state() == "stopped")
    stack.workloads("resume")

    stack.set("trainer.train.steps", "123")
    changed = stack.up()
    touched = {name for _operation, name in changed}
    assert touched == {"local-training-config", "local-training-job"}, "only the objects that contain the setting"
    (after,) = jobs(plane)
    assert after != before, "a changed specification is a new Job"

    deleted = stack.destroy()
    assert {operation for operation, _ in deleted} == {"delete"}
    wait_for("end of the namespace", lambda: plane.kubectl("get", "ns", NAMESPACE, check=False).returncode != 0)
    # Namespaces of earlier tests may be deleted meanwhile; nothing new may remain.
    wait_for("deletion of all new objects", lambda: cluster_wide(plane) <= initial)
