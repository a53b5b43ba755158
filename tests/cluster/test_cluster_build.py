"""The builder of the control plane with a fake Go: its errors, its interruption and its cache."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import cluster_build
import pytest
from cluster_build import GO, MODULES, Module

ROOT = Path(__file__).resolve().parents[2]
#: A fake Go, which has no packages and compiles each program with a given command.
FAKE_GO = """#!/bin/sh
case "$1" in
env) echo {folder};;
list) echo v1.2.3;;
build) echo compiling >&2; {build};;
esac
"""


def with_go(folder: Path, build: str) -> dict[str, str]:
    """Return an environment with the fake `go` and with its cache in `folder`."""
    go = folder / "bin" / "go"
    go.parent.mkdir()
    go.write_text(FAKE_GO.format(folder=folder, build=build))
    go.chmod(0o755)
    return os.environ | {"PATH": f"{go.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}


def start_builder(environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the builder."""
    return subprocess.Popen(
        [sys.executable, str(Path(cluster_build.__file__))], env=environment, stderr=subprocess.PIPE, text=True
    )


def cached(folder: Path) -> list[str]:
    """Return the names in the builder's cache."""
    return sorted(path.name for path in (folder / "cache" / "torchrec-cloud" / "cluster").iterdir())


def test_without_go_the_builder_exits_with_2(tmp_path: Path) -> None:
    process = start_builder(os.environ | {"PATH": str(tmp_path)})
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 2
    assert printed.splitlines() == [
        "error: Go is not installed: it builds the control plane and downloads the operators' CRDs"
    ]


def test_a_compiler_error_is_printed_and_nothing_is_cached(tmp_path: Path) -> None:
    process = start_builder(with_go(tmp_path, "echo 'etcd.go:1: syntax error' >&2; exit 1"))
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "etcd.go:1: syntax error" in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert cached(tmp_path) == ["lock"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_caches_nothing_and_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    process = start_builder(with_go(tmp_path, f"touch {tmp_path}/building; exec sleep 600"))
    until = time.monotonic() + 60
    while not (tmp_path / "building").exists():
        assert time.monotonic() < until, "the build did not start"
        time.sleep(0.05)
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed.splitlines()[-1] == "stopped; run the same command to resume"
    assert cached(tmp_path) == ["lock"]


def test_built_programs_are_cached_and_not_built_again(tmp_path: Path) -> None:
    environment = with_go(
        tmp_path, f'echo "$@" >> {tmp_path}/builds; while [ "$1" != -o ]; do shift; done; echo > "$2"'
    )
    for _ in range(2):
        process = start_builder(environment)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == 0, printed
    builds = (tmp_path / "builds").read_text().splitlines()
    assert len(builds) == sum(len(module.programs) for module in MODULES.values())
    assert cached(tmp_path) == sorted(["lock", *(module.folder.name for module in MODULES.values())])


def test_a_changed_checksum_changes_the_folder_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_build, "GO", tmp_path)
    module = Module("some", {"some": "example.com/some"})
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "go.mod").write_text("module some\n")
    (tmp_path / "some" / "go.sum").write_text("one\n")
    before = module.folder
    (tmp_path / "some" / "go.sum").write_text("two\n")
    assert module.folder != before


def test_the_operators_have_the_versions_that_the_product_installs() -> None:
    with (ROOT / "infra" / "addons" / "charts.toml").open("rb") as table:
        charts = tomllib.load(table)
    modules = "\n".join(path.read_text() for path in sorted(GO.glob("*/go.mod")))

    def required(module: str) -> set[str]:
        """Return the required versions of a Go module."""
        return set(re.findall(rf"^\s*(?:require )?{re.escape(module)} v([0-9.]+)", modules, re.MULTILINE))

    assert required("github.com/kubeflow/training-operator") == {charts["training-operator"]["version"].lstrip("v")}
    assert required("github.com/kubeflow/trainer/v2") == {charts["kubeflow-trainer"]["version"]}
    assert required("sigs.k8s.io/kueue") == {charts["kueue"]["version"]}
    (jobset,) = required("sigs.k8s.io/jobset")
    assert f"JobSet {jobset}" in charts["kubeflow-trainer"]["why"]
