"""An exported model predicts the same as the sharded model, for every plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_jobs import PLANS, after, alone, checkpointer, config_of, logits, main_here, steps
from torch import Tensor

from trainer.checkpoint import open_store
from trainer.config import TrainConfig
from trainer.data import Batch, SourceContext, open_source
from trainer.errors import UserError
from trainer.export import exported_model as serving
from trainer.sharding.sharded_model import build_sharded_model

COUNT = 64
# Largest difference of a probability: fp16 keeps 11 bits of a weight, int8 256 levels between a row's extremes.
TOLERANCE = {"none": 1e-6, "fp16": 5e-4, "int8": 1e-2}


def batch(config: TrainConfig, count: int = COUNT) -> Batch:
    """Return the samples that small_jobs.logits uses."""
    return open_source(SourceContext(config, "eval", torch.device("cpu"))).read(0, count)


def trained_logits(folder: Path, changes: dict[str, Any]) -> tuple[TrainConfig, Tensor]:
    """Train and save the run `given` in this process; return its configuration and logits."""
    config = config_of(folder, {"optim.sparse.learning_rate": 0.5} | changes)
    with alone(config) as runtime:
        job = build_sharded_model(config, runtime)
        steps(job, 5)
        checkpointer(job).save(after(config, 5))
        return config, logits(job, COUNT)


def exported(folder: Path, quantize: serving.Quantize = "none") -> serving.ExportedModel:
    return serving.from_checkpoint(open_store(str(folder), "given"), 5, quantize)


def model_logits(model: serving.ExportedModel, config: TrainConfig) -> Tensor:
    read = batch(config)
    with torch.no_grad():
        return model.model(read.dense_BD, read.sparse)


@pytest.mark.parametrize("plan", PLANS)
def test_the_exported_model_has_the_logits_of_the_sharded_model(plan: str, tmp_path: Path) -> None:
    config, expected = trained_logits(tmp_path, PLANS[plan])
    found = model_logits(exported(tmp_path), config)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 1e-3, "all logits are equal, so the test proves nothing"


@pytest.mark.parametrize(
    "changes",
    [{"model.interaction": "dcn", "model.dcn_low_rank_dim": 4}, {"data.ids_per_feature": 3, "model.pooling": "mean"}],
)
def test_every_kind_of_model_can_be_exported(changes: dict[str, Any], tmp_path: Path) -> None:
    config, expected = trained_logits(tmp_path, PLANS["mixed"] | changes)
    torch.testing.assert_close(model_logits(exported(tmp_path), config), expected, rtol=0, atol=1e-5)


def test_a_run_of_two_processes_is_exported_too(pair: tuple[Path, Path]) -> None:
    trained = torch.load(pair[0] / "made.pt", weights_only=False)
    config = config_of(pair[1], PLANS["mixed"])
    torch.testing.assert_close(model_logits(exported(pair[1]), config), trained["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantize", ["fp16", "int8"])
def test_quantized_embeddings_stay_within_their_tolerance(quantize: serving.Quantize, tmp_path: Path) -> None:
    config, expected = trained_logits(tmp_path, PLANS["table_wise"])
    read, model = batch(config), exported(tmp_path, quantize)
    difference = (model.predict(read.dense_BD, read.sparse) - torch.sigmoid(expected)).abs().max()
    assert 0 < float(difference) < TOLERANCE[quantize], "not quantized, or the error is too large"


@pytest.mark.parametrize("quantize", ["none", "fp16", "int8"])
def test_a_saved_model_loads_unchanged(quantize: serving.Quantize, tmp_path: Path) -> None:
    config, _ = trained_logits(tmp_path, PLANS["row_wise"])
    model = exported(tmp_path, quantize)
    serving.save(model, tmp_path / "model")
    again = serving.load(tmp_path / "model")
    read = batch(config)
    assert torch.equal(again.predict(read.dense_BD, read.sparse), model.predict(read.dense_BD, read.sparse))
    assert (again.step, again.quantize, again.config) == (5, quantize, config)
    assert not torch.distributed.is_initialized(), "a served model needs no process group"


# --- the commands ----------------------------------------------------------------------------------------------------


def test_quantized_models_are_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = {"model.num_embeddings": 1000, "model.embedding_dim": 64, "model.dense_arch": [64]}
    assert main_here(tmp_path, "train", changes=wide) == 0
    sizes = {}
    for kind in ("none", "fp16", "int8"):
        assert main_here(tmp_path, "export", "--out", str(tmp_path / kind), "--quantize", kind, changes=wide) == 0
        sizes[kind] = (tmp_path / kind / "weights.pt").stat().st_size
    assert "exported step 4 of run a" in capsys.readouterr().out
    assert sizes["none"] > 1.5 * sizes["fp16"] > 1.5 * sizes["int8"], sizes


def parquet_of(read: Batch, config: TrainConfig, path: Path) -> None:
    """Write the features of a batch as Parquet columns with the features' names."""
    columns: dict[str, Any] = {f: read.dense_BD[:, i].numpy() for i, f in enumerate(config.data.dense_features)}
    columns |= {f: read.sparse[f].values().numpy() for f in config.data.sparse_features}
    pq.write_table(pa.table(columns), path, row_group_size=20)


