"""The trainer's settings as arguments for a managed training service, and the commands for a run there."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import TrainConfig
from trainer.config.options import load_config
from workloads import managed
from workloads.__main__ import main
from workloads.cli import options


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"train": {"steps": 7, "batch_size": 4096, "run": "2"}, "data": {"seed": 3}},
        {"model": {"num_embeddings": [10, 20]}, "data": {"num_sparse": 2}},
        {"model": {"num_embeddings": "criteo-1tb"}},
        {"sharding": {"tables": {"t_cat_0": ["row_wise"]}}},
        {"metrics": {"prometheus_port": None, "tensorboard": False}},
        {"data": {"source": "criteo", "path": "/data/a folder's", "criteo": {"train_days": [0, 1]}}},
        {
            "data": {
                "source": "parquet",
                "path": "gs://b/x",
                "eval_path": "gs://b/y",
                "parquet": {"dense": ["a", {"column": "b", "transform": "log1p"}], "sparse": ["c"]},
            }
        },
    ],
    ids=["nothing", "numbers", "lists", "words", "mappings", "none", "a path with spaces", "columns"],
)
def test_the_trainer_parses_the_arguments_back_to_the_same_settings(tree: dict[str, Any]) -> None:
    config = TrainConfig.model_validate(tree)
    assert load_config(managed.trainer_options(config), {}) == config, (
        "on a cluster the same settings are passed as JSON"
    )


def test_defaults_are_not_passed_as_arguments() -> None:
    assert managed.trainer_options(TrainConfig()) == []


@pytest.mark.parametrize(
    ("data", "reads"),
    [
        ({}, False),
        ({"source": "criteo", "path": "/data/criteo"}, True),
        ({"source": "criteo", "path": "/database"}, False),
        ({"source": "criteo", "path": "gs://b/x"}, False),
    ],
)
def test_a_run_reads_the_buckets_datasets_if_a_path_is_below_the_storage(data: dict[str, Any], reads: bool) -> None:
    assert managed.reads_data(TrainConfig.model_validate({"data": data}), "/data") is reads


def test_status_prints_the_services_own_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"run": "a", "launcher": "vertex", "page": "https://page", "commands": {"status": "gcloud ai describe 7"}}
    monkeypatch.setattr(options, "stack_outputs", lambda _stack: {"job": job})
    assert main(["status", "--stack", "lab"]) == 2
    error = capsys.readouterr().err
    assert error == "error: run 'a' is on vertex, not on a cluster; status: `gcloud ai describe 7`; https://page\n"
