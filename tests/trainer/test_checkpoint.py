"""A resumed run equals an uninterrupted one, under any plan and number of processes; bad checkpoints are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_jobs import (
    PLANS,
    TABLES,
    after,
    alone,
    checkpointer,
    config_of,
    full_weights,
    main_here,
    run_workers,
    same,
    steps,
    trained,
)

from trainer.checkpoint import FsspecStore, Progress, open_store
from trainer.checkpoint.manager import FORMAT, check_compatible
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.sharding.local_shards import local_shards
from trainer.sharding.sharded_model import build_sharded_model

CLOSE = 3e-6


def resumed(config: TrainConfig, count: int = 3) -> dict[str, Any]:
    """Resume the newest checkpoint in this process."""
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        store = checkpointer(model)
        newest = store.newest()
        assert newest is not None, "there is no checkpoint"
        progress = store.restore(newest)
        weights = full_weights(model)
        return {
            "progress": progress,
            "weights": weights,
            "next": steps(model, count, progress),
            "end": full_weights(model),
        }


def plain(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights without DistributedDataParallel's prefix of names."""
    return {name.replace("module.", ""): value for name, value in weights.items()}


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a hash of every file below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- exact resume ----------------------------------------------------------------------------------------------------

DENSE = {
    "sgd": {"optim.dense.optimizer": "sgd"},
    "momentum": {"optim.dense.optimizer": "sgd", "optim.dense.momentum": 0.9},
    "adagrad": {},
    "adam": {"optim.dense.optimizer": "adam"},
    "adamw": {"optim.dense.optimizer": "adamw", "optim.dense.weight_decay": 0.1},
}


@pytest.mark.parametrize("plan", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("dense", DENSE)
def test_ten_steps_equal_five_steps_and_five_resumed_ones(plan: str, sparse: str, dense: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, PLANS[plan] | DENSE[dense] | {"optim.sparse.optimizer": sparse})
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        losses, weights = steps(model, 10), full_weights(model)
    first_half = trained(config)["losses"]
    again = resumed(config, 5)
    assert first_half + again["next"] == losses, "the losses differ"
    assert same(again["end"], weights) == [], "these weights differ in at least one bit"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Path:
    """Run workers/checkpoint.py in three processes, which resume what two wrote; return the folder of results."""
    return run_workers("checkpoint", 3, tmp_path_factory.mktemp("three"), "resume", str(pair[1]))


def result(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize(
    "name",
    [
        "table_wise-sgd-momentum",
        "row_wise-adagrad-adagrad",
        "mixed-adagrad-adamw",
        "data_parallel-rowwise_adagrad-adam",
        "table_wise-rowwise_adagrad-clipped",
        "column_wise-sgd-adagrad",
        "column_wise-rowwise_adagrad-adagrad",
    ],
)
def test_two_processes_resume_bit_for_bit(name: str, pair: tuple[Path, Path]) -> None:
    found = result(pair[0], f"exact-{name}")
    assert found["resumed"] == found["losses"], "the losses differ"
    assert same(found["resumed_weights"], found["weights"]) == [], "these weights differ in at least one bit"


# --- other plans and numbers of processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "data_parallel", "mixed", "table_wise"])
def test_weights_survive_every_change_of_plan_bit_for_bit(plan: str, pair: tuple[Path, Path]) -> None:
    trip = result(pair[0], "round-trip")
    found = trip["found"][plan]
    assert same(plain(found["weights"]), plain(trip["weights"])) == [], f"resuming under {plan} changed these weights"
    close = CLOSE if plan in ("row_wise", "data_parallel", "table_wise") else 5e-3
    assert found["next"][0] == pytest.approx(trip["next"][0], abs=CLOSE)
    assert found["next"] == pytest.approx(trip["next"], abs=close), "the optimizers' state was not restored"


@pytest.mark.parametrize("plan", PLANS)
def test_two_processes_resume_what_one_wrote(
    plan: str, pair: tuple[Path, Path], from_one: tuple[Path, dict[str, Any]]
) -> None:
    found, expected = result(pair[0], f"resumed-{plan}"), from_one[1]
    assert found["progress"] == Progress(5, 240)
    assert same(plain(found["weights"]), plain(expected["weights"])) == []
    assert found["next"] == pytest.approx(expected["next"], abs=5e-3 if plan != "column_wise" else CLOSE * 300)


@pytest.mark.parametrize("plan", PLANS)
def test_one_process_resumes_what_two_wrote(plan: str, pair: tuple[Path, Path]) -> None:
    expected = result(pair[0], "made")
    found = resumed(config_of(pair[1], PLANS[plan]))
    assert same(plain(found["weights"]), plain(expected["weights"])) == []
    assert found["next"][0] == pytest.approx(expected["next"][0], abs=CLOSE)
    assert found["next"] == pytest.approx(expected["next"], abs=5e-3)


@pytest.mark.parametrize("plan", PLANS)
def test_three_processes_resume_what_two_wrote(plan: str, pair: tuple[Path, Path], three: Path) -> None:
    expected, found = result(pair[0], "made"), result(three, f"resumed-{plan}")
    assert same(plain(found["weights"]), plain(expected["weights"])) == []
    assert found["next"][0] == pytest.approx(expected["next"][0], abs=CLOSE)
    assert found["next"] == pytest.approx(expected["next"], abs=5e-3)


@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "rowwise_adagrad"])
def test_optimizer_state_of_tables_is_restored_under_other_plans(sparse: str, tmp_path: Path) -> None:
    changes = {"optim.sparse.optimizer": sparse, "optim.sparse.learning_rate": 0.5}
    expected = trained(config_of(tmp_path, PLANS["table_wise"] | changes))
    for plan in ("row_wise", "data_parallel", *(() if sparse == "rowwise_adagrad" else ("column_wise", "mixed"))):
        found = resumed(config_of(tmp_path, PLANS[plan] | changes))
        assert found["next"] == pytest.approx(expected["next"], abs=CLOSE), f"{sparse} under {plan}"


