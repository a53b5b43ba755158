"""The stack `local` with the real engine and the real Kubernetes provider, in a cluster's network."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from cluster_plane import Plane

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("pulumi", "pulumi-language-python", "pulumi-resource-kubernetes")
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
        """Return the output of a pulumi command."""
        return self.run("pulumi", "--cwd", str(self.folder), "--non-interactive", *arguments)

    def workloads(self, word: str, *options: str) -> str:
        """Return the output of `python -m workloads WORD --stack local`, which reads the stack's outputs."""
        return self.run(sys.executable, "-m", "workloads", word, "--stack", "local", *options)

    def run(self, *command: str) -> str:
        return self.plane.run(command, **self.environment()).stdout

    def environment(self) -> dict[str, str]:
        """Return the variables that isolate the commands from the user's own Pulumi state."""
        return {
            # The engine runs the program with the first python on PATH.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PULUMI_HOME": str(self.folder / "home"),
            "PULUMI_BACKEND_URL": f"file://{self.folder}/state",
            "PULUMI_CONFIG_PASSPHRASE": "test",
            "PULUMI_SKIP_UPDATE_CHECK": "1",
            "PULUMI_DEBUG_COMMANDS": "1",  # needed for --event-log
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "1",
        }

    def set(self, key: str, value: str) -> None:
        # `--` allows values that begin with a dash.
        self.pulumi("config", "set", "--stack", "local", "--path", "--", f"torchrec-cloud:{key}", value)

    def up(self) -> Steps:
        """Run `up` and return the operations and names of the changed resources."""
        return self.run_and_list_changes("up")

    def destroy(self) -> Steps:
        """Run `destroy` and return the changes."""
        return self.run_and_list_changes("destroy")

    def run_and_list_changes(self, verb: str) -> Steps:
        log = self.folder / "events.json"
        log.unlink(missing_ok=True)
        self.pulumi(verb, "--yes", "--skip-preview", "--stack", "local", "--event-log", str(log))
        events = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [event["resourcePreEvent"]["metadata"] for event in events if "resourcePreEvent" in event]
        assert steps, "the engine reported no resource"
        return {(step["op"], step["urn"].rpartition("::")[2]) for step in steps if step["op"] != "same"}

    def outputs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.pulumi("stack", "output", "--json", "--stack", "local"))
        return found


def cluster_wide(plane: Plane) -> set[tuple[str, str]]:
    """Return every cluster-scoped object of every kind, except nodes and component statuses."""
    listed = plane.kubectl("api-resources", "--verbs=list", "--namespaced=false", "--output=name").stdout.split()
    items = plane.get(",".join(name for name in listed if name not in ("componentstatuses", "nodes")))
    return {(item["kind"], item["metadata"]["name"]) for item in items}
