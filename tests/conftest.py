"""Fixtures and hooks that several folders of tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeCluster, serve_cluster
from loopback import refuse_connections

# A background job of a shell ignores SIGINT, and its children inherit that; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

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
- {name: me, user: {token: token-of-the-laptop}}
"""


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig of two contexts, which KUBECONFIG names."""
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(KUBECONFIG)
    # Set for the whole session, and not by monkeypatch: programs that run in this process read it at any time.
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(path)
    yield path
    if before is None:
        del os.environ["KUBECONFIG"]
    else:
        os.environ["KUBECONFIG"] = before


@pytest.fixture
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to another machine."""
    refuse_connections(monkeypatch, loopback=True)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """A Kubernetes API server on loopback without any object."""
    with serve_cluster(FakeCluster()) as served:
        yield served
