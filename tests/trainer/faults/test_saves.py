"""Background saves: when they start, failed saves, and damaged checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import Machines
from small_jobs import after, alone, checkpointer, config_of, full_weights, main_here, same, steps

from trainer.checkpoint import Progress, Saver, open_store
from trainer.checkpoint.checksums import BLOCK_BYTES, FileChecksums
from trainer.checkpoint.manager import milestones
from trainer.checkpoint.snapshot import Snapshot
from trainer.sharding.sharded_model import build_sharded_model
from trainer.training.save_schedule import SaveSchedule

BY_STEPS = {"checkpoint.every_minutes": 0, "metrics.log_every": 1}


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def complete(folder: Path) -> list[int]:
    return open_store(str(folder), "a").complete_steps()


# --- in the background -----------------------------------------------------------------------------------------------


def test_training_continues_during_a_save_and_does_not_change_it(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        steps(model, 5)
        expected = full_weights(model)
        saver = Saver(checkpointer(model), config.checkpoint, lambda *_, **__: None)
        saver.start(after(config, 5))
        steps(model, 5, after(config, 5))  # changes the weights during the save or before it starts to write
        saver.wait()
        other = build_sharded_model(config, runtime)
        assert checkpointer(other).restore(5) == after(config, 5)
        assert same(full_weights(other), expected) == [], "weights of a later step are in the checkpoint"


def test_a_process_without_memory_for_a_copy_still_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Snapshot, "take", fail)
    assert main_here(tmp_path, "train", "--checkpoint.every-steps=1", "--checkpoint.keep=9") == 0
    assert complete(tmp_path)[-1] == 4
    assert len(complete(tmp_path)) > 1
    assert caplog.text.count("too little memory for a copy of the state") == 1


def test_a_due_save_waits_for_the_pending_one(machines: Machines) -> None:
    machines.changes = BY_STEPS | {"train.steps": 40, "checkpoint.every_steps": 1, "checkpoint.keep": 100}
    slow = machines.start(2, {1: {"kind": "slow_writes", "seconds": 0.0002}})
    assert slow.wait() == [0, 0], slow.log.read_text()[-3000:]
    saves = [e for e in slow.events() if e["event"] == "checkpoint"]
    assert complete(machines.folder) == [e["step"] for e in saves]
    assert 2 <= len(saves) < 40, "every step was saved, so none waited for another"
    assert saves[-1]["step"] == 40


def test_background_saves_do_not_change_the_run(machines: Machines) -> None:
    machines.changes = BY_STEPS | {"train.steps": 12, "checkpoint.every_steps": 2}
    results = {}
    for background in (True, False):
        run = f"a-{background}".lower()
        results[background] = machines.finished(2, train__run=run, checkpoint__asynchronous=background)
    assert results[True]["loss"] == results[False]["loss"]


def test_saves_follow_the_clock(machines: Machines) -> None:
    machines.changes = {"train.steps": 60, "checkpoint.every_minutes": 0.005, "checkpoint.keep": 100}
    slow = {rank: {"kind": "slow_steps", "seconds": 0.05} for rank in range(2)}
    timed = machines.start(2, slow)
    assert timed.wait() == [0, 0]
    saves = [e["step"] for e in timed.events() if e["event"] == "checkpoint"]
    assert 3 <= len(saves) < 60, f"60 steps of at least 0.05 s with a save every 0.3 s: {saves}"


def test_without_an_interval_only_the_last_step_is_saved(tmp_path: Path) -> None:
    assert main_here(tmp_path, "train", "--checkpoint.every-minutes=0") == 0
    assert complete(tmp_path) == [4]


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_milestones_are_the_first_saves_at_or_after_each_multiple() -> None:
    assert milestones([3, 9, 12, 20, 21, 35, 40], 10) == {12, 20, 35, 40}
    assert milestones([10, 20], 10) == {10, 20}
    assert milestones([5, 15], 0) == set()


def test_milestones_are_kept_while_other_checkpoints_are_deleted(tmp_path: Path) -> None:
    every = ["--checkpoint.every-steps=1", "--checkpoint.asynchronous=false", "--checkpoint.keep=1"]
    assert main_here(tmp_path, "train", "--train.steps=10", "--checkpoint.keep-every-steps=4", *every) == 0
    assert complete(tmp_path) == [4, 8, 10]


# --- saves that fail -------------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_and_the_run_continues_without_that_save(machines: Machines) -> None:
    machines.changes = BY_STEPS | {"train.steps": 12, "checkpoint.every_steps": 4}
    run = machines.start(2, {1: {"kind": "full_disk", "first": 1, "last": 2}})
    assert run.wait() == [0, 0], run.log.read_text()[-3000:]
    failed = [e for e in run.events() if e["event"] == "checkpoint_failed"]
    assert [e["failures"] for e in failed] == [1, 2]
    assert "No space left on device" in failed[0]["error"]
    assert "choose another --checkpoint.uri" in failed[0]["error"]
    assert [e["step"] for e in run.events() if e["event"] == "checkpoint"] == [12]
    assert complete(machines.folder) == [12]
    folder = machines.folder / "a" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step_0000000012"], "files of a failed save were left behind"


def test_too_many_failed_saves_in_a_row_end_the_run_with_one_line(machines: Machines) -> None:
    machines.changes = BY_STEPS | {"train.steps": 40, "checkpoint.every_steps": 4, "checkpoint.max_failures": 2}
    run = machines.start(2, {0: {"kind": "full_disk", "first": 1, "last": 99}})
    assert run.wait(help_along=False) == [2, 2], run.log.read_text()[-3000:]
    (line,) = [text for text in run.log.read_text().splitlines() if text.startswith("error: ")]
    assert "2 saves in a row have failed (checkpoint.max_failures 2)" in line
    assert max(e["step"] for e in run.events() if e["event"] == "train") < 40, "it continued as if nothing had happened"


def test_the_last_save_is_retried(machines: Machines) -> None:
    machines.changes = BY_STEPS | {"train.steps": 4}
    run = machines.start(1, {0: {"kind": "full_disk", "first": 1, "last": 2}})
    assert run.wait() == [0], run.log.read_text()[-3000:]
    assert complete(machines.folder) == [4]


def test_a_failed_save_is_retried_before_the_interval_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, {"checkpoint.every_minutes": 30})
    now = [1000.0]
    module = sys.modules[Saver.__module__]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with alone(config) as runtime:
        store = checkpointer(build_sharded_model(config, runtime))
        monkeypatch.setattr(store, "write", lambda *_: (_ for _ in ()).throw(module.SaveFailedError("no")))
        saver = Saver(store, config.checkpoint, lambda *_, **__: None)
        schedule = SaveSchedule(config, 100, True, saver, now=lambda: now[0])
        assert not schedule.ballot(0, stop=False).due
        saver.start(Progress(1, 48))
        saver.wait()
        assert not schedule.ballot(1, stop=False).due, "an immediate retry would fail again"
        now[0] += 61
        assert schedule.ballot(2, stop=False).due, "a failed save must not wait for half an hour"


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    often = ["--checkpoint.every-steps=2", "--checkpoint.asynchronous=false"]
    assert main_here(folder, "train", *often) == 0
    assert complete(folder) == [2, 4]
    return folder


def flip_a_bit(step: Path) -> None:
    """Flip a bit in the middle of the largest tensor file, which only a checksum detects."""
    file = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def cut(name: str) -> Any:
    return lambda step: (step / name).write_bytes((step / name).read_bytes()[:10])


def without_checksums(step: Path) -> None:
    marker = json.loads((step / "COMPLETE.json").read_text())
    del marker["files"]
    (step / "COMPLETE.json").write_text(json.dumps(marker))


DAMAGE = {
    "a flipped bit": flip_a_bit,
    "a missing file": lambda step: next(step.glob("*.distcp")).unlink(),
    "cut metadata": cut(".metadata"),
    "a cut marker": cut("COMPLETE.json"),
    "a marker without checksums": without_checksums,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(
    damage: str, two_checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_checkpoints / "a", tmp_path / "a")
    DAMAGE[damage](tmp_path / "a" / "checkpoints" / "step_0000000004")
    capsys.readouterr()
    assert main_here(tmp_path, "train") == 0
    shown = events(capsys)
    assert [e["step"] for e in shown if e["event"] == "resume"] == [2]
    (warning,) = [e["text"] for e in shown if e["event"] == "warning"]
    assert str(tmp_path / "a" / "checkpoints" / "step_0000000004") in warning
    assert "resuming from the checkpoint before it" in warning
    whole = json.loads((two_checkpoints / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert next(e for e in shown if e["event"] == "result")["loss"] == whole["loss"]
    assert main_here(tmp_path, "evaluate") == 0, "the save of its step must replace the damaged checkpoint"


def test_a_flipped_bit_in_the_share_of_one_process_makes_all_use_the_checkpoint_before(
    two_checkpoints: Path, machines: Machines
) -> None:
    machines.changes = BY_STEPS | {"train.steps": 6, "checkpoint.every_steps": 3, "checkpoint.asynchronous": False}
    machines.finished(2)
    file = machines.folder / "a" / "checkpoints" / "step_0000000006" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    run = machines.start(2, train__steps=7)
    assert run.wait() == [0, 0], run.log.read_text()[-3000:]
    assert run.resumed_at() == 3


def test_two_damaged_checkpoints_are_reported_in_one_line(
    two_checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_checkpoints / "a", tmp_path / "a")
    for step in (tmp_path / "a" / "checkpoints").iterdir():
        flip_a_bit(step)
    capsys.readouterr()
    assert main_here(tmp_path, "train") == 2
    message = capsys.readouterr().err
    assert "step_0000000004" in message
    assert "nor can the 1 before it" in message
    assert message.count("\n") == 1, message


def test_a_checksum_covers_every_block(tmp_path: Path) -> None:
    from fsspec.implementations.local import LocalFileSystem

    from trainer.checkpoint.files import CheckedFiles
    from trainer.checkpoint.requests import DamagedFileError
    from trainer.storage.retry import RetryPolicy

    data = torch.arange(BLOCK_BYTES // 4 + 1000, dtype=torch.int32).numpy().tobytes()
    writing = CheckedFiles(LocalFileSystem(), RetryPolicy(attempts=1))
    path = str(tmp_path / "x")
    with writing.create_stream(path, "wb") as stream:
        stream.write(data)
    assert writing.written["x"].size == len(data)
    assert len(writing.written["x"].crcs) == 2
    expected = {"x": FileChecksums.from_json(json.loads(json.dumps(writing.written["x"].to_json())))}
    with CheckedFiles(LocalFileSystem(), RetryPolicy(attempts=1), expected).create_stream(path, "rb") as stream:
        assert stream.read() == data
    for where in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(data) - 1):
        spoiled = bytearray(data)
        spoiled[where] ^= 128
        (tmp_path / "x").write_bytes(spoiled)
        reading = CheckedFiles(LocalFileSystem(), RetryPolicy(attempts=1), expected).create_stream(path, "rb")
        with reading as stream, pytest.raises(DamagedFileError, match="x is damaged between bytes"):
            stream.read()


def test_a_changed_setting_is_not_reported_as_damage(
    two_checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_checkpoints / "a", tmp_path / "a")
    assert main_here(tmp_path, "train", changes={"data.seed": 2}) == 2, "an older checkpoint would not help"
    assert "was written with data.seed" in capsys.readouterr().err
