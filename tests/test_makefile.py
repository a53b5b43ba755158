"""Tests of `make`: its errors name a fix, and a failed command installs and removes nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LISTS = re.findall(r"^LIST_\S+ := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with a space in its name that holds the Makefile and the lists, and no .venv."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ["Makefile", "pyproject.toml", *LISTS]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def make(checkout: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    # MAKEFLAGS and similar variables would pass on the settings of an outer `make test`.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "ACCELERATOR", "PROCESSES")
    environment = {key: value for key, value in os.environ.items() if key not in outer}
    command = [shutil.which("make") or "make", *arguments]
    environment["PATH"] = path or environment["PATH"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def fake_program(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_make_alone_lists_the_commands(checkout: Path) -> None:
    shown = make(checkout)
    assert shown.returncode == 0, shown.stderr
    for command in ("quickstart", "test", "test-cluster", "lint", "format", "bench", "lock", "clean"):
        assert f"\n  {command} " in shown.stdout, f"`make` does not list `make {command}`"


@pytest.mark.parametrize("version", ["3.10.14", "3.15.0"])
def test_a_python_version_without_wheels_is_rejected(checkout: Path, version: str) -> None:
    fake_version = f"import sys; sys.version_info = ({version.replace('.', ', ')}); exec(sys.argv[1])"
    wrong = fake_program(checkout.parent / "bin" / "python3", f'exec "{sys.executable}" -c "{fake_version}" "$2"')
    shown = make(checkout, "venv", f"PYTHON={wrong}")
    assert shown.returncode == 2
    assert f"error: {wrong} is {version}, but Python 3.11 to 3.14 is needed" in shown.stderr
    assert "make PYTHON=" in shown.stderr, "the error names no fix"
    assert not (checkout / ".venv").exists()


def test_a_missing_python_is_named_in_the_error(checkout: Path) -> None:
    shown = make(checkout, "venv", "PYTHON=/no/such python")
    assert shown.returncode == 2
    assert "no Python found (/no/such python)" in shown.stderr


def test_the_error_for_a_python_without_venv_names_the_package_to_install(checkout: Path) -> None:
    body = f'case "$2" in *ensurepip*) exit 1;; *) exec "{sys.executable}" "$@";; esac'
    bare = fake_program(checkout.parent / "bin" / "python3", body)
    shown = make(checkout, "venv", f"PYTHON={bare}")
    assert shown.returncode == 2
    assert "has no venv module" in shown.stderr
    assert f"apt install python3.{sys.version_info.minor}-venv" in shown.stderr
    assert not (checkout / ".venv").exists()


def test_the_error_for_an_unknown_accelerator_lists_the_allowed_ones(checkout: Path) -> None:
    shown = make(checkout, "quickstart", "ACCELERATOR=tpu")
    assert shown.returncode == 2
    assert "error: unknown ACCELERATOR: got 'tpu'; allowed: cpu, gpu" in shown.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("system", "accelerator", "fix"),
    [("Darwin arm64", "cpu", "use a container"), ("Linux aarch64", "gpu", "ACCELERATOR=cpu")],
)
def test_the_error_for_a_system_without_wheels_names_the_fix(
    checkout: Path, system: str, accelerator: str, fix: str
) -> None:
    kernel, machine = system.split()
    fake_program(checkout.parent / "bin" / "uname", f'if [ "$1" = -s ]; then echo {kernel}; else echo {machine}; fi')
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    shown = make(checkout, "quickstart", f"ACCELERATOR={accelerator}", path=path)
    assert shown.returncode == 2
    assert f"error: fbgemm has no {accelerator} wheel for {kernel} on {machine}" in shown.stderr
    assert fix in shown.stderr, "the error names no fix"
    assert not (checkout / ".venv").exists(), "make installed something before it failed"


@pytest.mark.parametrize(
    ("answer", "accelerator"),
    [("echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'", "gpu"), ("echo 'No devices were found'", "cpu"), ("exit 9", "cpu")],
    ids=["a GPU", "a driver without a GPU", "a broken driver"],
)
def test_the_nvidia_driver_selects_the_fbgemm_build(checkout: Path, answer: str, accelerator: str) -> None:
    fake_program(checkout.parent / "bin" / "nvidia-smi", answer)
    shown = make(checkout, "--dry-run", "quickstart", path=f"{checkout.parent / 'bin'}:{os.environ['PATH']}")
    assert f"list=trainer/requirements-{accelerator}.txt" in shown.stdout
    hidden = "CUDA_VISIBLE_DEVICES= " in shown.stdout
    assert hidden == (accelerator == "cpu"), "the CPU build of fbgemm must not see a GPU"


def test_the_environment_is_created_once_and_again_when_broken(checkout: Path) -> None:
    # A real venv takes seconds. This test checks only when make creates one.
    make_venv = f'mkdir -p .venv/bin && ln -s "{sys.executable}" .venv/bin/python'
    body = f'case "$1 $2" in "-m venv") {make_venv};; *) exec "{sys.executable}" "$@";; esac'
    quick = fake_program(checkout.parent / "bin" / "python3", body)
    assert "Creating .venv" in make(checkout, "venv", f"PYTHON={quick}").stdout
    assert make(checkout, "venv").stdout == "", "make replaced a complete .venv"
    (checkout / ".venv/bin/python").unlink()
    assert "Creating .venv" in make(checkout, "venv", f"PYTHON={quick}").stdout, "make kept a .venv without a Python"
    (checkout / ".venv/.stamps/venv").unlink()
    assert "Creating .venv" in make(checkout, "venv", f"PYTHON={quick}").stdout, "make kept an incomplete .venv"
