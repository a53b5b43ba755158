"""Tests of the pinned lists: exact, hashed, no URLs, consistent with pyproject.toml and with each other."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

# Each list and the extras of pyproject.toml that it is compiled from.
EXTRAS_OF = {
    "trainer/requirements-bootstrap.txt": ["bootstrap"],
    "trainer/requirements-cpu.txt": ["trainer", "trainer-cpu"],
    "trainer/requirements-gpu.txt": ["trainer", "trainer-gpu"],
    "requirements.txt": ["infra"],
    "infra/policy/requirements.txt": ["policy"],
    "infra/requirements-doctor.txt": ["doctor"],
    "infra/requirements-managed.txt": ["managed"],
    "tests/requirements.txt": ["test"],
    "tests/requirements-lint.txt": ["lint"],
}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# One supported machine of each kind: pins may differ between machines, but not between two lists on one machine.
MACHINES = [
    {
        "python_version": version,
        "python_full_version": f"{version}.1",
        "sys_platform": "linux",
        "platform_machine": machine,
    }
    for version in ("3.11", "3.12", "3.13", "3.14")
    for machine in ("x86_64", "aarch64")
]


def logical_lines(name: str) -> Iterator[str]:
    """Yield the requirements of a list, each on one line with its hashes."""
    text = (ROOT / name).read_text()
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def requirements(name: str) -> list[Requirement]:
    return [Requirement(HASH.sub("", line).strip()) for line in logical_lines(name)]


def pins(name: str, machine: dict[str, str]) -> dict[str, str]:
    """Return the version of each package that a machine of this kind installs."""
    chosen = [pin for pin in requirements(name) if pin.marker is None or pin.marker.evaluate(dict(machine))]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in chosen}


def declared_requirements(name: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for extra in EXTRAS_OF[name] for text in project["optional-dependencies"][extra]]


def test_every_list_is_tested() -> None:
    folders = (ROOT, *(ROOT / name for name in ("infra", "infra/policy", "workloads", "trainer", "tests")))
    found = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("requirements*.txt")}
    assert found == set(EXTRAS_OF), "no test checks a list that is missing here"


@pytest.mark.parametrize("name", EXTRAS_OF)
def test_a_list_contains_no_url(name: str) -> None:
    text = (ROOT / name).read_text()
    for word in ("://", "--index", "--extra-index", "--find-links", "--trusted-host", " @ "):
        assert word not in text, f"{word!r} ties the list to one registry: mirrors could not serve it"


@pytest.mark.parametrize("name", EXTRAS_OF)
def test_every_line_is_exact_and_hashed(name: str) -> None:
    for line in logical_lines(name):
        requirement = Requirement(HASH.sub("", line).strip())
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{line[:60]} is not exact"
        assert "*" not in specifier.version, f"{line[:60]} is not exact"
        assert HASH.search(line), f"{requirement} has no hash"


@pytest.mark.parametrize("name", EXTRAS_OF)
def test_a_list_satisfies_the_ranges_it_is_compiled_from(name: str) -> None:
    for machine in MACHINES:
        pinned = pins(name, machine)
        for requirement in declared_requirements(name):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version, f"{name} lacks {requirement}: run `make lock`"
            assert version in requirement.specifier, (
                f"{requirement.name} {version} is not {requirement.specifier}: make lock"
            )


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: "-".join(list(machine.values())[::3]))
def test_lists_pin_the_same_version_of_a_shared_package(machine: dict[str, str]) -> None:
    versions: dict[str, dict[str, str]] = {}
    for name in EXTRAS_OF:
        for package, version in pins(name, machine).items():
            versions.setdefault(package, {})[name] = version
    different = {package: by_list for package, by_list in versions.items() if len(set(by_list.values())) > 1}
    assert not different, (
        "several lists are installed in one .venv: the later one would replace packages of the earlier"
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("trainer/requirements-cpu.txt", "fbgemm-gpu"),
        ("trainer/requirements-gpu.txt", "fbgemm-gpu-cpu"),
    ],
)
def test_a_trainer_list_contains_only_one_build_of_fbgemm(name: str, other: str) -> None:
    assert other not in {canonicalize_name(pin.name) for pin in requirements(name)}, (
        "both builds install the same files"
    )


def test_pip_can_resolve_the_pulumi_programs_list() -> None:
    # `pulumi install` runs pip without --no-deps, and pip rejects a list with conflicting packages.
    pinned = pins("requirements.txt", dict(default_environment()))
    conflicts = []
    for package in pinned:
        for text in metadata.requires(package) or ():
            needed = Requirement(text)
            version = pinned.get(canonicalize_name(needed.name))
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if applies and (version is None or version not in needed.specifier):
                conflicts.append(f"{package} requires {needed}: got {version}")
    assert conflicts == []


@pytest.mark.parametrize("file", ["Pulumi.yaml", "infra/policy/PulumiPolicy.yaml"])
def test_the_engine_starts_programs_with_the_environment_of_this_project(file: str) -> None:
    """Without `virtualenv`, the engine starts the first python3 on PATH, which has no pulumi package."""
    options = yaml.safe_load((ROOT / file).read_text())["runtime"]["options"]
    assert ((ROOT / file).parent / options["virtualenv"]).resolve() == (ROOT / ".venv").resolve()
    assert options["toolchain"] == "pip", "another toolchain would not read requirements.txt"


def test_uv_can_build_the_project_without_a_download() -> None:
    """An editable install is offline only while uv itself is the version of uv_build that the project requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (build,) = (Requirement(text) for text in project["build-system"]["requires"])
    pinned = pins("trainer/requirements-bootstrap.txt", dict(default_environment()))
    assert build.name == "uv_build"
    assert pinned["uv"] in build.specifier, "the pinned uv would have to download uv_build"
    (uv,) = (Requirement(text) for text in project["project"]["optional-dependencies"]["bootstrap"])
    assert uv.specifier == build.specifier, "`make lock UPGRADE=1` must not pin a uv of another range"
