"""Fixtures of the infra tests: no network, a kubeconfig to find, recorded stacks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import infra_fourth
from infra_mocks import Recording, run_stack

from infra import clouds

#: Folders of further clouds that the contract test covers, as `test_infra_fourth_cloud.py` uses it.
clouds.__path__.extend(filter(None, os.environ.get("TORCHREC_CLOUD_FOLDERS", "").split(os.pathsep)))

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: laptop
contexts:
- {name: laptop, context: {cluster: laptop, user: me}}
- {name: lab, context: {cluster: lab, user: me}}
clusters:
- {name: laptop, cluster: {server: "https://127.0.0.1:6443", certificate-authority: ca.crt}}
- {name: lab, cluster: {server: "https://127.0.0.1:6444"}}
users:
- {name: me, user: {token: not-a-real-token}}
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads the network fails its test."""

    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"the program connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig of two contexts, where kubectl would find it."""
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(KUBECONFIG)
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(path)
    yield path
    if before is None:
        del os.environ["KUBECONFIG"]
    else:
        os.environ["KUBECONFIG"] = before


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
