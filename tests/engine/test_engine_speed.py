"""The time of a preview, compared with the preview of an empty program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import engine_lifecycle
import pytest

#: The stack with the most resources.
LARGEST = "aws"
MAX_RATIO = 6


@pytest.fixture(scope="module")
def seconds(
    lifecycles: object, tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path
) -> Callable[[bool], list[float]]:
    """Return a function that times previews of the largest stack or of an empty program."""

    def measure(empty: bool) -> list[float]:
        folder = tmp_path_factory.mktemp("speed")
        _, server, project = engine_lifecycle.open_project(folder, LARGEST, kubeconfig)
        if empty:
            project.replace_program("")
        runs = [project.run("preview") for _ in range(3)]
        server.kill()
        assert all(run.ok for run in runs), runs[-1].output
        # The first run also loads the SDKs' types for the simulation; a real provider does not.
        return [run.seconds for run in runs[1:]]

    return measure


def test_a_preview_of_the_largest_stack_is_not_slowed_by_unused_sdks(
    seconds: Callable[[bool], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    empty, largest = min(seconds(True)), min(seconds(False))
    with capsys.disabled():
        sys.stdout.write(
            f"\npreview of {LARGEST}: {largest:.1f} s, of an empty program {empty:.1f} s: {largest - empty:.1f} s more "
            f"(aim: 5 on two quiet cores), ratio {largest / empty:.1f}\n"
        )
    # A ratio, because both run under the same load. Importing another cloud's SDK doubles it.
    assert largest / empty < MAX_RATIO
