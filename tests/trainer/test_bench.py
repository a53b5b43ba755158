"""The bench command measures both steps and ends with a line that a program can read; the speeds are not tested."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import pytest
from small_jobs import ROOT, bounded, environment, tiny_tree, trainer

from trainer.main import main

SHORT = ["--blocks", "3", "--steps", "2", "--warmup", "1"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small job."""
    file: Path = tmp_path_factory.mktemp("bench") / "config.json"
    file.write_text(json.dumps(tiny_tree()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def bench(config_file: Path) -> subprocess.CompletedProcess[str]:
    """`python -m trainer bench` on two processes."""
    done = trainer("bench", "--nproc", "2", *SHORT, "--config", str(config_file))
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
    from trainer.bench.measures import preprocess

    monkeypatch.setattr(preprocess, "_OURS_ROWS", 3_000)
    monkeypatch.setattr(preprocess, "_STOCK_ROWS", 500)
    assert main(["bench", "--preprocess"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert "torchrec tsv_to_npys" in "".join(table)
    ratios = [a / b for a, b in zip(result["ours_blocks"], result["stock_blocks"], strict=True)]
    assert (result["ours_rows"], result["stock_rows"], len(ratios)) == (3_000, 500, 3)
    assert result["ratio"] == pytest.approx(statistics.median(ratios))


def test_sources_are_measured_with_decoding_and_beside_the_step(config_file: Path) -> None:
    shape = ["--data.num-dense", "13", "--data.num-sparse", "26", "--model.num-embeddings", "50"]
    done = trainer("bench", "--data", *SHORT, "--config", str(config_file), *shape)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["sources"].keys() == {
        "synthetic",
        "criteo npy",
        "parquet",
        "parquet, decoding 26 hashed strings",
        "parquet, decoding 26 lists of 0 to 3 ids",
    }
    assert min(result["sources"].values()) > 0
    decoded = {name for name in result["sources"] if "decoding" in name}
    assert result["of_arrow"].keys() == decoded
    assert min(result["of_arrow"].values()) > 0, "how far below 1 depends on what else the machine does meanwhile"
    step = result["step"]
    assert step["ratios"].keys() == {"reading-synthetic", "reading-criteo", "reading-parquet"}
    for name, ratio in step["ratios"].items():
        ratios = [a / b for a, b in zip(step[f"{name}_blocks"], step["cached_blocks"], strict=True)]
        assert (len(ratios), ratio) == (3, pytest.approx(statistics.median(ratios)))


def test_a_source_of_another_shape_is_read_by_itself(config_file: Path) -> None:
    from trainer.bench.measures.sources import reading_sides
    from trainer.config.options import load_config

    config = load_config(["--config", str(config_file)], {})
    assert reading_sides(config, {"criteo": {}, "parquet": {}}) == {"reading-synthetic": [], "cached": []}


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
    assert result["save_share"] is None or result["save_share"] > -1, "its steps take less than no time"
    assert result["upload"] is None, "a folder is no object store"
    assert list((tmp_path / "runs").rglob("step_*")) == [], "a bench must not fill a disk"


def test_the_share_of_a_save_is_what_its_own_steps_lost() -> None:
    from trainer.bench.measures.saves import share_of_save

    assert share_of_save([0.3, 0.3], [0.2] * 8) == pytest.approx(0.1), "0.2 s more, of ten steps of 0.2 s"
    assert share_of_save([0.2], [0.2] * 9) == pytest.approx(0.0)
    assert share_of_save([0.3, 0.3], []) is None, "nothing to compare with"


def test_stock_runs_without_what_ours_sets_for_its_process(bench: subprocess.CompletedProcess[str]) -> None:
    result = json.loads(bench.stdout.splitlines()[-1])
    assert result["ours_fast"] == {"malloc": "keep", "update": ANY, "exchange": ANY}
    assert "malloc keep" in bench.stdout.replace("\n", " "), "a person must see what auto has come to"


def test_one_process_is_measured_too(config_file: Path) -> None:
    done = trainer("bench", "--nproc", "1", *SHORT, "--config", str(config_file), "--train.malloc", "system")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["processes"], result["ours_fast"]["malloc"]) == (1, "system")


def test_in_a_job_that_somebody_launched_both_sides_are_measured_in_it(config_file: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "trainer", "bench"]
    done = bounded([sys.executable, *launcher, *SHORT, "--config", str(config_file)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ratio"] > 0


def test_a_mistake_in_the_processes_is_told_once_and_both_sides_end(config_file: Path) -> None:
    done = trainer("bench", *SHORT, "--config", str(config_file), "--train.batch-size", "49")
    assert done.returncode == 2
    lines = set(done.stderr.splitlines())
    assert len(lines) == 1, done.stderr
    assert "train.batch_size does not divide by 2 processes: got 49; allowed: multiples of 2" in lines.pop()


def test_ctrl_c_ends_both_sides_in_silence(config_file: Path) -> None:
    # A shell's background jobs ignore the signal, and hand that on.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heard + "from trainer.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "--blocks", "100000", "--config", str(config_file)]
    running = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stderr=subprocess.PIPE)
    try:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while len(sides := children.read_text().split()) < 2:
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=100)
    finally:
        running.kill()
    assert running.returncode == 130
    assert error == "interrupted; the same command measures anew\n"
    assert not [pid for pid in sides if Path(f"/proc/{pid}").exists()], "a side goes on by itself"


def running(pid: int) -> bool:
    """Whether the process is there and not only waits for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    children = [int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()]
    return [*children, *(found for child in children for found in descendants(child))]


def test_a_bench_that_is_killed_leaves_no_side_behind(config_file: Path) -> None:
    command = [sys.executable, "-m", "trainer", "bench", "--blocks", "100000", "--config", str(config_file)]
    bench = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    family: list[int] = []
    try:
        while len(family := descendants(bench.pid)) < 6:  # two launchers with two processes each
            assert bench.poll() is None
            time.sleep(0.1)
        bench.kill()
        bench.wait()
        deadline = time.monotonic() + 30  # a process that does not notice waits for its store a minute and a half
        while any(map(running, family)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in family if running(pid)], "a side goes on by itself"
    finally:
        bench.kill()
        for pid in filter(running, family):
            os.kill(pid, signal.SIGKILL)


def test_a_profile_is_a_trace_and_the_ten_heaviest_operators(config_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    measured = ["--profile", "--steps", "3", "--warmup", "1", "--trace", str(trace)]
    done = trainer("bench", "--nproc", "2", *measured, "--config", str(config_file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "libraries chatter"
    result = json.loads(done.stdout.splitlines()[-1])
    rows = result["operators"]
    assert len(rows) == 10
    assert [row["ms_per_step"] for row in rows] == sorted((row["ms_per_step"] for row in rows), reverse=True)
    assert all(0 < row["share"] < 1 and row["calls_per_step"] > 0 for row in rows)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {row["name"] for row in rows} <= names, "table and trace are of the same steps"
    assert "aten::addmm" in names
    assert list(tmp_path.iterdir()) == [trace], "something half-written is left"


def test_a_trace_that_cannot_be_written_is_told_before_anything_is_measured(config_file: Path) -> None:
    done = trainer("bench", "--nproc", "2", "--profile", "--trace", "/nowhere/t.json", "--config", str(config_file))
    assert done.returncode == 2
    assert done.stderr == "error: bench: --trace is /nowhere/t.json; legal: a file in a folder that exists\n"


def test_quality_is_trained_and_compared_for_each_mode_and_seed(config_file: Path) -> None:
    measured = ["--quality", "--samples", "4800", "--seeds", "2"]
    done = trainer("bench", "--nproc", "2", *measured, "--config", str(config_file))
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if result["kept"] else 1), done.stderr
    assert (result["samples"], result["seeds"], result["processes"]) == (4800, 2, 2)
    by_name = {mode["name"]: mode for mode in result["modes"]}
    assert {"fp32 stock", "fp32 ours", "fp32, fp16 on the wire", "fp32, int8 on the wire"} <= by_name.keys()
    stock = by_name["fp32 stock"]
    assert stock["against_stock"] == 0
    for mode in by_name.values():
        assert len(mode["auc"]) == 2
        assert mode["auc"][0] != mode["auc"][1], "the seeds train the same"
        assert mode["mean"] == pytest.approx(statistics.mean(mode["auc"]))
        assert mode["against_stock"] == pytest.approx(mode["mean"] - stock["mean"])
        assert 0.5 < mode["mean"] < result["best_auc"], "it has learned something, and nothing can do better"
    assert by_name["fp32 ours"]["auc"] == pytest.approx(stock["auc"], abs=0.02)
    assert by_name["fp32, int8 on the wire"]["auc"] != by_name["fp32 ours"]["auc"]
    assert result["kept"] == all(mode["against_stock"] >= -result["bound"] for mode in by_name.values())


def test_help_lists_the_commands_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--profile", "--quality", "--trace", "--samples", "--seeds", "--blocks", "--train.batch-size"):
        assert option in shown
    assert "--side" not in shown, "that is for the command itself"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--blocks", "0"], "--blocks is 0, --steps 20, --warmup 5; legal: 1 or more"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--data", "--train.stepz", "3"], "unknown option --train.stepz"),
        (["--nproc", "none"], "wrong --nproc: got 'none'"),
        (["--profile", "--quality"], "not allowed with argument"),
        (["--quality", "--seeds", "0"], "--seeds 0; legal: 1 or more"),
    ],
)
def test_a_mistake_is_told(options: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
