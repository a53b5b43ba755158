"""One control plane for all tests of this folder, a namespace for each test, and nodes with fake GPUs."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_build
import cluster_operators
import cluster_plane
import pytest
from cluster_manifests import gpu_node
from cluster_operators import Operator
from cluster_plane import Plane
from opt_in import is_requested

HERE = Path(__file__).resolve().parent
FAILED = pytest.StashKey[bool]()
#: Numbers in the names of nodes. A name is used once, as the control plane remembers the pods of a deleted node.
NUMBERS = itertools.count(100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember whether a test failed, to keep the logs of the control plane."""
    report = yield
    if report.failed:
        item.session.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> None:
    """Build the control plane if it is missing."""
    if not is_requested(request.config, HERE):
        pytest.skip("`make test-cluster` runs the tests on a real control plane")
    if reason := cluster_build.obstacle() or cluster_plane.obstacle():
        pytest.skip(reason)
    if absent := cluster_build.missing():
        names = ", ".join(module.name for module in absent)
        if os.environ.get("TEST_CLUSTER_BUILD") == "0":
            pytest.skip(f"not built yet: {names}, and TEST_CLUSTER_BUILD=0; `make test-cluster` builds it")
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            cluster_build.say(f"\nbuilding {names}, once: about 15 minutes on two cores")
            try:
                cluster_build.build()
            except cluster_build.BuildError as error:
                pytest.exit(f"error: {error}", returncode=2)


@pytest.fixture(scope="session")
def plane(programs: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """Start a control plane; keep its logs and print their folder if a test failed."""
    started = Plane(tmp_path_factory.mktemp("plane"))
    try:
        started.start()
        yield started
    except BaseException:
        request.session.stash[FAILED] = True
        raise
    finally:
        started.stop()
        if request.session.stash.get(FAILED, False):
            kept = shutil.copytree(started.logs, HERE.parents[1] / ".cache" / "cluster-logs", dirs_exist_ok=True)
            cluster_build.say(f"\nlogs of the control plane: {kept}")


@pytest.fixture
def gpu_nodes(plane: Plane) -> Iterator[Callable[..., list[str]]]:
    """Return a function that adds ready nodes for one test: `gpu_nodes(2)` or `gpu_nodes(2, cpu_node)`."""
    added: list[str] = []

    def add(count: int, build: Callable[[str], dict[str, Any]] = gpu_node) -> list[str]:
        """Add nodes and return their names."""
        names = [f"node-{next(NUMBERS)}" for _ in range(count)]
        added.extend(names)
        plane.apply([build(name) for name in names])
        plane.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node", *names)
        return names

    yield add
    if added:
        plane.kubectl("delete", "node", *added)


@pytest.fixture
def namespace(plane: Plane, request: pytest.FixtureRequest, gpu_nodes: Callable[..., list[str]]) -> Iterator[str]:
    """Create a namespace at the restricted Pod Security level, as the product does; delete it after the test.

    It is deleted before the nodes of `gpu_nodes`, as the pods of a deleted node remain until garbage collection.
    """
    name = f"test-{abs(hash(request.node.nodeid)) % 10**8}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}])
    yield name
    # The namespace itself is deleted later: its controller waits for the grace period of deleted pods.
    plane.kubectl("delete", "namespace", name, "--wait=false")
    plane.kubectl("delete", "jobs,pods", "--all", "--namespace", name, "--wait=false")
    cluster_plane.wait_for(f"end of all pods in {name}", lambda: plane.get("pods", "--namespace", name) == [])


@pytest.fixture
def open_namespace(plane: Plane, namespace: str) -> Iterator[str]:
    """Allow a fabric's sidecars in the test's namespace; delete cluster-wide objects after the test."""
    plane.kubectl("label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged")
    yield namespace
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def operators(plane: Plane) -> Callable[[Operator], None]:
    """Return a function that installs an operator once, for the first test that needs it."""
    installed: set[str] = set()

    def install(operator: Operator) -> None:
        """Install the operator unless it is installed."""
        if operator.name not in installed:
            cluster_operators.install(plane, operator)
            installed.add(operator.name)

    return install
