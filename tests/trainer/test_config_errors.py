"""Errors of the configuration: one line with the option, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import TrainConfig
from trainer.config.options import load_config
from trainer.errors import UserError


def refusal(*arguments: str, environ: dict[str, str] | None = None) -> str:
    """Return the error of a command line and an environment, after checking that it is one line."""
    with pytest.raises(UserError) as caught:
        load_config(arguments, environ or {})
    message = str(caught.value)
    assert "\n" not in message, "an error is one line"
    return message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--train.batch-sise", "3"], ["--train.batch-sise", "did you mean --train.batch-size"]),
        (["--trian.batch-size", "3"], ["--trian.batch-size", "did you mean --train.batch-size"]),
        (["--batch-size", "3"], ["--batch-size", "did you mean --train.batch-size"]),
        (["--train.batch-size"], ["--train.batch-size", "needs a value"]),
        (["--train.batch-size", "--train.steps", "3"], ["--train.batch-size", "needs a value"]),
        (["batch", "3"], ["'batch'", "--section.option VALUE"]),
        (["--train.batch-size", "many"], ["--train.batch-size", "'many'", "integer"]),
        (["--train.batch-size", "0"], ["--train.batch-size", "0", "greater than 0"]),
        (["--train.steps", "1.5"], ["--train.steps", "1.5", "integer"]),
        (["--train.compile", "maybe"], ["--train.compile", "'maybe'", "boolean"]),
        (["--optim.sparse.learning-rate", "NaN"], ["--optim.sparse.learning-rate", "nan", "finite"]),
        (["--optim.dense.optimizer", "lion"], ["--optim.dense.optimizer", "'lion'", "'adam' or 'adamw'"]),
        (["--optim.sparse.optimizer", "adamw"], ["--optim.sparse.optimizer", "'adamw'", "'rowwise_adagrad'"]),
        (["--train.target-auc", "0.4"], ["--train.target-auc", "0.4", "0.5"]),
        (["--metrics.prometheus-port", "99999"], ["--metrics.prometheus-port", "99999", "65535"]),
        (["--checkpoint.uri", ""], ["--checkpoint.uri", "''", "1 character"]),
        (["--train.run", "Bad_Name"], ["--train.run", "'Bad_Name'", "a-z0-9"]),
        (["--model.embedding-dim", "32"],
         ["model.dense_arch must end in model.embedding_dim", "got 64; allowed: 32", "'[512, 256, 32]'"]),
        (["--model.dense-arch", "[512,32]"], ["model.dense_arch", "32", "model.embedding_dim", "64"]),
        (["--model.over-arch", "[8,2]"], ["model.over_arch", "got 2; allowed: 1"]),
        (["--model.dense-arch", "[]"], ["--model.dense-arch", "[]", "at least 1"]),
        (["--model.num-embeddings", "[1,2]"], ["model.num_embeddings", "2 tables", "26 sparse features"]),
        (["--model.num-embeddings", "criteo-1tb", "--data.num-sparse=3"], ["26 tables", "3", "--data.num-sparse 26"]),
        (["--model.num-embeddings", "criteo"], ["--model.num-embeddings", "'criteo'", "criteo-1tb"]),
        (["--sharding.types", '["diagonal"]'], ["--sharding.types", "diagonal", "'row_wise'"]),
        (["--sharding.tables", '{"t_x": ["row_wise"]}', "--data.num-sparse=2"], ["t_x", "allowed: t_cat_0, t_cat_1"]),
        (["--sharding.tables", '{"t_cat_0": ["diagonal"]}'], ["--sharding.tables", "diagonal", "'row_wise'"]),
        (["--data.num-dense", "0"], ["dense feature", "data.num_dense"]),
        (["--data.source", "kafka"], ["--data.source", "'kafka'", "synthetic"]),
        (["--data.source", "parquet"], ["data.path", "missing", "--data.path"]),
        (["--data.source", "parquet", "--data.path", "x"],
         ["data.parquet.sparse is empty", "one or more categorical columns"]),
        (["--data.eval-samples", "0"], ["data.eval_samples", "0", "1 or more"]),
        (["--data.source=criteo", "--data.path=x", "--data.criteo.eval-days=[3]"],
         ["eval_days", "[3]", "overlaps train_days"]),
        (["--data.parquet.sparse", '[{"colum": "a"}]'], ["--data.parquet.sparse", "colum", "column"]),
        (["--data.source=parquet", "--data.path=x", '--data.parquet.sparse=["a", "a"]', '--data.parquet.dense=["d"]'],
         ["data.parquet.sparse", "'a'", "more than once"]),
    ],
)  # fmt: skip
def test_an_error_names_the_option_the_value_and_what_is_allowed(arguments: list[str], parts: list[str]) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message, f"the message lacks {part!r}"


def test_one_wrong_value_is_reported_once() -> None:
    wrong = {
        "--sharding.types": '["diagonal"]',
        "--model.num-embeddings": "lots",
        "--data.parquet.sparse": '[{"x": 1}]',
    }
    for option, value in wrong.items():
        assert refusal(option, value).count(option) == 1, "one mistake reads as several"


def test_all_wrong_options_are_reported_together() -> None:
    message = refusal("--train.batch-size", "x", "--train.steps", "0")
    assert "--train.batch-size" in message
    assert "--train.steps" in message, "users should not have to find their mistakes one run at a time"


def test_an_unknown_environment_variable_is_refused_with_a_suggestion() -> None:
    message = refusal(environ={"TRAINER_TRAIN__BATCH_SISE": "3"})
    assert "TRAINER_TRAIN__BATCH_SISE" in message
    assert "did you mean TRAINER_TRAIN__BATCH_SIZE?" in message


def test_a_wrong_value_in_the_environment_is_refused() -> None:
    assert "'x'" in refusal(environ={"TRAINER_TRAIN__BATCH_SIZE": "x"})


def test_variables_of_other_programs_are_ignored() -> None:
    assert load_config([], {"RANK": "0", "PATH": "/bin", "TRAINING": "1"}) == TrainConfig()


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.ini", "x = 1", [".ini", "allowed: .json, .toml, .yaml, .yml"]),
        ("noending", "{}", ["none", "allowed: .json"]),
        ("a.json", "{", ["not valid json", "line 1"]),
        ("a.toml", "x = = 1", ["not valid toml", "line 1"]),
        ("a.yaml", "a: [", ["not valid yaml", "line 1"]),
        ("a.json", "[1, 2]", ["list", "allowed: a mapping"]),
        ("a.yaml", "- train", ["list", "allowed: a mapping"]),
        ("a.json", '{"trian": {"steps": 3}}', ["trian", "did you mean train?"]),
        ("a.json", '{"train": {"stepz": 3}}', ["train.stepz", "did you mean train.steps?"]),
        ("a.yaml", "train: {batch-size: 3}", ["train.batch-size", "did you mean train.batch_size?"]),
        ("a.json", '{"train": 3}', ["train", "3"]),
        ("a.json", '{"train": {"steps": "x"}}', ["--train.steps", "'x'", "integer"]),
        ("a.json", "\xff\xfe", ["cannot be read"]),
    ],
)
def test_the_error_for_a_wrong_file_says_what_is_allowed(
    name: str, text: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    message = refusal("--config", str(tmp_path / name))
    for part in parts:
        assert part in message, f"the message lacks {part!r}"


def test_the_error_for_a_missing_file_names_its_path_and_origin(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.json" in refusal("--config", f"{tmp_path}/none.json")
    message = refusal(environ={"TRAINER_CONFIG": f"{tmp_path}/none.toml"})
    assert f"{tmp_path}/none.toml" in message
    assert "TRAINER_CONFIG" in message, "the file was not given by --config"


def test_a_number_in_place_of_a_section_is_refused_when_an_option_of_the_section_is_set(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train": 3}', encoding="utf-8")
    assert "train in the configuration file is not a section: got 3" in refusal(
        "--config", str(tmp_path / "a.json"), "--train.steps", "3"
    )


@pytest.mark.parametrize(("world_size", "allowed"), [(3, "63 or 66"), (128, "128")])
def test_the_error_for_a_batch_that_does_not_divide_names_the_nearest_allowed_sizes(
    world_size: int, allowed: str
) -> None:
    config = load_config(["--train.batch-size", "64"], {})
    with pytest.raises(ValueError, match=r"train\.batch_size does not divide by .* got 64") as caught:
        config.check_world_size(world_size)
    assert allowed in str(caught.value)
    assert "--train.batch-size" in str(caught.value)


def test_an_evaluation_batch_that_does_not_divide_is_refused_too() -> None:
    config = load_config(["--train.batch-size", "64", "--train.eval-batch-size", "33"], {})
    with pytest.raises(ValueError, match=r"train\.eval_batch_size does not divide by 2 processes: got 33"):
        config.check_world_size(2)
