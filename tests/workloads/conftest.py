"""Fixtures of the workloads' tests: a kubeconfig to find, no network, and a cluster on loopback to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cluster import FakeCluster


@pytest.fixture(scope="session", autouse=True)
def _session(kubeconfig: Path, forked_trainers: None) -> None:
    """Set KUBECONFIG and fork the trainer in every test of this folder."""


@pytest.fixture(autouse=True)
def _network(loopback_only: None) -> None:
    """Keep every test of this folder on this machine."""


@pytest.fixture
def command(cluster: FakeCluster, tmp_path: Path) -> Callable[..., int]:
    """`python -m workloads WORDS` against that cluster; the exit code."""
    from workloads.__main__ import main

    def run(*words: str) -> int:
        where = ["--kubeconfig", str(cluster.kubeconfig(tmp_path)), "--namespace", "training", "--run", "criteo"]
        return main([words[0], *where, *words[1:]])

    return run
