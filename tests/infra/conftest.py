"""Fixtures of the infra tests: a blocked network, a kubeconfig, recorded stacks and a fourth cloud."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import infra_fourth
import pytest
from loopback import refuse_connections
from provider_mocks.recording import Recording, run_stack

from infra import catalog, clouds

# `test_infra_fourth_cloud.py` runs the contract test on clouds outside this repository.
for folder in filter(None, os.environ.get("TORCHREC_CLOUD_FOLDERS", "").split(os.pathsep)):
    clouds.__path__.append(folder)
    catalog.search_path.append(Path(folder))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test whose program opens a connection."""
    refuse_connections(monkeypatch, loopback=False)


@pytest.fixture(scope="session")
def stack(kubeconfig: Path) -> Callable[..., Recording]:
    """Record a stack once per set of overrides; an error in the program fails the test unless `fails`."""
    cache: dict[str, Recording] = {}

    def run(name: str, overrides: Mapping[str, object] | None = None, *, fails: bool = False) -> Recording:
        key = f"{name} {sorted((overrides or {}).items(), key=str)}"
        if key not in cache:
            cache[key] = run_stack(name, overrides)
        recording = cache[key]
        if recording.error and not fails:
            raise recording.error
        return recording

    return run


@pytest.fixture
def fourth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add a fourth cloud for one test and return its name."""
    folder = infra_fourth.write(tmp_path)
    monkeypatch.setattr(clouds, "__path__", [*clouds.__path__, str(folder)])
    monkeypatch.setattr(catalog, "search_path", [*catalog.search_path, folder])
    yield "fourth"
    for module in [name for name in sys.modules if name.startswith("infra.clouds.fourth")]:
        del sys.modules[module]


@pytest.fixture
def a3(stack: Callable[..., Recording]) -> Recording:
    """Record a stack on Google Cloud with A3 High nodes, which use GPUDirect-TCPX."""
    return stack("gcp", {"gpu.instance_type": "a3-highgpu-8g"})
