"""Logs on a full disk: the run continues, the failure is logged once, and no record is lost or cut off."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import environment, tiny_tree, trainer

from trainer.metrics import append_log
from trainer.metrics.append_log import AppendLog
from trainer.metrics.json_lines import JsonLines

FULL = Path("/dev/full")  # every write fails as on a full disk
#: Writes more than a limit on the file size allows, and removes the limit in the middle.
LIMITED = """
import resource, sys
from pathlib import Path
from trainer.metrics.json_lines import JsonLines
from trainer.metrics.tensorboard import TensorBoard
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


def test_records_rejected_by_a_full_disk_are_written_once_there_is_space(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == list(range(200))
    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(step, step / 2) for step in range(200)]
    lines = done.stderr.splitlines()
    assert len([line for line in lines if "cannot be written: File too large; training continues" in line]) == 2, lines


def test_the_first_failure_and_the_lost_bytes_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m.jsonl").symlink_to(FULL)
    with caplog.at_level(logging.WARNING, "trainer.metrics"):
        sink = JsonLines(tmp_path / "m.jsonl")
        for step in range(10):
            sink.event("train", {"step": step})
        sink.close()
    first, last = [record.getMessage() for record in caplog.records]
    assert first.endswith("No space left on device; training continues, and the lines are kept in memory for later")
    assert "lacks the last" in last


def test_whole_records_are_dropped_and_counted_when_the_buffer_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_log, "_BUFFER_BYTES", 10)
    full = [True]
    write = append_log.os.write

    def write_unless_full(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    file = AppendLog(tmp_path / "x")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "trainer.metrics"):
        patch.setattr(append_log.os, "write", write_unless_full)
        for record in (b"first\n", b"second\n", b"3\n"):
            file.write(record)
        full[0] = False
        file.write(b"4\n")
    file.close()
    assert (tmp_path / "x").read_bytes() == b"first\n3\n4\n"
    assert "1 records beyond 10 bytes are lost" in caplog.records[-1].getMessage()


def test_dropped_records_are_logged_when_the_disk_stays_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_log, "_BUFFER_BYTES", 10)
    (tmp_path / "x").symlink_to(FULL)
    file = AppendLog(tmp_path / "x")
    for record in (b"first\n", b"second\n", b"third\n"):
        file.write(record)
    with caplog.at_level(logging.WARNING, "trainer.metrics"):
        file.close()
    assert "lacks the last 6 bytes" in caplog.records[-1].getMessage()
    assert "2 records beyond 10 bytes are lost" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("before", ["", '{"event": "train"}\n', '{"event": "train"}\n{"event": "tr'])
def test_a_cut_off_line_does_not_spoil_the_next_one(before: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(before)
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.event("start", {})
    sink.close()
    *earlier, last = (tmp_path / "m.jsonl").read_text().splitlines()
    assert earlier == before.splitlines()
    assert json.loads(last)["event"] == "start"


def test_a_run_with_logs_on_a_full_disk_completes(tmp_path: Path) -> None:
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
