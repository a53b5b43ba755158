"""`pulumi up` of stack `local` by the real engine and the real Kubernetes provider, from nothing to nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_manifests import cpu_node
from cluster_plane import Plane, wait_for
from cluster_runs import ROOT

NAMESPACE = "training"
PROGRAMS = ("pulumi", "pulumi-language-python", "pulumi-resource-kubernetes")
#: What makes the pods of the stack's own settings fill the fake nodes.
SETTINGS = {
    "gpu.gpus_per_node": "8",
    "gpu.hbm_gib_per_gpu": "80",
    "job.image": "registry.example/trainer@sha256:" + "0" * 64,
}
Steps = set[tuple[str, str]]


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

    def pulumi(self, *arguments: str) -> str:
        """What a pulumi command prints."""
        return self.run("pulumi", *arguments, "--cwd", str(self.folder), "--non-interactive")

    def workloads(self, word: str, *options: str) -> str:
        """What `python -m workloads WORD --stack local` prints: it finds the run by the stack's outputs."""
        return self.run(sys.executable, "-m", "workloads", word, "--stack", "local", *options)

    def run(self, *command: str) -> str:
        done = self.plane.run(
            command,
            # The engine runs the program with the first python that it finds.
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            PYTHONPATH=str(ROOT),
            PULUMI_HOME=str(self.folder / "home"),
            PULUMI_BACKEND_URL=f"file://{self.folder}/state",
            PULUMI_CONFIG_PASSPHRASE="test",
            PULUMI_SKIP_UPDATE_CHECK="1",
            PULUMI_DEBUG_COMMANDS="1",  # without it there is no --event-log
            PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION="1",
        )
        return done.stdout

    def set(self, key: str, value: str) -> None:
        self.pulumi("config", "set", "--path", f"torchrec-cloud:{key}", value, "--stack", "local")

    def up(self) -> Steps:
        """What an `up` did, as operations and kinds; a resource that it left alone is not among them."""
        return self.changed("up")

    def destroy(self) -> Steps:
        """What a `destroy` did."""
        return self.changed("destroy")

    def changed(self, verb: str) -> Steps:
        log = self.folder / "events.json"
        log.unlink(missing_ok=True)
        self.pulumi(verb, "--yes", "--skip-preview", "--stack", "local", "--event-log", str(log))
        events = [json.loads(line) for line in log.read_text().splitlines()]
        done = [event["resourcePreEvent"]["metadata"] for event in events if "resourcePreEvent" in event]
        assert done, "the engine told of no resource"
        return {(step["op"], step["urn"].rpartition("::")[2]) for step in done if step["op"] != "same"}

    def outputs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.pulumi("stack", "output", "--json", "--stack", "local"))
        return found


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


def cluster_wide(plane: Plane) -> set[tuple[str, str]]:
    """Every object outside namespaces, of every kind that the server knows, without what comes and goes by itself."""
    listed = plane.kubectl("api-resources", "--verbs=list", "--namespaced=false", "--output=name").stdout.split()
    items = plane.get(",".join(name for name in listed if name not in ("componentstatuses", "nodes")))
    return {(item["kind"], item["metadata"]["name"]) for item in items}


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
