"""The product's own manifests from settings that a test changes, and its commands, on the control plane."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from cluster_manifests import Manifest
from cluster_plane import Plane
from workload_facts import facts, record_facts

from workloads.facts import Facts
from workloads.manifests import build_manifests

ROOT = Path(__file__).resolve().parents[2]
#: Settings of stack `local` on nodes with GPUs: two pods with eight each.
GPUS = (("gpu.gpus_per_node", 8), ("gpu.hbm_gib_per_gpu", 80))


def gpu_facts(plane: Plane, namespace: str, job: Mapping[str, Any] | None = None, **changes: Any) -> Facts:
    """Return the facts of stack `local` with GPUs in a test's namespace, with changed keys of `job` and fields."""
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(plane.kubeconfig)}):
        first = record_facts("local", GPUS)
    same = {field: getattr(first, field) for field in ("pool", "fabric", "config")}
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(plane.kubeconfig)}):
        return facts("local", job, **same | {"namespace": namespace} | changes)


def build_objects(found: Facts, **annotations: str) -> dict[str, Manifest]:
    """Return the product's manifests with annotations that control in kwok how the job's pods end."""
    objects = build_manifests(found)
    for template in templates(objects.values()):
        metadata = template["metadata"]
        control = {f"test/{key}": value for key, value in annotations.items()}
        metadata["annotations"] = metadata.get("annotations", {}) | control
    return objects


def templates(objects: Any) -> Iterator[Manifest]:
    """Yield every pod template in objects of any kind."""
    if isinstance(objects, Mapping):
        if "template" in objects and "containers" in objects["template"].get("spec", {}):
            yield objects["template"]
        objects = objects.values()
    elif not isinstance(objects, list | type({}.values())):
        return
    for item in objects:
        yield from templates(item)


@dataclass(frozen=True)
class Commands:
    """`python -m workloads` in the control plane's network, for the run of one namespace."""

    plane: Plane
    namespace: str
    run: str = "default"
    user: str = "admin"

    def __call__(self, word: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command, check its exit code and return what it printed."""
        kubeconfig = str(self.plane.kubeconfig_of(self.user))
        where = ["--kubeconfig", kubeconfig, "--namespace", self.namespace, "--run", self.run]
        command = [sys.executable, "-m", "workloads", word, *where, *options]
        done = self.plane.run(command, check=False, PYTHONPATH=str(ROOT))
        assert done.returncode == code, f"{word} exited with {done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def status(self, code: int = 0) -> dict[str, Any]:
        """Return the output of `status --json`."""
        found: dict[str, Any] = json.loads(self("status", "--json", code=code).stdout)
        return found

    def as_user(self, user: str) -> Commands:
        """Return these commands with the kubeconfig of another user."""
        return replace(self, user=user)
