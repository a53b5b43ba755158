"""Fixtures of the tests of the terminal's view: a cluster on loopback, and the command as a person runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fake_cluster import FakeCluster, running

from workloads.__main__ import main


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """An API server without any object."""
    with running(FakeCluster()) as served:
        yield served


@pytest.fixture
def command(cluster: FakeCluster, tmp_path: Path) -> Callable[..., int]:
    """`python -m workloads WORDS` against that cluster; the exit code."""

    def run(*words: str) -> int:
        where = ["--kubeconfig", str(cluster.kubeconfig(tmp_path)), "--namespace", "training", "--run", "criteo"]
        return main([words[0], *where, *words[1:]])

    return run
