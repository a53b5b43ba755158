"""What the program costs a person who waits for a preview, beside what the engine costs anyway."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import engine_lifecycle
import pytest

#: The stack with the most resources.
LARGEST = "aws"
_RATIO_AT_MOST = 6


@pytest.fixture(scope="module")
def seconds(
    stories: object, tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path
) -> Callable[[bool], list[float]]:
    """Wall-clock seconds of previews of the largest stack, or of a program that does nothing in its place."""

    def measure(empty: bool) -> list[float]:
        folder = tmp_path_factory.mktemp("speed")
        _, server, project = engine_lifecycle.open_project(folder, LARGEST, kubeconfig)
        if empty:
            project.replace_program("")
        runs = [project.run("preview") for _ in range(3)]
        server.kill()
        assert all(run.ok for run in runs), runs[-1].output
        # The first run of the simulation reads the SDKs' types, which no real provider does.
        return [run.seconds for run in runs[1:]]

    return measure


def test_a_preview_of_the_largest_stack_loads_no_more_than_it_needs(
    seconds: Callable[[bool], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    empty, whole = min(seconds(True)), min(seconds(False))
    with capsys.disabled():
        sys.stdout.write(
            f"\npreview of {LARGEST}: {whole:.1f} s, of an empty program {empty:.1f} s: {whole - empty:.1f} s more "
            f"(aim: 5 on two quiet cores), ratio {whole / empty:.1f}\n"
        )
    # A ratio, since both were timed under the same load: another cloud's SDK in the program doubles it.
    assert whole / empty < _RATIO_AT_MOST
