"""Runs of the product on the control plane: its own manifests from settings that a test changes, and its commands."""

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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "workloads"))

from workload_facts import facts, recorded  # noqa: E402

from workloads.facts import Facts  # noqa: E402
from workloads.manifests import manifests  # noqa: E402

#: Stack `local` on nodes with GPUs: two pods of eight.
GPUS = (("gpu.gpus_per_node", 8), ("gpu.hbm_gib_per_gpu", 80))


def gpu_facts(plane: Plane, namespace: str, job: Mapping[str, Any] | None = None, **changes: Any) -> Facts:
    """Facts of stack `local` with GPUs, moved to a test's namespace, with other keys of `job` and other fields."""
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(plane.kubeconfig)}):
        first = recorded("local", GPUS)
    same = {field: getattr(first, field) for field in ("pool", "fabric", "config")}
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(plane.kubeconfig)}):
        return facts("local", job, **same | {"namespace": namespace} | changes)


def made(found: Facts, **annotations: str) -> dict[str, Manifest]:
    """The product's manifests with annotations that tell kwok how the pods of the job end."""
    objects = manifests(found)
    for template in templates(objects.values()):
        metadata = template["metadata"]
        told = {f"test/{key}": value for key, value in annotations.items()}
        metadata["annotations"] = metadata.get("annotations", {}) | told
    return objects


def templates(objects: Any) -> Iterator[Manifest]:
    """Every pod template inside some objects, of whatever kind."""
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
    """`python -m workloads` inside the control plane's network, on the run of one namespace."""

    plane: Plane
    namespace: str
    run: str = "default"
    user: str = "admin"

    def __call__(self, word: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """What a command printed; an error where it ends with another code."""
        kubeconfig = str(self.plane.kubeconfig_of(self.user))
        where = ["--kubeconfig", kubeconfig, "--namespace", self.namespace, "--run", self.run]
        command = [sys.executable, "-m", "workloads", word, *where, *options]
        done = self.plane.run(command, check=False, PYTHONPATH=str(ROOT))
        assert done.returncode == code, f"{word} ended with {done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def status(self, code: int = 0) -> dict[str, Any]:
        """`status --json`."""
        found: dict[str, Any] = json.loads(self("status", "--json", code=code).stdout)
        return found

    def as_user(self, user: str) -> Commands:
        """The same with the kubeconfig of another user."""
        return replace(self, user=user)