def test_split_row_wise_adagrad_is_saved_as_the_mean_weighted_by_columns(tmp_path: Path) -> None:
    wide = {
        "model.embedding_dim": 12,
        "model.dense_arch": [12],
        "sharding.types": ["column_wise"],
        "sharding.min_columns": 4,
    }
    config = config_of(tmp_path, wide)
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        steps(model, 5)
        shards = [s for s in local_shards(model.dmp, model.optimizers, "rowwise_adagrad") if s.table == "t_cat_1"]
        held = [(s.weight.shape[1], s.states["sum"].clone()) for s in shards]
        where = checkpointer(model).save(after(config, 5))
    assert len(held) > 1, "the table is not split, so the test checks nothing"
    mean = sum((columns * state.double() for columns, state in held), torch.zeros(61).double()) / 12
    saved = {"tables.t_cat_1.sum": torch.empty(61)}
    dcp.load(saved, checkpoint_id=where, no_dist=True)
    torch.testing.assert_close(saved["tables.t_cat_1.sum"], mean.float(), rtol=1e-6, atol=1e-12)
    assert not torch.equal(held[0][1], held[1][1]), "the shards are equal, so any mean would pass"


def test_a_checkpoint_has_unsharded_tensors_with_canonical_names(tmp_path: Path) -> None:
    for plan in PLANS:
        where = trained(config_of(tmp_path / plan, PLANS[plan]))["where"]
        keys = dcp.FileSystemReader(where).read_metadata().state_dict_metadata
        expected = {f"tables.{t}.{n}" for t in TABLES for n in ("weight", "sum")}
        tables = {k for k in keys if k.startswith("tables.") and ".by_columns." not in k}
        assert tables == expected, f"{plan}: names depend on the plan"
        assert "dense.model.dense_tower.layers.0.weight" in keys
        assert "dense_optim.model.dense_tower.layers.0.weight.sum" in keys


def test_the_learning_rate_schedule_continues_after_a_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"optim.schedule.warmup_steps": 8, "optim.schedule.decay": "constant"})
    with alone(config) as runtime:
        whole = steps(build_sharded_model(config, runtime), 8)
    first_half = trained(config)["losses"]
    assert first_half + resumed(config, 3)["next"] == whole, "a schedule that restarts would warm up twice"


# --- runs ------------------------------------------------------------------------------------------------------------


def run_main(folder: Path | str, *options: str, tree: dict[str, Any] | None = None, tmp: Path) -> int:
    """Run `python -m trainer train` in this process."""
    return main_here(tmp, "train", *options, changes={"checkpoint.uri": str(folder)} | (tree or {}))


def complete(folder: Path) -> list[int]:
    return open_store(str(folder), "a").complete_steps()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert run_main(tmp_path, "--train.steps=8", "--checkpoint.every-steps=2", "--checkpoint.keep=3", tmp=tmp_path) == 0
    assert complete(tmp_path) == [4, 6, 8], "saves at 2, 4, 6 and the end, of which three are kept"
    assert run_main(tmp_path, "--train.steps=10", "--checkpoint.keep=1", tmp=tmp_path) == 0
    assert complete(tmp_path) == [10]
    assert sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir()) == ["step_0000000010"]


def test_a_run_without_periodic_saves_saves_at_its_end(tmp_path: Path) -> None:
    assert run_main(tmp_path, tmp=tmp_path) == 0
    assert complete(tmp_path) == [4]


