"""Fixtures that run the lifecycles of the selected stacks, two at a time; skipped without the Pulumi CLI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from opt_in import is_requested

FOLDER = Path(__file__).resolve().parent
_PHASES = pytest.StashKey[dict[str, object]]()
STACKS = ("aws", "azure", "gcp", "local")

#: Fixtures that run the CLI.
_NEED_ENGINE = {"kubeconfig", "lifecycles", "vertex_lifecycle", "project", "opened", "upgraded"}

#: Fail a create at every position instead of at eight of them. This takes hours instead of minutes.
FULL = os.environ.get("ENGINE_FULL") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """Ignore the SDKs' deprecation warnings: importing a whole SDK warns about every renamed resource."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:pulumi_.*")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need the CLI if it is missing; tests of the simulation itself do not need it."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        needs_engine = FOLDER in item.path.parents and fixtures & _NEED_ENGINE
        if needs_engine and (reason := _obstacle(config)):
            item.add_marker(pytest.mark.skip(reason=reason))


def _obstacle(config: pytest.Config) -> str | None:
    """Return why the engine tests are skipped, or None. They take minutes, so `make test` leaves them out."""
    if not is_requested(config, FOLDER):
        return "`make test-engine` runs the real Pulumi engine"
    return None if shutil.which("pulumi") else "no `pulumi` on PATH: https://www.pulumi.com/docs/install"


@pytest.fixture(scope="session")
def lifecycles(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path
) -> Iterator[dict[tuple[str, str], Future[object]]]:
    """Start every lifecycle that a selected test needs, two at a time: one core each."""
    import engine_lifecycle

    needed: dict[tuple[str, str], None] = {}
    for item in request.session.items:
        stack = getattr(getattr(item, "callspec", None), "params", {}).get("stack")
        for kind in ("lifecycle", "faults"):
            if stack and kind in getattr(item, "fixturenames", ()):
                needed[kind, stack] = None
    for stack in {stack for _, stack in needed}:
        engine_lifecycle.load_sdks(stack)
    with ThreadPoolExecutor(max_workers=2) as pool:
        found: dict[tuple[str, str], Future[object]] = {}
        for kind, stack in needed:
            folder = tmp_path_factory.mktemp(f"{kind}-{stack}")
            if kind == "lifecycle":
                found[kind, stack] = pool.submit(engine_lifecycle.run_lifecycle, folder, stack, kubeconfig)
            else:
                total = engine_lifecycle.num_creates(stack)
                positions = list(range(1, total + 1)) if FULL else engine_lifecycle.spread_positions(total)
                found[kind, stack] = pool.submit(engine_lifecycle.run_with_faults, folder, stack, kubeconfig, positions)
        yield found
        lives = {stack: future for (kind, stack), future in found.items() if kind == "lifecycle"}
        request.config.stash[_PHASES] = {
            stack: life.result().phases  # type: ignore[attr-defined]
            for stack, life in lives.items()
            if not life.exception()
        }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the resources and the simulated minutes of each phase of each stack's life."""
    if phases := config.stash.get(_PHASES, None):
        import engine_rehearsal

        terminalreporter.section("life of each stack")
        for line in engine_rehearsal.table(phases):  # type: ignore[arg-type]
            terminalreporter.write_line(line)


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    """Return each stack of the repository in turn."""
    return str(request.param)


@pytest.fixture
def lifecycle(lifecycles: dict[tuple[str, str], Future[object]], stack: str) -> object:
    """Return the stack's complete lifecycle."""
    return lifecycles["lifecycle", stack].result()


@pytest.fixture
def faults(lifecycles: dict[tuple[str, str], Future[object]], stack: str) -> object:
    """Return the stack's lifecycle with injected faults."""
    return lifecycles["faults", stack].result()
