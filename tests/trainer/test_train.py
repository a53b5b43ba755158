"""A run from start to result: training, reports, evaluation and outcomes."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fork_server
import odd_sources
import pytest
from small_jobs import ROOT, ROWS, SCHEDULE, TABLES, environment, first_steps, main_here, tiny, tiny_tree, trainer

from trainer.main import main
from trainer.metrics.json_lines import JsonLines
from trainer.metrics.reporter import Reporter
from trainer.metrics.tensorboard import SCALARS

CLOSE = 3e-6
RESULT = {
    "run", "state", "loss", "ne", "auc", "calibration", "samples", "best_auc", "samples_per_second", "step", "position",
    "world_size", "checkpoint", "logs", "memory_gib",
}  # fmt: skip
TRAIN = {
    "step", "loss", "ne", "auc", "calibration", "samples_per_second", "step_ms", "learning_rate_factor", "memory_gib",
    "samples_since_last", "position",
}  # fmt: skip
LEARNS = {
    "train.batch_size": 512, "optim.sparse.learning_rate": 0.5, "optim.dense.learning_rate": 0.05,
    "data.eval_samples": 4096, "metrics.log_every": 10,
}  # fmt: skip


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


class Here:
    """Runs commands in this process and keeps their events."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.out, self.err, self.code = "", "", 0

    def __call__(self, *options: str, command: str = "train", **changes: Any) -> list[dict[str, Any]]:
        """Return the events of a run that succeeds, like `here("--train.steps=3", train__seed=2)`."""
        self.run(*options, command=command, **changes)
        assert self.code == 0, self.err
        return events_of(self.out)

    def run(self, *options: str, command: str = "train", **changes: Any) -> str:
        """Return the standard error of a run that may fail."""
        self._capsys.readouterr()
        dotted = {name.replace("__", "."): value for name, value in changes.items()}
        self.code = main_here(self.folder, command, *options, changes=dotted)
        self.out, self.err = self._capsys.readouterr()
        return self.err


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, capsys)


# --- two processes, end to end ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run `python -m trainer launch --nproc 2 train` with the sinks that write files."""
    folder = tmp_path_factory.mktemp("two")
    changes = SCHEDULE | {
        "checkpoint.uri": str(folder),
        "train.run": "a",
        "train.steps": 8,
        "train.eval_every": 3,
        "checkpoint.every_steps": 4,
        "metrics.progress": "auto",
        "metrics.tensorboard": True,
    }
    (folder / "config.json").write_text(json.dumps(tiny_tree(changes)), encoding="utf-8")
    done = trainer("launch", "--nproc", "2", "train", "--config", str(folder / "config.json"))
    assert done.returncode == 0, done.stderr
    return folder, done


Two = tuple[Path, subprocess.CompletedProcess[str]]


def test_without_a_terminal_every_line_is_one_json_event(two: Two) -> None:
    events = events_of(two[1].stdout)
    middle = ["train", "eval", "train", "checkpoint", "train", "eval", "train", "checkpoint", "eval"]
    assert [e["event"] for e in events] == ["start", "plan", *middle, "result"], "each event once, from rank 0 only"
    assert two[1].stderr == "", "a library printed something"


def test_the_result_has_all_fields(two: Two) -> None:
    result = events_of(two[1].stdout)[-1]
    assert result.keys() - {"event", "time"} == RESULT
    assert (result["state"], result["step"], result["position"], result["world_size"]) == ("complete", 8, 8 * 48, 2)
    assert 0 < result["best_auc"] <= 1
    assert result["samples"] == 256
    assert result["samples_per_second"] > 0
    assert Path(result["checkpoint"], "COMPLETE.json").exists()


def test_the_start_and_the_plan_are_reported_first(two: Two) -> None:
    start, plan = events_of(two[1].stdout)[:2]
    assert (start["processes"], start["total_steps"], start["precision"], start["source"]) == (
        2,
        8,
        "fp32",
        "synthetic",
    )
    assert start["because"], "the choice of precision has a reason"
    assert [table["table"] for table in plan["tables"]] == list(TABLES)