def test_the_marker_has_the_progress_and_configuration_of_the_run(tmp_path: Path) -> None:
    run_main(tmp_path, tmp=tmp_path)
    marker = open_store(str(tmp_path), "a").read_marker(4)
    assert (marker["step"], marker["position"], marker["world_size"], marker["format"]) == (4, 192, 1, FORMAT)
    assert TrainConfig.model_validate(marker["config"]).train.run == "a"


def test_a_folder_without_a_marker_is_ignored_and_cleaned_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(tmp_path, tmp=tmp_path)
    checkpoints = tmp_path / "a" / "checkpoints"
    shutil.copytree(checkpoints / "step_0000000004", checkpoints / "step_0000000006")
    (checkpoints / "step_0000000006" / "COMPLETE.json").unlink()
    capsys.readouterr()
    assert run_main(tmp_path, "--train.steps=5", tmp=tmp_path) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["step"] for e in events if e["event"] == "resume"] == [4], "it resumed from an incomplete checkpoint"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_0000000004", "step_0000000005"], (
        "the incomplete checkpoint was not deleted"
    )


def test_a_failed_save_keeps_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_main(tmp_path, tmp=tmp_path)
    before = fingerprint(tmp_path / "a" / "checkpoints")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp, "save", full_disk)
    assert run_main(tmp_path, "--train.steps=6", tmp=tmp_path) == 2
    monkeypatch.undo()
    assert complete(tmp_path) == [4]
    kept = fingerprint(tmp_path / "a" / "checkpoints")
    assert {name: kept[name] for name in before} == before
    assert run_main(tmp_path, "--train.steps=6", tmp=tmp_path) == 0, "and the run resumes from it"


def test_a_resume_that_is_required_needs_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(tmp_path, "--checkpoint.resume=required", tmp=tmp_path) == 2
    assert "checkpoint.resume is required, but run a has no complete checkpoint" in capsys.readouterr().err
    run_main(tmp_path, tmp=tmp_path)
    assert run_main(tmp_path, "--checkpoint.resume=required", "--train.steps=6", tmp=tmp_path) == 0


def test_a_run_that_must_not_resume_refuses_an_existing_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(tmp_path, "--checkpoint.resume=never", tmp=tmp_path) == 0
    before = fingerprint(tmp_path / "a" / "checkpoints")
    assert run_main(tmp_path, "--checkpoint.resume=never", "--train.steps=6", tmp=tmp_path) == 2
    message = capsys.readouterr().err
    assert "checkpoint.resume is never, but run a already has" in message
    assert "--train.run NAME" in message
    assert fingerprint(tmp_path / "a" / "checkpoints") == before


# --- checkpoints that cannot be used ---------------------------------------------------------------------------------

OTHER = {
    "model.embedding_dim": {"model.embedding_dim": 4, "model.dense_arch": [16, 4]},
    "model.num_embeddings (rows per table)": {"model.num_embeddings": [50, 61, 71]},
    "model.pooling": {"model.pooling": "mean"},
    "model.dense_arch": {"model.dense_arch": [12, 8]},
    "model.over_arch": {"model.over_arch": [8, 1]},
    "model.interaction": {"model.interaction": "dcn"},
    "data.dense_features": {"data.num_dense": 5},
    "data.sparse_features": {"data.num_sparse": 2, "model.num_embeddings": [50, 61]},
    "data.seed": {"data.seed": 2},
    "data.ids_per_feature": {"data.ids_per_feature": 2},
    "optim.sparse.optimizer": {"optim.sparse.optimizer": "sgd"},
    "optim.dense.optimizer": {"optim.dense.optimizer": "sgd"},
}


