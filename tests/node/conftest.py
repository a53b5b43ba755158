"""A real node for the tests of each file, stopped after them."""

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
from node_runs import MEASURED, Run, told
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
    """What was measured, whether or not a test failed."""
    if MEASURED:
        terminalreporter.section("measured on the node")
        for line in MEASURED:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> None:
    """The programs and the image, building what is missing."""
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
    """A running node; the logs of its servers and pods are kept, and named, when a test failed."""
    began = time.monotonic()
    try:
        started = node_commands.up(owned=True)
    except node_commands.NodeError as error:
        pytest.exit(f"error: {error}", returncode=2)
    told(f"node ready after {time.monotonic() - began:.1f} s")
    try:
        yield started
    finally:
        if request.session.stash.get(FAILED, False):
            say(f"\nlogs of the node: {node_commands.keep_logs(started)}")
        node_commands.down()


@pytest.fixture(scope="module")
def operators(node: node_commands.Node) -> Iterator[Callable[[Operator], None]]:
    """Install an operator once, at the first test that needs it; its process runs in the node's network."""
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
    """Start a run in a namespace of its own: `start(job={...}, trainer={...})`; gone after the test."""
    made: list[Run] = []

    def started(launcher: str = "job", **changes: Any) -> Run:
        namespace = f"run-{abs(hash((request.node.nodeid, len(made)))) % 10**8}"
        run = Run(node, namespace, launcher, **changes)
        made.append(run)
        return run.start()

    yield started
    for run in made:
        run.remove()
        wait_for("end of the pods", lambda run=run: not node.get("pods", "--namespace", run.namespace))
