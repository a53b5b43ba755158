"""`pulumi up` of stack `local` by the real engine and the real Kubernetes provider, from nothing to nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_manifests import cpu_node
from cluster_plane import Plane, wait_for

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "training"
#: The stack's own settings, and what makes its pods fit the fake nodes.
SETTINGS = {
    "gpu.gpus_per_node": "8",
    "gpu.hbm_gib_per_gpu": "80",
    "job.image": "registry.example/trainer@sha256:" + "0" * 64,
}


class Stack:
    """A copy of the project with its own state, run inside the control plane's network."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        for name in ("Pulumi.yaml", "Pulumi.local.yaml", "__main__.py"):
            shutil.copy(ROOT / name, folder)
        for name in ("infra", "workloads", "trainer"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("home", "state"):
            (folder / name).mkdir()

    def pulumi(self, *arguments: str, check: bool = True) -> str:
        """What a pulumi command prints."""
        done = self.plane.run(
            ["pulumi", *arguments, "--cwd", str(self.folder), "--non-interactive"],
            check=check,
            PULUMI_HOME=str(self.folder / "home"),
            PULUMI_BACKEND_URL=f"file://{self.folder}/state",
            PULUMI_CONFIG_PASSPHRASE="test",
            PULUMI_SKIP_UPDATE_CHECK="1",
            PULUMI_PYTHON_CMD=sys.executable,
        )
        return done.stdout if check else done.stdout + done.stderr

    def set(self, key: str, value: str) -> None:
        self.pulumi("config", "set", "--path", f"torchrec-cloud:{key}", value, "--stack", "local")

    def up(self) -> dict[str, int]:
        """How many resources an `up` created, updated, replaced, deleted or left alone."""
        text = self.pulumi("up", "--yes", "--skip-preview", "--json", "--stack", "local")
        changes: dict[str, int] = json.loads(text)["changeSummary"]
        return changes

    def outputs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.pulumi("stack", "output", "--json", "--stack", "local"))
        return found


@pytest.fixture(scope="module")
def stack(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for program in ("pulumi", "pulumi-language-python", "pulumi-resource-kubernetes"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH")
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
    first = stack.up()
    assert set(first) == {"create"}
    (before,) = jobs(plane)
    assert stack.outputs()["job"]["name"] == before

    assert set(stack.up()) == {"same"}, "a second `up` changes nothing"
    assert jobs(plane) == [before]

    stack.set("job.max_restarts", "3")
    changed = stack.up()
    assert changed.get("replace") == 1, f"the job and nothing else is replaced: {changed}"
    assert not changed.get("update"), changed
    (after,) = jobs(plane)
    assert after != before, "another specification is another Job"

    stack.pulumi("destroy", "--yes", "--skip-preview", "--stack", "local")
    wait_for("end of the namespace", lambda: plane.kubectl("get", "ns", NAMESPACE, check=False).returncode != 0)
    volumes = plane.get("persistentvolumes")
    assert volumes == [], "destroy left a volume"
