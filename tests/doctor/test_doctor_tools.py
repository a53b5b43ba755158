"""What the doctor says about this machine: engine, plug-ins, Python, packages, a way to build images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from infra.doctor import tools
from infra.findings.model import Context

Pulumi = Callable[..., Path]


def test_without_the_engine_the_command_that_installs_it_is_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    finding = tools.engine()
    assert (finding.status, finding.cause) == ("problem", "pulumi-cli")
    assert f"--version {version('pulumi')}" in finding.fix


def test_an_engine_that_is_too_old_is_refused(pulumi: Pulumi) -> None:
    pulumi({}, "v3.100.0")
    finding = tools.engine()
    assert finding.status == "problem"
    assert "3.100.0" in finding.result


def test_an_engine_without_its_host_for_python_is_told(pulumi: Pulumi) -> None:
    folder = pulumi({})
    assert tools.engine().status == "ok"
    (folder / "pulumi-language-python").unlink()
    assert tools.engine().cause == "pulumi-python"


def test_plug_ins_are_told_by_where_they_will_come_from(pulumi: Pulumi) -> None:
    folder = pulumi({})
    assert tools.plugins(["pulumi-kubernetes"]).result == f"kubernetes {version('pulumi-kubernetes')}"
    ambient = folder / "pulumi-resource-aws"
    ambient.write_text("#!/bin/sh\n")
    ambient.chmod(0o755)
    found = tools.plugins(["pulumi-kubernetes", "pulumi-aws", "pulumi-gcp"])
    assert f"aws is {ambient}, whatever its version" in found.result, "the engine prefers what is on PATH"
    assert f"`up` downloads gcp {version('pulumi-gcp')}" in found.result


def test_packages_that_are_not_those_of_the_list_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "requirements.txt"
    lock.write_text(
        f"pydantic=={version('pydantic')} \\\n    --hash=sha256:00\n"
        "pyyaml==1.0 \\\n    --hash=sha256:00\n"
        "no-such-package==2.0 ; python_version >= '3.11' \\\n    --hash=sha256:00\n"
        "of-windows-alone==2.0 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    monkeypatch.setattr(tools, "LOCK", lock)
    finding = tools.installed_packages()
    assert finding.status == "problem"
    assert finding.result == f"pyyaml is {version('pyyaml')}, pinned 1.0; no-such-package is missing, pinned 2.0"
    assert finding.fix.startswith("make install-infra")


def test_the_pins_of_the_real_list_are_all_read() -> None:
    names = [pin.name for pin in tools.pins(tools.LOCK)]
    lines = [line for line in tools.LOCK.read_text().splitlines() if line[:1].isalnum() and "==" in line]
    assert "pulumi-aws" in names
    assert 0 <= len(lines) - len(names) < len(lines) / 2, "those of other machines are left out"


def test_a_python_outside_the_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools.python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert tools.python().cause == "python"


def test_an_image_is_built_only_where_none_is_named_and_by_a_docker_that_answers(
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
