"""What `docker run IMAGE ...` starts: the image's entry point, with stand-ins for the programs it may start."""

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parent.parent / "trainer" / "entrypoint.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that print what they were called with."""
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\nexit 3\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        ([], "python -m trainer"),
        (["--train.steps", "5"], "python -m trainer --train.steps 5"),
        (["train", "--train.run", "a b"], "python -m trainer train --train.run a b"),
        # A builtin of the shell, but a command of the trainer.
        (["export", "--out", "model"], "python -m trainer export --out model"),
        (["torchrun", "--standalone", "-m", "trainer"], "torchrun --standalone -m trainer"),
        (["python", "-m", "trainer", "config"], "python -m trainer config"),
    ],
    ids=["nothing", "options", "a command", "export", "torchrun", "python"],
)
def test_the_image_takes_trainer_commands_and_programs(programs: Path, arguments: list[str], started: str) -> None:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    shown = subprocess.run(
        [ENTRYPOINT, *arguments], cwd=programs, env=environment, capture_output=True, text=True, check=False
    )
    assert shown.stdout.strip() == started, shown.stderr
    assert shown.returncode == 3, "the exit code of what was started must be the container's"


def test_a_path_to_a_program_is_run(programs: Path) -> None:
    shown = subprocess.run([ENTRYPOINT, programs / "torchrun", "x"], capture_output=True, text=True, check=False)
    assert shown.stdout.strip() == "torchrun x", shown.stderr
