"""The report of a run: its marks, its files, and errors for runs that cannot be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.main import main
from trainer.metrics.run_report import read_history

EVENTS: list[dict[str, Any]] = [
    {"event": "start", "time": 100.0, "run": "a"},
    {"event": "train", "time": 101.0, "step": 1, "loss": 0.7, "samples_per_second": 10.0},
    {"event": "checkpoint", "time": 101.5, "step": 1, "path": "runs/<a>/1"},
    {"event": "train", "time": 102.0, "step": 2, "loss": None, "samples_per_second": 11.0},
    {"event": "start", "time": 110.0, "run": "a"},
    {"event": "resume", "time": 110.1, "step": 1, "position": 48},
    {"event": "train", "time": 111.0, "step": 2, "loss": 0.6, "samples_per_second": 12.0},
    {"event": "checkpoint_failed", "time": 111.5, "step": 2, "error": "no space"},
    {"event": "preempted", "time": 112.0, "step": 2, "because": "SIGTERM"},
    {"event": "start", "time": 120.0, "run": "a"},
    {"event": "resume", "time": 120.1, "step": 2, "position": 96},
    {"event": "train", "time": 121.0, "step": 3, "loss": 0.5, "samples_per_second": 12.0},
    {"event": "result", "time": 122.0, "step": 3},
    {"event": "start", "time": 130.0, "run": "a"},
    {"event": "result", "time": 131.0, "step": 3},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [json.dumps(event) for event in EVENTS]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "train", "ti']), encoding="utf-8")
    return tmp_path


def test_marks_show_each_incident_at_its_time(run: Path) -> None:
    history = read_history(run / "metrics.jsonl")
    assert [(m.kind, round(m.seconds, 1), m.step) for m in history.marks] == [
        ("saved", 1.5, 1),
        ("killed", 2.0, 2),
        ("resumed", 10.1, 1),
        ("save failed", 11.5, 2),
        ("preempted", 12.0, 2),
        ("resumed", 20.1, 2),
    ]
    assert [(p["seconds"], p["step"], p["start"]) for p in history.points] == [
        (1.0, 1, 1),
        (2.0, 2, 1),
        (11.0, 2, 2),
        (21.0, 3, 3),
    ]


def test_the_files_are_complete_and_self_contained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert "1 killed, 1 preempted, 2 resumed, 1 saved, 1 save failed" in capsys.readouterr().out
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert page.count("<tr>") == 7
    assert "runs/&lt;a&gt;/1" in page, "a path is text, not markup"
    for outside in ("<script", "<link", "src="):
        assert outside not in page


def test_out_selects_the_folder_of_the_files(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run / "metrics.jsonl"), "--out", str(tmp_path / "deep" / "er")]) == 0
    assert {p.name for p in (tmp_path / "deep" / "er").iterdir()} == {"report.png", "report.html"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("", "holds no train event"), ('{"event": "start", "time": 1}', "holds no train event")],
)
def test_a_run_without_train_events_is_an_error(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.glob("report.*")) == []


def test_a_missing_run_and_an_unknown_option_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert "RUN is missing" in capsys.readouterr().err
    assert main(["report", "x", "--nope"]) == 2
    assert "unknown argument: got --nope" in capsys.readouterr().err
