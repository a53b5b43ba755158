"""The stories of the chosen stacks, told two at a time; skipped where there is no Pulumi CLI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from opt_in import is_requested

FOLDER = Path(__file__).resolve().parent
STACKS = ("aws", "azure", "gcp", "local")

#: Every position at which a create can fail instead of eight of them; hours instead of minutes.
FULL = os.environ.get("ENGINE_FULL") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """Importing a whole SDK, for its types, warns of every resource in it that has a newer name."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:pulumi_.*")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say why nothing runs where the CLI is absent; tests of the simulation itself need none."""
    for item in items:
        runs_it = FOLDER in item.path.parents and {"stories", "vertex_life"} & set(getattr(item, "fixturenames", ()))
        if runs_it and (reason := _obstacle(config)):
            item.add_marker(pytest.mark.skip(reason=reason))


def _obstacle(config: pytest.Config) -> str | None:
    """Why the engine is not run: these tests take minutes, so that `make test`, which names none, leaves them out."""
    if not is_requested(config, FOLDER):
        return "`make test-engine` runs the real Pulumi engine"
    return None if shutil.which("pulumi") else "no `pulumi` on PATH: https://www.pulumi.com/docs/install"


@pytest.fixture(scope="session")
def stories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path
) -> Iterator[dict[tuple[str, str], Future[object]]]:
    """Every story that a selected test asks for, begun at once, two at a time: one core each."""
    import engine_lifecycle

    wanted: dict[tuple[str, str], None] = {}
    for item in request.session.items:
        stack = getattr(getattr(item, "callspec", None), "params", {}).get("stack")
        for kind in ("life", "faults"):
            if stack and kind in getattr(item, "fixturenames", ()):
                wanted[kind, stack] = None
    for stack in {stack for _, stack in wanted}:
        engine_lifecycle.load_sdks(stack)
    with ThreadPoolExecutor(max_workers=2) as pool:
        found: dict[tuple[str, str], Future[object]] = {}
        for kind, stack in wanted:
            folder = tmp_path_factory.mktemp(f"{kind}-{stack}")
            if kind == "life":
                found[kind, stack] = pool.submit(engine_lifecycle.whole_life, folder, stack, kubeconfig)
            else:
                total = engine_lifecycle.num_creates(stack)
                positions = list(range(1, total + 1)) if FULL else engine_lifecycle.spread(total)
                found[kind, stack] = pool.submit(
                    engine_lifecycle.life_with_faults, folder, stack, kubeconfig, positions
                )
        yield found


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    """Each stack of the repository."""
    return str(request.param)


@pytest.fixture
def life(stories: dict[tuple[str, str], Future[object]], stack: str) -> object:
    """The stack's whole life."""
    return stories["life", stack].result()


@pytest.fixture
def faults(stories: dict[tuple[str, str], Future[object]], stack: str) -> object:
    """The stack's life with faults."""
    return stories["faults", stack].result()
