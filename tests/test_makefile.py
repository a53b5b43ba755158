"""What `make` says where it cannot help, and that it neither installs nor removes anything then."""

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
    """A folder with a space in its name that holds the Makefile and the lists, and no .venv."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ["Makefile", "pyproject.toml", *LISTS]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def make(checkout: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    # MAKEFLAGS and the like would hand the settings of a `make test` around us on to this one.
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
        assert f"\n  {command} " in shown.stdout, f"`make` does not say what `make {command}` does"


@pytest.mark.parametrize("version", ["3.10.14", "3.15.0"])
def test_a_python_without_wheels_is_refused_by_its_version(checkout: Path, version: str) -> None:
    pretend = f"import sys; sys.version_info = ({version.replace('.', ', ')}); exec(sys.argv[1])"
    wrong = fake_program(checkout.parent / "bin" / "python3", f'exec "{sys.executable}" -c "{pretend}" "$2"')
    shown = make(checkout, "venv", f"PYTHON={wrong}")
    assert shown.returncode == 2
    assert f"error: {wrong} is {version}, but Python 3.11 to 3.14 is needed" in shown.stderr
    assert "make PYTHON=" in shown.stderr, "the error names no mend"
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_refused_by_its_name(checkout: Path) -> None:
    shown = make(checkout, "venv", "PYTHON=/no/such python")
    assert shown.returncode == 2
    assert "no Python found (/no/such python)" in shown.stderr


def test_a_python_without_venv_is_refused_with_the_package_to_install(checkout: Path) -> None:
    body = f'case "$2" in *ensurepip*) exit 1;; *) exec "{sys.executable}" "$@";; esac'
    bare = fake_program(checkout.parent / "bin" / "python3", body)
    shown = make(checkout, "venv", f"PYTHON={bare}")
    assert shown.returncode == 2
    assert "has no venv module" in shown.stderr
    assert f"apt install python3.{sys.version_info.minor}-venv" in shown.stderr
    assert not (checkout / ".venv").exists()


def test_an_unknown_accelerator_is_refused_with_the_legal_ones(checkout: Path) -> None:
    shown = make(checkout, "quickstart", "ACCELERATOR=tpu")
    assert shown.returncode == 2
    assert "error: unknown ACCELERATOR: got 'tpu'; allowed: cpu, gpu" in shown.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("system", "accelerator", "mend"),
    [("Darwin arm64", "cpu", "use a container"), ("Linux aarch64", "gpu", "ACCELERATOR=cpu")],
)
def test_a_system_without_wheels_is_refused_with_the_way_out(
    checkout: Path, system: str, accelerator: str, mend: str
) -> None:
    kernel, machine = system.split()
    fake_program(checkout.parent / "bin" / "uname", f'if [ "$1" = -s ]; then echo {kernel}; else echo {machine}; fi')
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    shown = make(checkout, "quickstart", f"ACCELERATOR={accelerator}", path=path)
    assert shown.returncode == 2
    assert f"error: fbgemm has no {accelerator} wheel for {kernel} on {machine}" in shown.stderr
    assert mend in shown.stderr, "the error names no mend"
    assert not (checkout / ".venv").exists(), "something was installed before the refusal"


@pytest.mark.parametrize(
    ("answer", "accelerator"),
    [("echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'", "gpu"), ("echo 'No devices were found'", "cpu"), ("exit 9", "cpu")],
    ids=["a GPU", "a driver without a GPU", "a broken driver"],
)
def test_the_driver_decides_the_build_of_fbgemm(checkout: Path, answer: str, accelerator: str) -> None:
    fake_program(checkout.parent / "bin" / "nvidia-smi", answer)
    shown = make(checkout, "--dry-run", "quickstart", path=f"{checkout.parent / 'bin'}:{os.environ['PATH']}")
    assert f"list=trainer/requirements-{accelerator}.txt" in shown.stdout
    hidden = "CUDA_VISIBLE_DEVICES= " in shown.stdout
    assert hidden == (accelerator == "cpu"), "fbgemm's CPU build has no code for a GPU that torch would find"


def test_the_environment_is_made_once_and_again_when_broken(checkout: Path) -> None:
    # A real venv takes seconds; what counts here is when one is asked for.
    make_venv = f'mkdir -p .venv/bin && ln -s "{sys.executable}" .venv/bin/python'
    body = f'case "$1 $2" in "-m venv") {make_venv};; *) exec "{sys.executable}" "$@";; esac'
    quick = fake_program(checkout.parent / "bin" / "python3", body)
    assert "Creating .venv" in make(checkout, "venv", f"PYTHON={quick}").stdout
    assert make(checkout, "venv").stdout == "", "a whole .venv was made again"
    (checkout / ".venv/bin/python").unlink()
    assert "Creating .venv" in make(checkout, "venv", f"PYTHON={quick}").stdout, "a .venv without a Python was kept"
    (checkout / ".venv/.stamps/venv").unlink()
    assert "Creating .venv" in make(checkout, "venv", f"PYTHON={quick}").stdout, "a half-made .venv was kept"
