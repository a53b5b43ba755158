"""Tests of the image's entry point, with fake programs on PATH."""

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parent.parent / "trainer" / "entrypoint.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Write programs that print their arguments, and return their folder."""
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\nexit 3\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], "python -m trainer"),
        (["--train.steps", "5"], "python -m trainer --train.steps 5"),
        (["train", "--train.run", "a b"], "python -m trainer train --train.run a b"),
        # `export` is a shell builtin and a trainer command.
        (["export", "--out", "model"], "python -m trainer export --out model"),
        (["torchrun", "--standalone", "-m", "trainer"], "torchrun --standalone -m trainer"),
        (["python", "-m", "trainer", "config"], "python -m trainer config"),
    ],
    ids=["nothing", "options", "a command", "export", "torchrun", "python"],
)
def test_the_image_accepts_trainer_commands_and_programs(programs: Path, arguments: list[str], command: str) -> None:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    result = subprocess.run(
        [ENTRYPOINT, *arguments], cwd=programs, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == command, result.stderr
    assert result.returncode == 3, "the container must have the exit code of its program"


def test_a_path_to_a_program_is_executed(programs: Path) -> None:
    result = subprocess.run([ENTRYPOINT, programs / "torchrun", "x"], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "torchrun x", result.stderr