def test_a_run_on_two_processes_has_the_losses_of_a_plain_loop(two: Two) -> None:
    expected = first_steps(SCHEDULE, 8)
    for event, first in zip(named(events_of(two[1].stdout), "train"), (0, 2, 4, 6), strict=True):
        assert event["loss"] == pytest.approx(sum(expected[first : first + 2]) / 2, abs=CLOSE), f"step {event['step']}"


def test_train_events_have_quality_speed_and_learning_rate(two: Two) -> None:
    found = named(events_of(two[1].stdout), "train")
    for event in found:
        assert event.keys() - {"event", "time"} == TRAIN
        assert event["samples_since_last"] == 96
    cosine = [(1 + math.cos(math.pi * (step - 3) / 5)) / 2 for step in (3, 5, 7)]
    assert [e["learning_rate_factor"] for e in found] == pytest.approx([2 / 3, *cosine]), "the factor of the last step"


def test_metrics_jsonl_holds_the_events_of_the_console(two: Two) -> None:
    file, console = events_of((two[0] / "a" / "metrics.jsonl").read_text(encoding="utf-8")), events_of(two[1].stdout)
    assert [event | {"time": 0} for event in file] == [event | {"time": 0} for event in console]


def test_tensorboard_reads_the_scalars(two: Two) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(two[0] / "a" / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) >= {f"train/{name}" for name in SCALARS} | {"eval/loss", "eval/auc", "eval/ne"}
    losses = {scalar.step: scalar.value for scalar in board.Scalars("train/loss")}
    assert losses == pytest.approx({e["step"]: e["loss"] for e in named(events_of(two[1].stdout), "train")}, abs=1e-6)


