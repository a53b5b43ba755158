"""`pulumi up` of stack `local` by the real engine and the real Kubernetes provider, from nothing to nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import pytest
from cluster_manifests import cpu_node
from cluster_plane import Plane, wait_for
from cluster_stack import PROGRAMS, Stack, cluster_wide

NAMESPACE = "training"
#: What makes the pods of the stack's own settings fill the fake nodes.
SETTINGS = {
    "gpu.gpus_per_node": "8",
    "gpu.hbm_gib_per_gpu": "80",
    "job.image": "registry.example/trainer@sha256:" + "0" * 64,
}


@pytest.fixture(scope="module")
def stack(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH (pulumi.com/docs/install)")
    made = Stack(plane, tmp_path_factory.mktemp("stack"))
    made.pulumi("stack", "init", "local")
    for key, value in SETTINGS.items():
        made.set(key, value)
    yield made
    made.pulumi("destroy", "--yes", "--skip-preview", "--stack", "local")


def jobs(plane: Plane) -> list[str]:
    return [item["metadata"]["name"] for item in plane.get("jobs", "--namespace", NAMESPACE)]


def test_a_stack_comes_up_is_left_alone_changes_and_goes(
    plane: Plane, stack: Stack, gpu_nodes: Callable[..., list[str]]
) -> None:
    gpu_nodes(2)
    gpu_nodes(1, cpu_node)
    nothing = cluster_wide(plane)
    first = stack.up()
    assert {operation for operation, _ in first} == {"create"}
    (before,) = jobs(plane)
    assert stack.outputs()["job"]["name"] == before

    assert stack.up() == set(), "a second `up` changes nothing"
    assert jobs(plane) == [before]
    state = lambda: json.loads(stack.workloads("status", "--json"))["state"]  # noqa: E731
    wait_for("running job", lambda: state() == "running")

    stack.workloads("stop", "--yes")
    assert stack.up() == set(), "an `up` in between must not start a run that somebody stopped"
    wait_for("stopped job", lambda: state() == "stopped")
    stack.workloads("resume")

    stack.set("trainer.train.steps", "123")
    changed = stack.up()
    touched = {name for _operation, name in changed}
    assert touched == {"local-training-config", "local-training-job"}, "nothing but what the setting is in"
    (after,) = jobs(plane)
    assert after != before, "another specification is another Job"

    gone = stack.destroy()
    assert {operation for operation, _ in gone} == {"delete"}
    wait_for("end of the namespace", lambda: plane.kubectl("get", "ns", NAMESPACE, check=False).returncode != 0)
    # Earlier tests' namespaces may go meanwhile; nothing may have come.
    wait_for("end of all that came", lambda: cluster_wide(plane) <= nothing)
