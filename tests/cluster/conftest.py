"""One control plane for all tests of this folder, a namespace for each test, and nodes with imagined GPUs."""

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
#: Of nodes: a name is used once, as the control plane remembers what ran on it.
NUMBERS = itertools.count(100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.session.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> None:
    """The built control plane, building it first where it is missing."""
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
    """A running control plane; its logs are kept, and named, when a test failed."""
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
    """Add nodes for one test, `gpu_nodes(2)` or `gpu_nodes(2, cpu_node)`: ready when it returns."""
    made: list[str] = []

    def add(count: int, make: Callable[[str], dict[str, Any]] = gpu_node) -> list[str]:
        names = [f"node-{next(NUMBERS)}" for _ in range(count)]
        made.extend(names)
        plane.apply([make(name) for name in names])
        plane.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node", *names)
        return names

    yield add
    if made:
        plane.kubectl("delete", "node", *made)


@pytest.fixture
def namespace(plane: Plane, request: pytest.FixtureRequest, gpu_nodes: Callable[..., list[str]]) -> Iterator[str]:
    """A namespace at the restricted level of Pod Security, as the product's; gone, with all in it, after the test.

    It goes before the nodes of `gpu_nodes`: a pod of a node that is gone lingers until it is collected.
    """
    name = f"test-{abs(hash(request.node.nodeid)) % 10**8}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}])
    yield name
    # The namespace itself goes later: its controller waits out the grace period of pods that are gone already.
    plane.kubectl("delete", "namespace", name, "--wait=false")
    plane.kubectl("delete", "jobs,pods", "--all", "--namespace", name, "--wait=false")
    cluster_plane.wait_for(f"end of all pods in {name}", lambda: plane.get("pods", "--namespace", name) == [])


@pytest.fixture
def open_namespace(plane: Plane, namespace: str) -> Iterator[str]:
    """The test's namespace, admitting what a fabric's sidecars need, and without cluster-wide objects afterwards."""
    plane.kubectl("label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged")
    yield namespace
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def operators(plane: Plane) -> Callable[[Operator], None]:
    """Install an operator once, at the first test that needs it."""
    installed: set[str] = set()

    def install(operator: Operator) -> None:
        if operator.name not in installed:
            cluster_operators.install(plane, operator)
            installed.add(operator.name)

    return install
