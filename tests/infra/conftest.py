"""Fixtures of the infra tests: no network, a kubeconfig to find, recorded stacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import infra_fourth
import pytest
from loopback import refuse_connections
from provider_mocks.recording import Recording, run_stack

from infra import clouds

#: Folders of further clouds that the contract test covers, as `test_infra_fourth_cloud.py` uses it.
clouds.__path__.extend(filter(None, os.environ.get("TORCHREC_CLOUD_FOLDERS", "").split(os.pathsep)))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads the network fails its test."""
    refuse_connections(monkeypatch, loopback=False)


@pytest.fixture(scope="session")
def stack(kubeconfig: Path) -> Callable[..., Recording]:
    """Record a stack once for all tests that ask for the same overrides; an error in the program fails the test."""
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
    """A fourth cloud, there for one test."""
    monkeypatch.setattr(clouds, "__path__", [*clouds.__path__, str(infra_fourth.write(tmp_path))])
    yield "fourth"
    for module in [name for name in sys.modules if name.startswith("infra.clouds.fourth")]:
        del sys.modules[module]
