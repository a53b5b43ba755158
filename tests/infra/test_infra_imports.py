"""The rules of infra's imports, and the rule that only a cloud's own folder names the cloud."""

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
#: Further packages by folder or module: the policy SDK, terminal output, the clients of registries and Kubernetes.
FURTHER = {
    "automation": {"rich"},
    "policy": {"pulumi_policy"},
    "doctor": {"rich", "packaging", "urllib3"},
    "kube_api": {"kubernetes", "urllib3"},
}
#: Optional clients of a cloud's doctor and training service, imported inside functions only.
CLIENTS = {"aws": {"boto3", "botocore"}, "azure": {"azure", "urllib3"}, "gcp": {"google", "requests"}}
#: The modules of every managed cloud; `doctor` is a module or a folder.
MODULES = {
    "__init__",
    "settings",
    "credentials",
    "provision",
    "network",
    "cluster",
    "storage",
    "registry",
    "monitoring",
}


def _python(folder: Path) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(path for path in folder.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Yield the full name of each import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _cloud_of(path: Path) -> str | None:
    """Return the cloud whose folder contains a file, None for any other file."""
    parts = path.relative_to(ROOT).parts[1:] or ("",)
    return parts[1] if parts[0] == "clouds" and len(parts) > 2 else None


def _uses_clients(path: Path) -> bool:
    """Return whether a file of a cloud may import the cloud's clients."""
    names = {"doctor", "running", "vertex", "vertex_client"}
    return bool(names & {path.stem, path.parent.name})


def test_infra_imports_only_its_few_packages_and_a_clouds_sdk_only_in_the_clouds_folder() -> None:
    for path in _python(INFRA):
        allowed = ANYWHERE | SDKS.get(_cloud_of(path) or "", set())
        allowed = allowed.union(FURTHER.get(path.parent.name, ()), FURTHER.get(path.stem, ()))
        if _uses_clients(path):
            allowed |= CLIENTS.get(_cloud_of(path) or "", set())
        unexpected = {name for name in _imports(path) if name.split(".")[0] not in allowed}
        assert not unexpected, f"{path.relative_to(ROOT)} imports {unexpected}"


def test_only_one_folder_uses_the_automation_api() -> None:
    users = {path.parent.name for path in _python(INFRA) if any("pulumi.automation" in name for name in _imports(path))}
    assert users == {"automation"}, "its errors, its version and Ctrl-C are handled there"


def test_only_a_clouds_own_folder_imports_from_that_folder() -> None:
    for path in [*_python(INFRA), ROOT / "__main__.py"]:
        own = _cloud_of(path)
        foreign = {name for name in _imports(path) if re.match(r"infra\.clouds\.\w+\.", name)}
        foreign = {name for name in foreign if name.split(".")[2] != own}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_only_a_clouds_own_folder_names_the_cloud_in_code() -> None:
    cloud = re.compile(r"\b(aws|azure|gcp|amazon|google|eks|aks|gke)\b", re.IGNORECASE)
    shared = [path for path in _python(INFRA) if _cloud_of(path) is None]
    for path in [*shared, ROOT / "__main__.py"]:
        code = ast.unparse(_without_docstrings(ast.parse(path.read_text())))
        named = cloud.search(code)
        assert not named, (
            f"{path.relative_to(ROOT)} names {named and named.group()}: a field of the contract is missing"
        )


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove the docstrings from a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("cloud", clouds.available())
def test_every_managed_cloud_has_the_same_modules(cloud: str) -> None:
    folder = next(folder for folder in clouds.folders() if folder.name == cloud)
    files = {path.stem for path in folder.glob("*.py")}
    assert {"__init__", "settings", "credentials", "provision"} <= files
    if cloud != "local":
        assert files >= MODULES, f"missing modules: {MODULES - files}"


@pytest.mark.parametrize("cloud", clouds.available())
def test_a_clouds_settings_load_without_its_sdk(cloud: str) -> None:
    script = f"import sys, infra.clouds.{cloud}.settings, infra.clouds.{cloud}.credentials\n"
    script += "print(*sorted(m for m in sys.modules if m.startswith('pulumi')))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [name for name in run.stdout.split() if name.split(".")[0] not in ("pulumi",)], (
        "checking settings must be fast"
    )


def test_the_help_loads_without_any_sdk() -> None:
    script = "import sys, runpy; sys.argv = ['infra', '--help']\ntry: runpy.run_module('infra', run_name='__main__')\n"
    script += "except SystemExit: pass\nassert not {'pulumi', 'pydantic', 'yaml'} & set(sys.modules), 'help is slow'"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "instances" in run.stdout


@pytest.mark.parametrize("cloud", clouds.available())
def test_a_clouds_doctor_loads_without_its_client_and_its_sdk(cloud: str) -> None:
    script = f"import sys, infra.clouds.{cloud}.doctor\n"
    script += "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    foreign = set(run.stdout.split()) & set().union(*CLIENTS.values(), *SDKS.values()) - {"urllib3", "google"}
    assert not foreign, "a missing client must affect only its own check"
