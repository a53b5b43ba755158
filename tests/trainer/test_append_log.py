"""Logs on a disk that is full: the run goes on, it is told once, and no record is lost or torn."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import environment, tiny_tree, trainer

from trainer.metrics import append_log as appended
from trainer.metrics.append_log import AppendLog
from trainer.metrics.json_lines import JsonLines

FULL = Path("/dev/full")  # the kernel's own full disk
#: Lines beyond the size that the kernel allows at first; the limit goes in the middle of a line.
LIMITED = """
import resource, sys
from pathlib import Path
from trainer.metrics.report import JsonLines, TensorBoard
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
sinks = [JsonLines(Path(sys.argv[1]) / "m.jsonl"), TensorBoard(Path(sys.argv[1]) / "board")]
for step in range(200):
    if step == 150:
        for path in [Path(sys.argv[1]) / "m.jsonl", *(Path(sys.argv[1]) / "board").iterdir()]:
            assert path.stat().st_size == 1000, path
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for sink in sinks:
        sink.event("train", {"step": step, "loss": step / 2})
for sink in sinks:
    sink.close()
"""


def test_what_a_full_disk_refuses_is_written_once_there_is_room(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == list(range(200))
    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(step, step / 2) for step in range(200)]
    told = done.stderr.splitlines()
    assert len([line for line in told if "cannot be written: File too large; training goes on" in line]) == 2, told


def test_it_is_told_once_and_what_is_lost_at_the_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m.jsonl").symlink_to(FULL)
    with caplog.at_level(logging.WARNING, "trainer.metrics"):
        sink = JsonLines(tmp_path / "m.jsonl")
        for step in range(10):
            sink.event("train", {"step": step})
        sink.close()
    first, last = [record.getMessage() for record in caplog.records]
    assert first.endswith("No space left on device; training goes on, and the lines are kept until there is room")
    assert "lacks the last" in last


def test_whole_records_are_dropped_beyond_the_memory_for_them_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended, "_KEPT_BYTES", 10)
    full = [True]
    write = appended.os.write

    def sometimes(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    file = AppendLog(tmp_path / "x")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "trainer.metrics"):
        patch.setattr(appended.os, "write", sometimes)
        for record in (b"first\n", b"second\n", b"3\n"):
            file.write(record)
        full[0] = False
        file.write(b"4\n")
    file.close()
    assert (tmp_path / "x").read_bytes() == b"first\n3\n4\n"
    assert "1 records beyond 10 bytes are lost" in caplog.records[-1].getMessage()


def test_what_was_dropped_is_told_where_there_is_never_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended, "_KEPT_BYTES", 10)
    (tmp_path / "x").symlink_to(FULL)
    file = AppendLog(tmp_path / "x")
    for record in (b"first\n", b"second\n", b"third\n"):
        file.write(record)
    with caplog.at_level(logging.WARNING, "trainer.metrics"):
        file.close()
    assert "lacks the last 6 bytes" in caplog.records[-1].getMessage()
    assert "2 records beyond 10 bytes are lost" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("before", ["", '{"event": "train"}\n', '{"event": "train"}\n{"event": "tr'])
def test_a_line_that_was_cut_off_takes_no_other_with_it(before: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(before)
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.event("start", {})
    sink.close()
    *earlier, last = (tmp_path / "m.jsonl").read_text().splitlines()
    assert earlier == before.splitlines()
    assert json.loads(last)["event"] == "start"


def test_a_run_whose_logs_are_on_a_full_disk_ends_well(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "default"
    logs.mkdir(parents=True)
    (logs / "metrics.jsonl").symlink_to(FULL)
    changes = {"metrics.dir": str(tmp_path / "logs"), "checkpoint.uri": str(tmp_path / "runs"), "train.steps": 6}
    (tmp_path / "config.json").write_text(json.dumps(tiny_tree(changes)))
    done = trainer("train", "--config", str(tmp_path / "config.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "result"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("cannot be written: No space left on device") == 1, done.stderr
