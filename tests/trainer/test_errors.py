"""A user mistake in any process ends with one line and exit code 2; a bug keeps its stack trace."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import main_here, tiny_tree, trainer

from trainer.checkpoint import open_store

RANK_1_STEP_5 = 5 * 48 + 24 + 6  # a sample in the second half of the sixth batch, which rank 1 reads


def launch(
    folder: Path, *options: str, env: dict[str, str] | None = None, **changes: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python -m trainer launch --nproc 2 train` with a timeout."""
    dotted = {"checkpoint.uri": str(folder), "train.run": "a", "train.steps": 20}
    dotted |= {name.replace("__", "."): value for name, value in changes.items()}
    (folder / "config.json").write_text(json.dumps(tiny_tree(dotted)), encoding="utf-8")
    return trainer("launch", "--nproc", "2", "train", "--config", str(folder / "config.json"), *options, env=env)


def test_a_bad_id_in_one_process_ends_all_with_one_line(tmp_path: Path) -> None:
    source = {"data__source": "odd_sources:BadId", "data__options": {"at": RANK_1_STEP_5}, "checkpoint__every_steps": 1}
    ended = launch(tmp_path, **source)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1, f"one line, no stack trace: {ended.stderr}"
    for part in ("error: feature cat_1", "got 999", f"sample {RANK_1_STEP_5}", "61 rows", "allowed: 0 to 60"):
        assert part in ended.stderr, f"the message lacks {part!r}: {ended.stderr}"
    steps = open_store(str(tmp_path), "a").complete_steps()
    assert steps, "the checkpoints before the bad row are gone"
    assert steps[-1] <= 5, "a step was saved that was not trained"


def test_two_processes_report_a_batch_that_does_not_divide_once(tmp_path: Path) -> None:
    ended = launch(tmp_path, train__batch_size=33)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: train.batch_size does not divide by 2 processes: got 33")
    assert "32 or 34" in ended.stderr
    assert ended.stderr.count("\n") == 1, f"one line, from one process: {ended.stderr}"
    assert not (tmp_path / "a").exists(), "files were written before the configuration was checked"


def test_a_crash_of_one_process_keeps_its_trace_and_ends_all(tmp_path: Path) -> None:
    ended = launch(tmp_path, data__source="odd_sources:Crash", data__options={"at": RANK_1_STEP_5})
    assert ended.returncode not in (0, 2), "a bug is not a user mistake"
    assert "Traceback (most recent call last)" in ended.stderr, "a bug needs its stack trace"
    assert "ZeroDivisionError: the program is wrong" in ended.stderr


def test_a_required_gpu_that_is_missing_is_reported_once(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--train.device=cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: train.device is cuda, but this machine has 0 usable GPUs for 2 processes")
    assert ended.stderr.count("\n") == 1, f"one line, from one process: {ended.stderr}"


def test_two_processes_report_an_unknown_option_once(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--train.stepz=3")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: unknown option --train.stepz (did you mean --train.steps?)")
    assert ended.stderr.count("\n") == 1, f"one line, from one process: {ended.stderr}"


# --- in this process -------------------------------------------------------------------------------------------------


def error_line(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """Run a command that fails with exit code 2, and return its one-line error."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    assert main_here(folder, "train", changes=dotted) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, f"one line, no stack trace: {message}"
    assert message.startswith("error: ")
    return message


@pytest.mark.parametrize("pipeline", ["sparse_dist", "base", "none"])
def test_the_error_for_a_bad_id_names_feature_sample_and_value(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"data__source": "odd_sources:BadId", "data__options": {"at": 100}, "train__pipeline": pipeline}
    message = error_line(tmp_path, capsys, **options)
    for part in ("feature cat_1", "got 999", "sample 100", "allowed: 0 to 60"):
        assert part in message


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_error_for_a_nan_label_names_its_sample(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_line(
        tmp_path, capsys, data__source="odd_sources:NanLabel", data__options={"at": 130, "split": split}
    )
    assert "wrong label in sample 130: got nan" in message
    assert "Fix: correct or drop that row" in message


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("no_such_module:Class", ["cannot import no_such_module", "PYTHONPATH"]),
        ("odd_sources:NoClass", ["odd_sources has no NoClass"]),
        ("odd_sources:NoSource", ["lacks read() or samples_per_epoch", "trainer.data.Source"]),
    ],
)
def test_a_source_that_cannot_be_used_is_reported(
    source: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_line(tmp_path, capsys, data__source=source)
    for part in (f"data.source {source}", *parts):
        assert part in message


def test_a_required_gpu_that_is_missing_is_reported_by_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "train.device is cuda" in error_line(tmp_path, capsys, train__device="cuda")


def test_a_missing_launcher_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = error_line(tmp_path, capsys)
    assert "WORLD_SIZE is 2 but MASTER_ADDR is not set" in message
    assert "torchrun --nproc_per_node 2 -m trainer" in message


def test_ctrl_c_ends_with_130_and_explains_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"data.source": "odd_sources:Interrupt", "data.options": {"at": 100}}
    assert main_here(tmp_path, "train", changes=changes) == 130
    assert capsys.readouterr().err == "interrupted; the same command resumes from the last checkpoint\n"


def test_a_bug_is_not_reported_as_a_user_mistake(tmp_path: Path) -> None:
    changes = {"data.source": "odd_sources:Crash", "data.options": {"at": 100}}
    with pytest.raises(ZeroDivisionError, match="the program is wrong"):
        main_here(tmp_path, "train", changes=changes)


def test_a_closed_pipe_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import main as cli

    def write_to_closed_pipe(_: object) -> int:
        raise BrokenPipeError

    stdout = os.dup(1)
    monkeypatch.setitem(cli.COMMANDS, "config", write_to_closed_pipe)
    monkeypatch.setattr(cli.sys, "stdout", (tmp_path / "out").open("w"))
    assert cli.main(["config"]) == 0, "`| head` is not a failure"
    os.dup2(stdout, 1)
    os.close(stdout)