def test_predict_writes_the_probabilities_of_the_sharded_model_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, expected = trained_logits(tmp_path, PLANS["mixed"])
    assert main_here(tmp_path, "export", "--out", str(tmp_path / "model"), changes={"train.run": "given"}) == 0
    parquet_of(batch(config), config, tmp_path / "x.parquet")
    from trainer.main import main

    files = ["--input", str(tmp_path / "x.parquet"), "--output", str(tmp_path / "y.parquet")]
    assert main(["predict", "--model", str(tmp_path / "model"), *files, "--batch-size", "7"]) == 0
    found = torch.from_numpy(pq.read_table(tmp_path / "y.parquet")["probability"].to_numpy().copy())
    torch.testing.assert_close(found, torch.sigmoid(expected), rtol=0, atol=1e-5)
    assert "wrote 64 probabilities" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda t: t.drop_columns("cat_1"), ["lacks a column of the model", "got dense_0", "needed: cat_1"]),
        (lambda t: t.set_column(5, "cat_1", pa.array([3] * 30 + [999] + [3] * 33)), ["cat_1", "999", "row 30"]),
        (lambda t: t.set_column(5, "cat_1", pa.array([3] * 30 + [None] + [3] * 33)), ["cat_1", "row 30"]),
    ],
    ids=["a missing column", "an id past the end", "a null"],
)
def test_predict_reports_bad_input_and_leaves_no_output(
    spoil: Any, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = trained_logits(tmp_path, {})
    serving.save(exported(tmp_path), tmp_path / "model")
    parquet_of(batch(config), config, tmp_path / "x.parquet")
    pq.write_table(spoil(pq.read_table(tmp_path / "x.parquet")), tmp_path / "x.parquet", row_group_size=20)
    from trainer.main import main

    files = ["--input", str(tmp_path / "x.parquet"), "--output", str(tmp_path / "y.parquet")]
    assert main(["predict", "--model", str(tmp_path / "model"), *files]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    for part in parts:
        assert part in message
    assert not list(tmp_path.glob("y.parquet*")), "a partial output looks complete"


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_export_refuses_a_folder_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_here(tmp_path, "train")
    assert main_here(tmp_path, "export", "--out", str(tmp_path / "m")) == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    capsys.readouterr()
    assert main_here(tmp_path, "export", "--out", str(tmp_path / "m"), "--quantize", "int8") == 2
    assert "already contains a model" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before, "the model was overwritten"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "--out is missing. Fix: --out FOLDER"),
        (["--out", "m", "--quantize", "int3"], "invalid choice: 'int3'"),
        (["--out", "m"], "run a has no complete checkpoint"),
        (["--out", "m", "--train.stepz", "3"], "unknown option --train.stepz"),
    ],
)
def test_export_reports_wrong_options(
    options: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main_here(tmp_path, "export", *options) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1, message
    assert not (tmp_path / "m").exists()


def test_an_interrupted_export_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_logits(tmp_path, {})
    model = exported(tmp_path)

    def cut_off(*_: object) -> None:
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut_off)
        with pytest.raises(OSError, match="cut off"):
            serving.save(model, tmp_path / "m")
    with pytest.raises(UserError, match=r"model\.json is missing"):
        serving.load(tmp_path / "m")
    serving.save(model, tmp_path / "m")
    assert serving.load(tmp_path / "m").step == 5, "the export can be repeated"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (
            lambda m: (m / "model.json").unlink(),
            "model.json is missing. Fix: create it with `python -m trainer export`",
        ),
        (lambda m: (m / "weights.pt").unlink(), "weights.pt is missing"),
        (lambda m: (m / "model.json").write_text("{"), "not a model that this version can read"),
        (lambda m: (m / "model.json").write_text("[]"), "not a model that this version can read"),
        (lambda m: (m / "model.json").write_text('{"format": 99}'), "unknown format: got 99; allowed: 1"),
        (lambda m: (m / "weights.pt").write_bytes(b"nonsense"), "not a model that this version can read"),
        (lambda m: os.truncate(m / "weights.pt", 1000), "not a model that this version can read"),
        (lambda m: (m / "weights.pt").write_bytes(b""), "not a model that this version can read"),
    ],
    ids=[
        "no description",
        "no weights",
        "bad JSON",
        "a list",
        "an unknown format",
        "bad weights",
        "half the weights",
        "empty",
    ],
)
def test_a_damaged_model_is_refused(damage: Any, part: str, tmp_path: Path) -> None:
    trained_logits(tmp_path, {})
    serving.save(exported(tmp_path), tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(UserError) as caught:
        serving.load(tmp_path / "m")
    assert f"--model {tmp_path / 'm'}" in str(caught.value)
    assert part in str(caught.value)


def test_the_description_has_the_step_and_the_configuration_of_the_run(tmp_path: Path) -> None:
    config, _ = trained_logits(tmp_path, {})
    serving.save(exported(tmp_path, "fp16"), tmp_path / "m")
    fields = json.loads((tmp_path / "m" / "model.json").read_text(encoding="utf-8"))
    assert (fields["step"], fields["quantize"]) == (5, "fp16")
    assert TrainConfig.model_validate(fields["config"]) == config