def test_evaluate_repeats_the_final_quality_of_the_run(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_here(two[0], "evaluate", changes={"train.steps": 8}) == 0
    (found,) = events_of(capsys.readouterr().out)
    expected = events_of(two[1].stdout)[-1]
    assert found["state"] == "evaluated"
    for name in ("loss", "ne", "auc", "calibration", "best_auc"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6), f"{name} on one process, trained on two"


def test_evaluate_takes_the_model_and_the_data_from_the_checkpoint(
    two: Two, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two[0])  # logs go to the working directory by default
    # The run is in fp32; `evaluate` would choose bf16 on a CPU that has it in hardware.
    named_run = [f"--checkpoint.uri={two[0]}", "--train.run=a", "--metrics.progress=lines", "--train.precision=fp32"]
    assert main(["evaluate", *named_run]) == 0, "the run's name must be enough: its checkpoint knows the model"
    (found,) = events_of(capsys.readouterr().out)
    expected = events_of(two[1].stdout)[-1]
    assert (found["samples"], found["auc"]) == (expected["samples"], pytest.approx(expected["auc"], abs=1e-6))
    valid_for_this_model = f"--model.num-embeddings={list(ROWS)}"
    assert main(["evaluate", *named_run, "--data.eval-samples=8", valid_for_this_model]) == 0
    assert events_of(capsys.readouterr().out)[0]["samples"] == 8, "the command line wins over the checkpoint"


def test_evaluate_reports_a_checkpoint_that_this_version_cannot_read(
    two: Two, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two[0], tmp_path / "copy")
    marker = tmp_path / "copy" / "a" / "checkpoints" / "step_0000000008" / "COMPLETE.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    assert main_here(tmp_path / "copy", "evaluate") == 2
    error = capsys.readouterr().err
    assert "step_0000000008 has an unknown format: got 99" in error
    assert error.count("\n") == 1, "one line, no trace"


def test_a_complete_run_started_again_reports_so_and_changes_nothing(
    two: Two, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = SCHEDULE | {"train.steps": 8, "checkpoint.every_steps": 4}
    before = sorted((p, p.stat().st_mtime_ns) for p in (two[0] / "a" / "checkpoints").rglob("*"))
    assert main_here(two[0], "train", changes=changes) == 0
    events = events_of(capsys.readouterr().out)
    assert [e["event"] for e in events] == ["start", "plan", "resume", "eval", "result"], "nothing is trained or saved"
    assert events[-1]["state"].startswith("was already complete")
    assert events[-1]["auc"] == pytest.approx(events_of(two[1].stdout)[-1]["auc"], abs=1e-6)
    assert sorted((p, p.stat().st_mtime_ns) for p in (two[0] / "a" / "checkpoints").rglob("*")) == before


def test_ctrl_c_ends_all_processes_with_130_and_one_line(tmp_path: Path) -> None:
    changes = {"checkpoint.uri": str(tmp_path), "train.steps": 1_000_000, "metrics.progress": "lines"}
    (tmp_path / "c.json").write_text(json.dumps(tiny_tree(changes)), encoding="utf-8")
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "2", "train", "--config", str(tmp_path / "c.json")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with fork_server.real_processes():  # one process group, as a terminal has it
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **pipes)
    watchdog = threading.Timer(240, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if '"train"' in line:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                break
        _, err = process.communicate()
    finally:
        watchdog.cancel()
    assert process.returncode == 130, err
    assert err == "interrupted; the same command resumes from the last checkpoint\n"


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluations_run_every_eval_every_steps(here: Here) -> None:
    events = here("--train.steps=7", "--train.eval-every=3")
    assert [e["step"] for e in named(events, "eval")] == [3, 6, 7], "every three steps and at the end"
    events = here("--train.steps=6", "--train.eval-every=3", train__run="b")
    assert [e["step"] for e in named(events, "eval")] == [3, 6], "the last step is evaluated once"


@pytest.mark.parametrize("pipeline", ["sparse_dist", "base", "none"])
def test_evaluations_do_not_change_training(pipeline: str, here: Here) -> None:
    with_many = here("--train.steps=8", "--train.eval-every=2", f"--train.pipeline={pipeline}", metrics__log_every=1)
    without = here("--train.steps=8", f"--train.pipeline={pipeline}", metrics__log_every=1, train__run="b")
    losses = [[e["loss"] for e in named(events, "train")] for events in (with_many, without)]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1], "a batch of the evaluation was trained on, or one of the training was lost"
    assert with_many[-1]["loss"] == without[-1]["loss"]


def test_training_does_not_change_which_samples_are_evaluated(here: Here) -> None:
    events = here(
        "--train.steps=6", "--train.eval-every=3", optim__sparse__learning_rate=1e-30, optim__dense__learning_rate=1e-30
    )
    first, last = named(events, "eval")
    assert first["loss"] == last["loss"], "with constant weights every evaluation sees the same samples"


@pytest.mark.parametrize("size", [7, 100, 256, 1000])
def test_the_evaluation_batch_size_does_not_change_the_quality(size: int, here: Here) -> None:
    expected = here(train__run="b")[-1]
    found = here(train__eval_batch_size=size)[-1]
    assert found["samples"] == 256
    for name in ("loss", "ne", "auc", "calibration"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6), f"{name}: a sample was left out or counted twice"


def test_an_evaluation_smaller_than_a_batch_counts_each_sample_once(here: Here) -> None:
    found, expected = (
        here(data__eval_samples=20)[-1],
        here(data__eval_samples=20, train__eval_batch_size=5, train__run="b")[-1],
    )
    assert found["samples"] == 20
    assert (found["loss"], found["auc"]) == pytest.approx((expected["loss"], expected["auc"]), abs=1e-6)


def test_evaluate_needs_a_checkpoint(here: Here) -> None:
    assert "run a has no complete checkpoint" in here.run(command="evaluate")
    assert here.code == 2


# --- learning --------------------------------------------------------------------------------------------------------


def test_synthetic_data_is_learned_up_to_the_best_possible_auc(here: Here) -> None:
    result = here("--train.steps=60", **{k.replace(".", "__"): v for k, v in LEARNS.items()})[-1]
    assert result["auc"] > 0.8, "it hardly learns"
    assert result["auc"] < result["best_auc"] + 0.01, "better than possible: labels leak"
    assert result["ne"] < 0.8
    assert result["calibration"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "changes", [{"model.interaction": "dcn"}, {"optim.dense.optimizer": "adam", "sharding.types": ["data_parallel"]}]
)
def test_other_models_learn_too(changes: dict[str, Any], here: Here) -> None:
    result = here("--train.steps=60", **{k.replace(".", "__"): v for k, v in (LEARNS | changes).items()})[-1]
    assert result["auc"] > 0.75, "it hardly learns"


def test_a_run_stops_at_its_target_auc(here: Here) -> None:
    options = ["--train.steps=200", "--train.eval-every=10", "--train.target-auc=0.7"]
    changes = {k.replace(".", "__"): v for k, v in LEARNS.items()}
    events = here(*options, **changes)
    result = events[-1]
    assert result["state"] == "complete: reached train.target_auc 0.7"
    assert result["step"] < 200
    assert result["auc"] >= 0.7
    assert [e["auc"] >= 0.7 for e in named(events, "eval")] == [False] * (len(named(events, "eval")) - 1) + [True]
    assert Path(result["checkpoint"], "COMPLETE.json").exists(), "the model that reached the target is kept"
    again = here(*options, **changes)
    assert again[-1]["state"].startswith("had already reached train.target_auc")
    assert named(again, "train") == []


def test_a_run_that_misses_its_target_completes_all_steps(here: Here) -> None:
    result = here("--train.eval-every=2", "--train.target-auc=0.99")[-1]
    assert (result["state"], result["step"]) == ("complete", 4)


# --- length ----------------------------------------------------------------------------------------------------------


def test_a_run_without_steps_trains_its_epochs(here: Here) -> None:
    for epochs, expected in ((0.5, 5), (1, 10), (2, 20)):
        result = here(train__steps=None, train__epochs=epochs, data__train_samples=480, train__run=f"e{expected}")[-1]
        assert result["step"] == expected, f"{epochs} epochs of 480 samples in batches of 48"
    assert here(train__steps=3, train__epochs=2, data__train_samples=480)[-1]["step"] == 3, (
        "steps take precedence over epochs"
    )


def test_a_complete_run_continues_with_more_epochs(here: Here) -> None:
    here(train__steps=None, data__train_samples=480)
    events = here(train__steps=None, train__epochs=1.5, data__train_samples=480)
    assert (named(events, "resume")[0]["step"], events[-1]["step"]) == (10, 15)


def test_a_batch_larger_than_the_run_is_an_error(here: Here) -> None:
    message = here.run(train__steps=None, data__train_samples=20)
    assert "train.batch_size is larger than the run: got 48; allowed: at most 20" in message
    assert here.code == 2


def test_two_runs_are_independent(here: Here) -> None:
    here("--train.steps=2")
    events = here("--train.steps=2", train__run="b")
    assert named(events, "resume") == [], "run b resumed run a"
    assert sorted(p.name for p in here.folder.iterdir() if p.is_dir()) == ["a", "b"]


# --- reports ---------------------------------------------------------------------------------------------------------


def test_reports_come_every_log_every_steps_and_at_the_end(here: Here) -> None:
    assert [e["step"] for e in named(here("--train.steps=8", metrics__log_every=3), "train")] == [3, 6, 8], (
        "and at the end"
    )


def test_training_metrics_can_be_disabled(here: Here) -> None:
    (event, *_) = named(here("--metrics.train-metrics=false"), "train")
    assert event.keys() - {"event", "time"} == TRAIN - {"ne", "auc", "calibration"}


def test_training_metrics_cover_the_window(here: Here) -> None:
    aucs = [
        [
            e["auc"]
            for e in named(here("--train.steps=12", metrics__window_samples=window, train__run=f"w{window}"), "train")
        ]
        for window in (100, 100_000)
    ]
    assert aucs[0][0] == aucs[1][0], "at first both windows hold all samples"
    assert aucs[0][-1] != aucs[1][-1], "metrics.window_samples has no effect"


def test_metrics_dir_selects_the_folder_of_the_logs(here: Here) -> None:
    here()
    assert (here.folder / "a" / "metrics.jsonl").exists(), "next to the checkpoints by default"
    here(metrics__dir=str(here.folder / "logs"), train__run="b")
    assert (here.folder / "logs" / "b" / "metrics.jsonl").exists()
    assert not (here.folder / "b" / "metrics.jsonl").exists()


def test_logs_can_be_disabled(here: Here) -> None:
    here("--metrics.jsonl=false", "--metrics.tensorboard=false")
    assert [p.name for p in (here.folder / "a").iterdir()] == ["checkpoints"]


def test_a_log_folder_that_cannot_be_created_is_an_error(here: Here) -> None:
    (here.folder / "file").write_text("", encoding="utf-8")
    message = here.run(metrics__dir=str(here.folder / "file"))
    assert "metrics cannot be opened" in message
    assert "--metrics.dir" in message
    assert here.code == 2


def test_progress_none_prints_only_the_result(here: Here) -> None:
    here.run("--metrics.progress=none")
    assert "Run a" in here.out
    assert "AUC" in here.out
    assert '"event"' not in here.out


def test_nan_and_infinity_become_null_in_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "deep" / "m.jsonl")
    sink.event("train", {"auc": math.nan, "loss": math.inf, "step": 1})
    sink.close()
    (event,) = events_of((tmp_path / "deep" / "m.jsonl").read_text(encoding="utf-8"))
    assert (event["auc"], event["loss"], event["step"]) == (None, None, 1)


