"""Fixtures that start a real node for the tests of each file and stop it afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_operators
import node as node_commands
import node_build
import node_image
import pytest
from cluster_build import MODULES, BuildError, missing, say
from cluster_operators import Operator
from cluster_plane import wait_for
from node_runs import MEASURED, Run, record_measurement
from opt_in import is_requested

HERE = Path(__file__).resolve().parent
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.session.stash[FAILED] = True
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the measurements, even if a test failed."""
    if MEASURED:
        terminalreporter.section("measured on the node")
        for line in MEASURED:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> None:
    """Build the missing programs and the image."""
    if not is_requested(request.config, HERE):
        pytest.skip("`make test-node` runs the tests on a real node")
    if reason := node_build.obstacle():
        pytest.skip(reason)
    absent = [module.name for module in missing(node_build.NEEDED)] + ["image"] * (not node_image.is_built())
    if not absent:
        return
    if os.environ.get("TEST_NODE_BUILD") == "0":
        pytest.skip(f"not built yet: {', '.join(absent)}, and TEST_NODE_BUILD=0; `make test-node` builds it")
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        say(f"\nbuilding {', '.join(absent)}, once: 10 to 20 minutes on two cores")
        try:
            node_commands.build()
        except (BuildError, node_commands.NodeError) as error:
            pytest.exit(f"error: {error}", returncode=2)


@pytest.fixture(scope="module")
def node(programs: None, request: pytest.FixtureRequest) -> Iterator[node_commands.Node]:
    """Yield a running node; if a test failed, keep the logs of servers and pods and print their folder."""
    began = time.monotonic()
    try:
        started = node_commands.up(owned=True)
    except node_commands.NodeError as error:
        pytest.exit(f"error: {error}", returncode=2)
    record_measurement(f"node ready after {time.monotonic() - began:.1f} s")
    try:
        yield started
    finally:
        if request.session.stash.get(FAILED, False):
            say(f"\nlogs of the node: {node_commands.keep_logs(started)}")
        node_commands.down()


@pytest.fixture(scope="module")
def operators(node: node_commands.Node) -> Iterator[Callable[[Operator], None]]:
    """Yield a function that installs an operator once; its process runs in the node's network."""
    installed: set[str] = set()

    def install(operator: Operator) -> None:
        if absent := missing([MODULES[operator.module]]):
            pytest.skip(f"not built yet: {absent[0].name}; `make test-cluster` builds it")
        if operator.name not in installed:
            cluster_operators.install(node, operator)
            installed.add(operator.name)

    yield install
    node.stop()


@pytest.fixture
def start(node: node_commands.Node, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Yield `start(job={...}, trainer={...})`, which starts a run in its own namespace; delete it afterwards."""
    runs: list[Run] = []

    def start_run(launcher: str = "job", **changes: Any) -> Run:
        namespace = f"run-{abs(hash((request.node.nodeid, len(runs)))) % 10**8}"
        run = Run(node, namespace, launcher, **changes)
        runs.append(run)
        return run.start()

    yield start_run
    for run in runs:
        run.remove()
        wait_for("end of the pods", lambda run=run: not node.get("pods", "--namespace", run.namespace))
