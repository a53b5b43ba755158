"""Fixtures of the workloads' tests: a kubeconfig to find, no network, and a cluster on loopback to look at."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_cluster import FakeCluster, running

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: laptop
contexts:
- {name: laptop, context: {cluster: laptop, user: me}}
clusters:
- {name: laptop, cluster: {server: "https://127.0.0.1:6443"}}
users:
- {name: me, user: {token: not-a-real-token}}
"""


@pytest.fixture(scope="session", autouse=True)
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig where kubectl would find it."""
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(KUBECONFIG)
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(path)
    yield path
    if before is None:
        del os.environ["KUBECONFIG"]
    else:
        os.environ["KUBECONFIG"] = before


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that leaves this machine fails."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        assert host in {"127.0.0.1", "::1", "localhost"}, f"a connection to {address}"
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """An API server without any object."""
    with running(FakeCluster()) as served:
        yield served


@pytest.fixture
def command(cluster: FakeCluster, tmp_path: Path) -> Callable[..., int]:
    """`python -m workloads WORDS` against that cluster; the exit code."""
    from workloads.__main__ import main

    def run(*words: str) -> int:
        where = ["--kubeconfig", str(cluster.kubeconfig(tmp_path)), "--namespace", "training", "--run", "criteo"]
        return main([words[0], *where, *words[1:]])

    return run
