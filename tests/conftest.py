"""Fixtures and hooks that several folders of tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import file_times
import pytest
from fake_cluster import FakeCluster, serve_cluster
from fork_server import forked_processes
from loopback import refuse_connections

# A shell starts background jobs with SIGINT ignored, and children inherit that. The Ctrl-C tests need SIGINT.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    file_times.add_option(parser)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.getoption("slow_files"):
        file_times.print_slowest(terminalreporter, count)


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a kubeconfig with two contexts and set KUBECONFIG to it."""
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(KUBECONFIG)
    # monkeypatch ends with each test; programs in this process may read the variable later.
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(path)
    yield path
    if before is None:
        del os.environ["KUBECONFIG"]
    else:
        os.environ["KUBECONFIG"] = before


@pytest.fixture(scope="session")
def forked_trainers() -> Iterator[None]:
    """Fork the trainer's processes from one that has imported torch; see fork_server."""
    with forked_processes():
        yield


@pytest.fixture
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to another machine."""
    refuse_connections(monkeypatch, loopback=True)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Yield an empty Kubernetes API server on loopback."""
    with serve_cluster(FakeCluster()) as served:
        yield served
