"""Checks of this machine: the engine, Python, the installed packages and the image builder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infra.automation.engine import Engine, install_hint
from infra.automation.errors import OperationError
from infra.findings.common_causes import NO_BUILDER, NO_ENGINE, NO_LANGUAGE, PACKAGES_DIFFER, PYTHON
from infra.findings.model import Check, Context, Finding, ok, problem, skipped

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.txt"
SHARED_PACKAGES = ("pulumi-kubernetes", "pulumi-docker-build")
_PIN = re.compile(r"^([A-Za-z0-9][^\s\\]*==[^\\]+?)\s*\\?$", re.MULTILINE)
_MAX_LISTED = 3


def checks(packages: Sequence[str]) -> list[Check]:
    """Return the checks that need no stack; `packages` are the Pulumi SDKs of the cloud."""
    return [
        Check("pulumi", engine),
        Check("plug-ins", lambda: plugins([*packages, *SHARED_PACKAGES]), needs="pulumi"),
        Check("python", python),
        Check("packages", installed_packages),
    ]


def engine() -> Finding:
    """Check that the `pulumi` command and its language plug-in for Python are installed."""
    try:
        found = Engine(lambda _: None)
    except OperationError as error:
        return problem(NO_ENGINE, str(error).partition(". Fix: ")[0], install=install_hint())
    command = Path(shutil.which(found.command) or found.command)
    neighbour = command.resolve().parent / "pulumi-language-python"
    if not neighbour.exists() and shutil.which("pulumi-language-python") is None:
        result = f"pulumi {found.version} has no pulumi-language-python in its folder"
        return problem(NO_LANGUAGE, result, install=install_hint())
    return ok(f"pulumi {found.version}, from {command}")


def plugins(packages: Sequence[str]) -> Finding:
    """Report the installed provider plug-ins; the engine downloads the others, in the version of the SDK."""
    listing = _run(["pulumi", "plugin", "ls"]).stdout
    installed = set(re.findall(r"^(\S+)\s+resource\s+v?(\S+)", listing, re.MULTILINE))
    found: list[str] = []
    ambient: list[str] = []
    missing: list[str] = []
    for package in packages:
        name = package.removeprefix("pulumi-")
        try:
            pin = version(package)
        except PackageNotFoundError:
            return problem(PACKAGES_DIFFER, f"{package} is not installed")
        if path := shutil.which(f"pulumi-resource-{name}"):
            ambient.append(f"{name} is {path}, of an unknown version")
        else:
            (found if (name, pin) in installed else missing).append(f"{name} {pin}")
    parts = [", ".join(found), "; ".join(ambient)]
    parts += [f"`up` downloads {', '.join(missing)}"] if missing else []
    return ok("; ".join(filter(None, parts)))


def python() -> Finding:
    """Check that this Python is in the range of `requires-python`."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    running = ".".join(map(str, sys.version_info[:3]))
    if running not in SpecifierSet(allowed):
        return problem(PYTHON, f"unsupported Python: got {running}; allowed: {allowed}")
    return ok(f"Python {running}, from {sys.executable}")


def installed_packages() -> Finding:
    """Compare the installed packages with the pinned list."""
    different, count = [], 0
    for pin in pins(LOCK):
        count += 1
        try:
            installed = version(pin.name)
        except PackageNotFoundError:
            installed = "missing"
        if installed == "missing" or installed not in pin.specifier:
            different.append(f"{pin.name} is {installed}, pinned {str(pin.specifier).removeprefix('==')}")
    if different:
        more = f" and {len(different) - _MAX_LISTED} more" if len(different) > _MAX_LISTED else ""
        return problem(PACKAGES_DIFFER, "; ".join(different[:_MAX_LISTED]) + more)
    return ok(f"all {count} packages match {LOCK.name}")


def pins(lock: Path) -> Iterator[Requirement]:
    """Yield the requirements of a hashed list that apply to this machine."""
    for text in _PIN.findall(lock.read_text(encoding="utf-8")):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def builder(context: Context) -> Finding:
    """Check that Docker runs on this machine, if the stack builds its image."""
    if context.job.get("image"):
        return skipped("job.image is set: no image is built")
    if not context.settings.has_registry:
        return skipped("the stack has no registry to push to")
    program = shutil.which("docker")
    if program is None:
        return problem(NO_BUILDER, "no `docker` on PATH")
    answer = _run([program, "version", "--format", "{{.Server.Version}}"])
    if answer.returncode:
        return problem(
            NO_BUILDER, " ".join((answer.stderr or answer.stdout).split())[:200] or "docker does not respond"
        )
    return ok(f"Docker {answer.stdout.strip()} builds the image")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own, so that Ctrl-C stops only the doctor."""
    return subprocess.run(  # noqa: S603 - programs that were found on PATH, arguments of our own
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, process_group=0, timeout=25
    )
