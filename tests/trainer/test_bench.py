"""The bench command measures all variants and prints JSON as its last line; the speeds are not tested."""

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

import fork_server
import pytest
from small_jobs import ROOT, bounded, environment, tiny_tree, trainer

from trainer.main import main

SHORT = ["--blocks", "3", "--steps", "2", "--warmup", "1"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration of a small job."""
    file: Path = tmp_path_factory.mktemp("bench") / "config.json"
    file.write_text(json.dumps(tiny_tree()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def bench(config_file: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m trainer bench` with two processes."""
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


def test_a_readable_table_precedes_the_json_line(bench: subprocess.CompletedProcess[str]) -> None:
    text = "\n".join(bench.stdout.splitlines()[:-1])
    assert re.search(r"ours \(fp32\)", text)
    assert re.search(r"stock \(fp32\)", text)
    assert "ratio ours / stock" in text
    assert bench.stderr == "", "libraries print to stderr"


def test_preprocessing_is_compared_with_torchrec(
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


def test_sources_are_measured_alone_with_decoding_and_in_a_step(config_file: Path) -> None:
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
    assert min(result["of_arrow"].values()) > 0, "the exact share depends on the load of the machine"
    step = result["step"]
    assert step["ratios"].keys() == {"reading-synthetic", "reading-criteo", "reading-parquet"}
    for name, ratio in step["ratios"].items():
        ratios = [a / b for a, b in zip(step[f"{name}_blocks"], step["cached_blocks"], strict=True)]
        assert (len(ratios), ratio) == (3, pytest.approx(statistics.median(ratios)))


def test_a_source_of_another_shape_is_not_compared_with_files(config_file: Path) -> None:
    from trainer.bench.measures.sources import reading_variants
    from trainer.config.options import load_config

    config = load_config(["--config", str(config_file)], {})
    assert reading_variants(config, {"criteo": {}, "parquet": {}}) == {"reading-synthetic": [], "cached": []}


def test_the_cost_of_saves_is_measured_and_no_checkpoint_is_left(tmp_path: Path) -> None:
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
    assert result["save_share"] is None or result["save_share"] > -1, "steps cannot take negative time"
    assert result["upload"] is None, "a folder is not an object store"
    assert list((tmp_path / "runs").rglob("step_*")) == [], "a bench must not fill a disk"


def test_the_overhead_of_a_save_is_the_time_that_the_steps_during_it_lost() -> None:
    from trainer.bench.measures.checkpoints import save_overhead

    assert save_overhead([0.3, 0.3], [0.2] * 8) == pytest.approx(0.1), "0.2 s more, of ten steps of 0.2 s"
    assert save_overhead([0.2], [0.2] * 9) == pytest.approx(0.0)
    assert save_overhead([0.3, 0.3], []) is None, "nothing to compare with"


def test_stock_runs_without_our_process_wide_settings(bench: subprocess.CompletedProcess[str]) -> None:
    result = json.loads(bench.stdout.splitlines()[-1])
    assert result["ours_fast"] == {"malloc": "keep", "update": ANY, "exchange": ANY}
    assert "malloc keep" in bench.stdout.replace("\n", " "), "the table must show what `auto` resolved to"


def test_a_single_process_can_be_measured(config_file: Path) -> None:
    done = trainer("bench", "--nproc", "1", *SHORT, "--config", str(config_file), "--train.malloc", "system")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["processes"], result["ours_fast"]["malloc"]) == (1, "system")


def test_under_torchrun_both_variants_run_in_the_existing_processes(config_file: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "trainer", "bench"]
    done = bounded([sys.executable, *launcher, *SHORT, "--config", str(config_file)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ratio"] > 0


def test_a_mistake_found_by_the_processes_is_reported_once_and_both_variants_exit(config_file: Path) -> None:
    done = trainer("bench", *SHORT, "--config", str(config_file), "--train.batch-size", "49")
    assert done.returncode == 2
    lines = set(done.stderr.splitlines())
    assert len(lines) == 1, done.stderr
    assert "train.batch_size does not divide by 2 processes: got 49; allowed: multiples of 2" in lines.pop()


def test_ctrl_c_ends_both_variants_without_a_stack_trace(config_file: Path) -> None:
    command = [sys.executable, "-m", "trainer", "bench", "--blocks", "100000", "--config", str(config_file)]
    with fork_server.real_processes():  # the variants must be children of the bench
        running = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stderr=subprocess.PIPE)
    try:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while len(launchers := children.read_text().split()) < 2:
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=100)
    finally:
        running.kill()
    assert running.returncode == 130
    assert error == "interrupted; the same command starts again from the beginning\n"
    assert not [pid for pid in launchers if Path(f"/proc/{pid}").exists()], "a variant is still running"


def running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Return the children, their children, and so on."""
    children = [int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()]
    return [*children, *(found for child in children for found in descendants(child))]


def test_a_killed_bench_leaves_no_process_behind(config_file: Path) -> None:
    command = [sys.executable, "-m", "trainer", "bench", "--blocks", "100000", "--config", str(config_file)]
    bench = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    family: list[int] = []
    try:
        while len(family := descendants(bench.pid)) < 6:  # two launchers with two processes each
            assert bench.poll() is None
            time.sleep(0.1)
        bench.kill()
        bench.wait()
        deadline = time.monotonic() + 30  # without the watch a process would wait 90 s for its store
        while any(map(running, family)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in family if running(pid)], "a variant is still running"
    finally:
        bench.kill()
        for pid in filter(running, family):
            os.kill(pid, signal.SIGKILL)


def test_a_profile_has_a_trace_and_the_ten_heaviest_operators(config_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    measured = ["--profile", "--steps", "3", "--warmup", "1", "--trace", str(trace)]
    done = trainer("bench", "--nproc", "2", *measured, "--config", str(config_file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "libraries print to stderr"
    result = json.loads(done.stdout.splitlines()[-1])
    rows = result["operators"]
    assert len(rows) == 10
    assert [row["ms_per_step"] for row in rows] == sorted((row["ms_per_step"] for row in rows), reverse=True)
    assert all(0 < row["share"] < 1 and row["calls_per_step"] > 0 for row in rows)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {row["name"] for row in rows} <= names, "table and trace cover different steps"
    assert "aten::addmm" in names
    assert list(tmp_path.iterdir()) == [trace], "a partial file is left"


def test_a_trace_that_cannot_be_written_is_reported_before_the_measurement(config_file: Path) -> None:
    done = trainer("bench", "--nproc", "2", "--profile", "--trace", "/nowhere/t.json", "--config", str(config_file))
    assert done.returncode == 2
    assert done.stderr == (
        "error: bench: --trace cannot be written: got /nowhere/t.json; allowed: a file in an existing folder\n"
    )


def test_quality_is_compared_for_each_mode_and_seed(config_file: Path) -> None:
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
        assert mode["auc"][0] != mode["auc"][1], "the seeds give the same result"
        assert mode["mean"] == pytest.approx(statistics.mean(mode["auc"]))
        assert mode["against_stock"] == pytest.approx(mode["mean"] - stock["mean"])
        assert 0.5 < mode["mean"] < result["best_auc"], "it learned, and no model can exceed the best AUC"
    assert by_name["fp32 ours"]["auc"] == pytest.approx(stock["auc"], abs=0.02)
    assert by_name["fp32, int8 on the wire"]["auc"] != by_name["fp32 ours"]["auc"]
    assert result["kept"] == all(mode["against_stock"] >= -result["bound"] for mode in by_name.values())


def test_the_help_lists_the_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--profile", "--quality", "--trace", "--samples", "--seeds", "--blocks", "--train.batch-size"):
        assert option in shown
    assert "--side" not in shown, "an internal option"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--blocks", "0"], "--blocks is too small: got 0; allowed: 1 or more"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--data", "--train.stepz", "3"], "unknown option --train.stepz"),
        (["--nproc", "none"], "wrong --nproc: got 'none'"),
        (["--profile", "--quality"], "not allowed with argument"),
        (["--quality", "--seeds", "0"], "--seeds is too small: got 0; allowed: 1 or more"),
    ],
)
def test_a_user_mistake_is_reported_in_one_line(
    options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