def on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a run in this process writes to a terminal of 120 columns."""
    main_end, terminal = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(main_end, 65_536)
            except OSError:  # the other end is closed
                return
            if not piece:
                return
            shown.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        for name, value in {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}.items():
            patch.setenv(name, value)
        assert main_here(folder, "train", changes={"metrics.progress": "auto", "train.steps": 6}) == 0
    reader.join(30)
    os.close(main_end)
    return b"".join(shown).decode()


def test_a_terminal_shows_a_bar_and_ends_with_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_a_terminal(tmp_path, monkeypatch))
    assert "training" in text
    assert "6/6" in text, "the bar did not reach the end"
    assert '"event"' not in text, "JSON lines are for machines"
    for row in (
        "Sharding plan",
        "loss (held out)",
        "best possible AUC",
        "samples/s of the whole job",
        "steps",
        "checkpoint",
    ):
        assert row in text, f"the tables lack: {row}"


# --- Prometheus ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def samples(text: str) -> dict[str, float]:
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")
    }


def test_prometheus_reads_the_gauges_during_a_run(here: Here) -> None:
    odd_sources.SEEN.clear()
    port = free_port()
    options = {"at": 20 * 48, "url": f"http://127.0.0.1:{port}/metrics"}  # the batch of step 20 reads the endpoint
    here(
        "--train.steps=22", data__source="odd_sources:Scraping", data__options=options, metrics__log_every=1,
        metrics__prometheus_port=port, metrics__prometheus_host="127.0.0.1", checkpoint__every_steps=5,
    )  # fmt: skip
    (text,) = odd_sources.SEEN
    found = samples(text)
    step = found['trainer_step{run="a"}']
    assert 10 <= step <= 20, "the gauge lags"
    assert found['trainer_samples_total{run="a"}'] == step * 48
    assert found['trainer_position_samples{run="a"}'] == step * 48
    assert 0 < found['trainer_loss{run="a",split="train"}'] < 2
    for name in ("samples_per_second", "step_seconds", "memory_bytes", "last_checkpoint_timestamp_seconds"):
        assert found[f'trainer_{name}{{run="a"}}'] > 0, name
    assert found['trainer_learning_rate_factor{run="a"}'] == 1


def test_the_endpoint_is_closed_when_the_run_ends(tmp_path: Path) -> None:
    port = free_port()
    config = tiny({"metrics.prometheus_port": port, "metrics.progress": "none", "checkpoint.uri": str(tmp_path)})
    with Reporter.open(config, is_main=True, total_steps=1), socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_a_port_in_use_is_an_error(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        message = here.run(f"--metrics.prometheus-port={taken.getsockname()[1]}")
    assert "metrics cannot be opened" in message
    assert "--metrics.prometheus-port" in message
    assert here.code == 2


def test_ranks_other_than_0_report_nothing(tmp_path: Path) -> None:
    config = tiny({"checkpoint.uri": str(tmp_path / "x"), "metrics.prometheus_port": free_port()})
    with Reporter.open(config, is_main=False, total_steps=1) as reporter:
        reporter.event("train", step=1, loss=0.5)
    assert not (tmp_path / "x").exists()
