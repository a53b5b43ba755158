"""The bench command measures both steps and ends with a line that a program can read; the speeds are not tested."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest
from small_jobs import tiny_tree, trainer

from trainer.cli import main


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """`python -m trainer bench` on two processes."""
    file: Path = tmp_path_factory.mktemp("bench") / "config.json"
    file.write_text(json.dumps(tiny_tree()), encoding="utf-8")
    done = trainer("bench", "--nproc", "2", "--blocks", "3", "--steps", "2", "--warmup", "1", "--config", str(file))
    assert done.returncode == 0, done.stderr
    return done


def test_the_last_line_is_json_with_both_rates_and_their_ratio(bench: subprocess.CompletedProcess[str]) -> None:
    result = json.loads(bench.stdout.splitlines()[-1])
    assert result["ours"] > 0
    assert result["stock"] > 0
    assert (result["processes"], result["batch_per_process"], result["blocks"], result["steps"]) == (2, 24, 3, 2)
    ratios = [a / b for a, b in zip(result["ours_blocks"], result["stock_blocks"], strict=True)]
    assert len(ratios) == 3
    assert result["ratio"] == pytest.approx(statistics.median(ratios)), (
        "the median of the ratios of neighbouring blocks"
    )


def test_a_table_comes_before_it(bench: subprocess.CompletedProcess[str]) -> None:
    text = "\n".join(bench.stdout.splitlines()[:-1])
    assert re.search(r"ours \(fp32\)", text)
    assert re.search(r"stock \(fp32\)", text)
    assert "ratio ours / stock" in text
    assert bench.stderr == "", "libraries chatter"


def test_preprocessing_is_measured_beside_torchrec(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.bench import preprocess

    monkeypatch.setattr(preprocess, "_OURS_ROWS", 3_000)
    monkeypatch.setattr(preprocess, "_STOCK_ROWS", 500)
    assert main(["bench", "--preprocess"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert "torchrec tsv_to_npys" in "".join(table)
    ratios = [a / b for a, b in zip(result["ours_blocks"], result["stock_blocks"], strict=True)]
    assert (result["ours_rows"], result["stock_rows"], len(ratios)) == (3_000, 500, 3)
    assert result["ratio"] == pytest.approx(statistics.median(ratios))


def test_what_saves_cost_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_tree({"checkpoint.uri": str(tmp_path / "runs")})))
    short = ["--blocks", "2", "--steps", "4", "--warmup", "1", "--config", str(tmp_path / "config.json")]
    done = trainer("bench", "--nproc", "2", "--checkpoints", *short)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratio"] == pytest.approx(
        statistics.median(a / b for a, b in zip(result["with_blocks"], result["without_blocks"], strict=True))
    )
    assert 0 < result["blocked_seconds"] <= result["background_seconds"]
    assert result["blocked_share"] == pytest.approx(result["blocked_seconds"] / result["synchronous_seconds"])
    assert list((tmp_path / "runs").rglob("step_*")) == [], "a bench must not fill a disk"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--blocks", "0"], "--blocks is 0, --steps 20, --warmup 5; legal: 1 or more"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--data", "--train.stepz", "3"], "unknown option --train.stepz"),
        (["--nproc", "none"], "--nproc is 'none'"),
    ],
)
def test_a_mistake_is_told(options: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