@pytest.mark.parametrize("field", OTHER)
def test_a_checkpoint_of_a_different_run_is_refused_with_the_first_differing_field(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(tmp_path, tmp=tmp_path)
    before = fingerprint(tmp_path / "a" / "checkpoints")
    capsys.readouterr()
    assert run_main(tmp_path, "--train.steps=6", tree=OTHER[field], tmp=tmp_path) == 2
    message = capsys.readouterr().err
    assert f"was written with {field} = " in message
    assert "so it cannot be resumed: got " in message
    assert "start a new run with another --train.run NAME" in message
    assert message.count("\n") == 1, "one line, no stack trace"
    assert fingerprint(tmp_path / "a" / "checkpoints") == before, "a refused checkpoint was touched"


@pytest.mark.parametrize(
    "changes",
    [
        {"optim.dense.learning_rate": 0.5, "optim.sparse.learning_rate": 0.5},
        {"train.batch_size": 32},
        {"sharding.types": ["table_wise"]},
        {"model.num_embeddings_cap": 1000},
        {"metrics.log_every": 1, "train.eval_every": 1},
    ],
    ids=str,
)
def test_options_that_do_not_affect_the_state_may_change_in_a_run(changes: dict[str, Any], tmp_path: Path) -> None:
    run_main(tmp_path, tmp=tmp_path)
    assert run_main(tmp_path, "--train.steps=6", tree=changes, tmp=tmp_path) == 0


def truncate(step: Path) -> None:
    file = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes(content) and None


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda step: [path.unlink() for path in step.glob(pattern)] and None


DAMAGE: dict[str, Callable[[Path], None]] = {
    "half a data file": truncate,
    "an empty data file": lambda step: (
        max(step.glob("*.distcp"), key=lambda p: p.stat().st_size).write_bytes(b"") and None
    ),
    "no data file": remove("*.distcp"),
    "no metadata": remove(".metadata"),
    "empty metadata": overwrite(".metadata", b""),
    "damaged metadata": overwrite(".metadata", b"\x80\x04nonsense"),
    "a marker that is not JSON": overwrite("COMPLETE.json", b"{"),
    "a marker that is a list": overwrite("COMPLETE.json", b"[]"),
    "an empty marker": overwrite("COMPLETE.json", b"{}"),
    "a marker of a later format": overwrite("COMPLETE.json", b'{"format": 99}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_ends_the_run_with_one_line_and_stays_unchanged(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(tmp_path, tmp=tmp_path)
    step = tmp_path / "a" / "checkpoints" / "step_0000000004"
    DAMAGE[damage](step)
    before = fingerprint(step)
    capsys.readouterr()
    assert run_main(tmp_path, "--train.steps=6", tmp=tmp_path) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: checkpoint "), message
    assert str(step) in message
    assert message.count("\n") == 1, f"one line, no stack trace: {message}"
    assert fingerprint(step) == before, "the user may still repair an unreadable checkpoint"


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    assert run_main(tmp_path / "file", "--metrics.dir", str(tmp_path / "logs"), tmp=tmp_path) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    assert str(tmp_path / "file") in message


@pytest.mark.parametrize("uri", ["nope://bucket/runs", "s4://x"])
def test_a_uri_of_an_unknown_protocol_is_reported(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(uri, tmp=tmp_path) == 2
    message = capsys.readouterr().err
    assert f"got {uri}" in message
    assert "allowed: a folder, file://, s3://" in message


# --- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_run_resumes_from_an_fsspec_uri(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"memory://{tmp_path.name}" if scheme == "memory" else f"file://{tmp_path}/c"
    logs = ["--metrics.dir", str(tmp_path / "logs")]
    assert run_main(uri, "--train.steps=6", *logs, tmp=tmp_path, tree={"train.run": "whole"}) == 0
    assert run_main(uri, "--checkpoint.every-steps=2", "--train.steps=3", *logs, tmp=tmp_path) == 0
    assert open_store(uri, "a").complete_steps() == [2, 3]
    assert run_main(uri, "--train.steps=6", *logs, tmp=tmp_path) == 0
    assert open_store(uri, "a").complete_steps() == [3, 6]
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"result"' in line]
    assert results[0]["loss"] == results[-1]["loss"], "resuming through the URI changed the run"


def test_deleting_removes_the_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(str(tmp_path))
    (tmp_path / "step_0000000001").mkdir()
    (tmp_path / "step_0000000001" / "data").write_text("x", encoding="utf-8")
    store.commit(1, {})
    monkeypatch.setattr(type(store._fs), "rm", lambda *_, **__: (_ for _ in ()).throw(OSError("interrupted")))
    with pytest.raises(OSError, match="interrupted"):
        store.delete(1)
    assert store.complete_steps() == [], "an interrupted removal must not leave a partial checkpoint marked complete"
    assert store.incomplete_steps() == [1]


def test_folders_that_are_not_steps_are_ignored(tmp_path: Path) -> None:
    for name in ("step_1", "step_0000000001.old", "tmp", "step_00000000xx"):
        (tmp_path / name).mkdir()
    store = FsspecStore(str(tmp_path))
    assert store.complete_steps() == []
    assert store.incomplete_steps() == [], "a folder of the user must not be deleted"


def test_a_run_on_parquet_refuses_columns_that_are_read_differently() -> None:
    def config(hashed: bool) -> TrainConfig:
        columns = {"dense": ["age"], "sparse": [{"column": "user", "hash": hashed, "rows": 100}]}
        return TrainConfig.model_validate({"data": {"source": "parquet", "path": "a", "parquet": columns}})

    marker = {"format": FORMAT, "config": config(True).model_dump(mode="json")}
    check_compatible(marker, config(True), "here")
    with pytest.raises(UserError, match=r"written with data\.parquet\.sparse = .*start a new run"):
        check_compatible(marker, config(False), "here")
