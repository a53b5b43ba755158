"""Who may import whom, and where a cloud may be named: the layout is held by this test, not by memory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from provider_mocks.recording import ROOT, SDKS

from infra import clouds

INFRA = ROOT / "infra"
ANYWHERE = {*sys.stdlib_module_names, "pulumi", "pulumi_kubernetes", "pydantic", "pydantic_core", "yaml", "infra"}
#: The policy SDK for the pack, a display for those who watch an update.
IN_FOLDER = {
    "automation": {"rich"},
    "policy": {"pulumi_policy"},
    "doctor": {"rich", "packaging", "kubernetes", "urllib3"},
}
#: What a cloud's `doctor.py` and its training service's providers ask with: optional, so imported in functions only.
CLIENTS = {"aws": {"boto3", "botocore"}, "azure": {"azure", "urllib3"}, "gcp": {"google", "requests"}}
ROOMS = {"__init__", "settings", "credentials", "provision", "network", "cluster", "storage", "registry", "monitoring"}


def _python(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _cloud_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts[1:] or ("",)
    return parts[1] if parts[0] == "clouds" and len(parts) > 2 else None


def test_infra_imports_pulumi_pydantic_and_itself_and_a_clouds_sdk_only_in_its_folder() -> None:
    for path in _python(INFRA):
        allowed = ANYWHERE | SDKS.get(_cloud_of(path) or "", set()) | IN_FOLDER.get(path.parent.name, set())
        if path.name in ("doctor.py", "running.py", "vertex.py", "vertex_client.py"):
            allowed |= CLIENTS.get(_cloud_of(path) or "", set())
        strangers = {name for name in _imports(path) if name.split(".")[0] not in allowed}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_the_automation_api_is_talked_to_in_one_folder() -> None:
    users = {path.parent.name for path in _python(INFRA) if any("pulumi.automation" in name for name in _imports(path))}
    assert users == {"automation"}, "its errors, its version and its Ctrl-C are handled there"


def test_no_file_outside_a_clouds_folder_imports_from_one() -> None:
    for path in [*_python(INFRA), ROOT / "__main__.py"]:
        own = _cloud_of(path)
        foreign = {name for name in _imports(path) if re.match(r"infra\.clouds\.\w+\.", name)}
        foreign = {name for name in foreign if name.split(".")[2] != own}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_no_file_outside_a_clouds_folder_names_a_cloud_in_code() -> None:
    cloud = re.compile(r"\b(aws|azure|gcp|amazon|google|eks|aks|gke)\b", re.IGNORECASE)
    # A policy is about types of resources, whose names begin with the cloud; it holds for what users add themselves.
    shared = [path for path in _python(INFRA) if _cloud_of(path) is None and INFRA / "policy" not in path.parents]
    for path in [*shared, ROOT / "__main__.py"]:
        code = ast.unparse(_without_docstrings(ast.parse(path.read_text())))
        named = cloud.search(code)
        assert not named, (
            f"{path.relative_to(ROOT)} names {named and named.group()}: a field of the contract is missing"
        )


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("cloud", clouds.available())
def test_a_clouds_folder_has_the_rooms_of_the_table_of_contents(cloud: str) -> None:
    folder = next(folder for folder in clouds.folders() if folder.name == cloud)
    files = {path.stem for path in folder.glob("*.py")}
    assert {"__init__", "settings", "credentials", "provision"} <= files
    if cloud != "local":
        assert files >= ROOMS, f"missing rooms: {ROOMS - files}"


@pytest.mark.parametrize("cloud", clouds.available())
def test_a_clouds_settings_are_known_without_its_sdk(cloud: str) -> None:
    script = f"import sys, infra.clouds.{cloud}.settings, infra.clouds.{cloud}.credentials\n"
    script += "print(*sorted(m for m in sys.modules if m.startswith('pulumi')))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [name for name in run.stdout.split() if name.split(".")[0] not in ("pulumi",)], "errors must come fast"


def test_the_command_line_helps_without_any_sdk() -> None:
    script = "import sys, runpy; sys.argv = ['infra', '--help']\ntry: runpy.run_module('infra', run_name='__main__')\n"
    script += "except SystemExit: pass\nassert not {'pulumi', 'pydantic', 'yaml'} & set(sys.modules), 'help is slow'"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "instances" in run.stdout


@pytest.mark.parametrize("cloud", clouds.available())
def test_a_clouds_doctor_is_known_without_its_client_and_its_sdk(cloud: str) -> None:
    script = f"import sys, infra.clouds.{cloud}.doctor\n"
    script += "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    foreign = set(run.stdout.split()) & set().union(*CLIENTS.values(), *SDKS.values()) - {"urllib3", "google"}
    assert not foreign, "a client that is missing must cost one row of the table and not the command"
