"""What this machine brings: the engine, Python and the packages that the program runs with, a way to build images."""

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
from infra.findings.common_causes import NO_BUILDER, NO_ENGINE, NO_LANGUAGE, OUT_OF_STEP, PYTHON
from infra.findings.model import Check, Context, Finding, ok, problem, skipped

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.txt"
SHARED_PACKAGES = ("pulumi-kubernetes", "pulumi-docker-build")
_PIN = re.compile(r"^([A-Za-z0-9][^\s\\]*==[^\\]+?)\s*\\?$", re.MULTILINE)
_MOST_NAMED = 3


def checks(packages: Sequence[str]) -> list[Check]:
    """Checks that need no stack; `packages` are the Pulumi SDKs of the cloud."""
    return [
        Check("pulumi", engine),
        Check("plug-ins", lambda: plugins([*packages, *SHARED_PACKAGES]), needs="pulumi"),
        Check("python", python),
        Check("packages", packages_in_step),
    ]


def engine() -> Finding:
    """The `pulumi` command, and what starts Python for it."""
    try:
        found = Engine(lambda _: None)
    except OperationError as error:
        return problem(NO_ENGINE, str(error).partition(". Fix: ")[0], install=install_hint())
    command = Path(shutil.which(found.command) or found.command)
    beside = command.resolve().parent / "pulumi-language-python"
    if not beside.exists() and shutil.which("pulumi-language-python") is None:
        told = f"pulumi {found.version} has no pulumi-language-python beside it"
        return problem(NO_LANGUAGE, told, install=install_hint())
    return ok(f"pulumi {found.version}, from {command}")


def plugins(packages: Sequence[str]) -> Finding:
    """Which provider plug-ins are there; the engine downloads what is missing, at the SDK's own version."""
    said = _output(["pulumi", "plugin", "ls"])
    there = set(re.findall(r"^(\S+)\s+resource\s+v?(\S+)", said, re.MULTILINE))
    found: list[str] = []
    ambient: list[str] = []
    missing: list[str] = []
    for package in packages:
        name = package.removeprefix("pulumi-")
        try:
            pin = version(package)
        except PackageNotFoundError:
            return problem(OUT_OF_STEP, f"{package} is not installed")
        if path := shutil.which(f"pulumi-resource-{name}"):
            ambient.append(f"{name} is {path}, whatever its version")
        else:
            (found if (name, pin) in there else missing).append(f"{name} {pin}")
    parts = [", ".join(found), "; ".join(ambient)]
    parts += [f"`up` downloads {', '.join(missing)}"] if missing else []
    return ok("; ".join(filter(None, parts)))


def python() -> Finding:
    """The range of `requires-python`."""
    legal = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    here = ".".join(map(str, sys.version_info[:3]))
    if here not in SpecifierSet(legal):
        return problem(PYTHON, f"Python {here}, legal: {legal}")
    return ok(f"Python {here}, from {sys.executable}")


def packages_in_step() -> Finding:
    """The installed packages against the pinned list."""
    apart, count = [], 0
    for pin in pins(LOCK):
        count += 1
        try:
            here = version(pin.name)
        except PackageNotFoundError:
            here = "missing"
        if here == "missing" or here not in pin.specifier:
            apart.append(f"{pin.name} is {here}, pinned {str(pin.specifier).removeprefix('==')}")
    if apart:
        more = f" and {len(apart) - _MOST_NAMED} more" if len(apart) > _MOST_NAMED else ""
        return problem(OUT_OF_STEP, "; ".join(apart[:_MOST_NAMED]) + more)
    return ok(f"all {count} packages are those of {LOCK.name}")


def pins(lock: Path) -> Iterator[Requirement]:
    """The requirements of a hashed list that hold for this machine."""
    for text in _PIN.findall(lock.read_text(encoding="utf-8")):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def builder(context: Context) -> Finding:
    """BuildKit on this machine, where the stack builds its image."""
    if context.job.get("image"):
        return skipped("job.image names an image: nothing is built")
    if not context.settings.has_registry:
        return skipped("the stack has no registry to push to")
    program = shutil.which("docker")
    if program is None:
        return problem(NO_BUILDER, "no `docker` on PATH")
    answer = _run([program, "version", "--format", "{{.Server.Version}}"])
    if answer.returncode:
        return problem(NO_BUILDER, " ".join((answer.stderr or answer.stdout).split())[:200] or "docker does not answer")
    return ok(f"Docker {answer.stdout.strip()} builds the image")


def _output(command: Sequence[str]) -> str:
    return _run(command).stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Away from this terminal's Ctrl-C, which ends the doctor itself."""
    return subprocess.run(  # noqa: S603 - programs that were found on PATH, arguments of our own
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, process_group=0, timeout=25
    )
