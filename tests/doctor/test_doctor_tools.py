"""The doctor's checks of this machine: engine, plug-ins, Python, packages and image builder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from infra.doctor import tools
from infra.findings.model import Context

Pulumi = Callable[..., Path]


def test_a_missing_engine_is_fixed_by_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    finding = tools.engine()
    assert (finding.status, finding.cause) == ("problem", "pulumi-cli")
    assert f"--version {version('pulumi')}" in finding.fix


def test_an_old_engine_is_a_problem(pulumi: Pulumi) -> None:
    pulumi({}, "v3.100.0")
    finding = tools.engine()
    assert finding.status == "problem"
    assert "3.100.0" in finding.result


def test_an_engine_without_its_language_plug_in_for_python_is_a_problem(pulumi: Pulumi) -> None:
    folder = pulumi({})
    assert tools.engine().status == "ok"
    (folder / "pulumi-language-python").unlink()
    assert tools.engine().cause == "pulumi-python"


def test_plug_ins_are_listed_by_their_source(pulumi: Pulumi) -> None:
    folder = pulumi({})
    assert tools.plugins(["pulumi-kubernetes"]).result == f"kubernetes {version('pulumi-kubernetes')}"
    ambient = folder / "pulumi-resource-aws"
    ambient.write_text("#!/bin/sh\n")
    ambient.chmod(0o755)
    found = tools.plugins(["pulumi-kubernetes", "pulumi-aws", "pulumi-gcp"])
    assert f"aws is {ambient}, of an unknown version" in found.result, "the engine prefers plug-ins on PATH"
    assert f"`up` downloads gcp {version('pulumi-gcp')}" in found.result


def test_packages_that_differ_from_the_pinned_list_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "requirements.txt"
    lock.write_text(
        f"pydantic=={version('pydantic')} \\\n    --hash=sha256:00\n"
        "pyyaml==1.0 \\\n    --hash=sha256:00\n"
        "no-such-package==2.0 ; python_version >= '3.11' \\\n    --hash=sha256:00\n"
        "only-on-windows==2.0 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    monkeypatch.setattr(tools, "LOCK", lock)
    finding = tools.installed_packages()
    assert finding.status == "problem"
    assert finding.result == f"pyyaml is {version('pyyaml')}, pinned 1.0; no-such-package is missing, pinned 2.0"
    assert finding.fix.startswith("make install-infra")


def test_every_pin_of_the_real_list_is_read() -> None:
    names = [pin.name for pin in tools.pins(tools.LOCK)]
    lines = [line for line in tools.LOCK.read_text().splitlines() if line[:1].isalnum() and "==" in line]
    assert "pulumi-aws" in names
    assert 0 <= len(lines) - len(names) < len(lines) / 2, "only pins of other platforms are skipped"


def test_a_python_outside_the_supported_range_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools.python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert tools.python().cause == "python"


def test_a_stack_without_an_image_needs_a_running_docker(
    context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tools.builder(context("aws", {"job.image": "ghcr.io/t@sha256:ab"})).status == "skipped"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.builder(context("aws")).result == "no `docker` on PATH"
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho 28.1\n")
    program.chmod(0o755)
    assert tools.builder(context("aws")).result == "Docker 28.1 builds the image"
    program.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    assert tools.builder(context("aws")).cause == "image-builder"
