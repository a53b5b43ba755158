"""Problems between job, trainer and cluster settings: each with its key, the allowed values and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pulumi
import pytest
from provider_mocks.recording import run_stack, stack_config
from workload_facts import ROOT, facts

from workloads import checks


def problems(stack: str, overrides: dict[str, Any]) -> str:
    """Return the message with which a stack's program ends before it registers a resource."""
    recording = run_stack(stack, overrides)
    assert recording.error is not None, "the program continued"
    assert recording.registrations == [], "a resource was registered before the settings were checked"
    return str(recording.error)


CASES = [
    ("local", {"job.egress": ["10.0.0.0/8:²"]}, "job.egress[0]: not cidr:port", "job.egress[0]"),
    (
        "aws",
        {"job.nodes": 3},
        "job.nodes: more than the pool's maximum: got 3",
        "pulumi config set --path gpu.nodes.max 3",
    ),
    ("aws", {"job.gpus_per_node": 16}, "job.gpus_per_node: more than a node has: got 16", "job.gpus_per_node 8"),
    ("local", {"job.gpus_per_node": 1}, "unset: this pool has no GPUs", "pulumi config rm --path job.gpus_per_node"),
    ("aws", {"job.processes_per_node": 2}, "each gets one process", "pulumi config rm --path job.processes_per_node"),
    ("aws", {"job.image": "registry.example/trainer"}, "no tag and no digest", "registry.example/trainer:<tag>"),
    ("local", {"job.image": None}, "job.image: missing, and the stack has no registry", "job.image trainer:dev"),
    (
        "local",
        {"job.launcher": "slurm"},
        "job.launcher: unknown value",
        "pulumi config set --path job.launcher pytorchjob",
    ),
    ("local", {"job.run": "Run_1"}, ": got 'Run_1'", "pulumi config set --path job.run default"),
    ("local", {"job.run": "r" * 37}, "1 to 36 of a-z", "job.run default"),
    ("local", {"job.min_nodes": 3}, "job.min_nodes: more than job.nodes (2): got 3", "job.min_nodes 2"),
    (
        "local",
        {"job.min_nodes": 1, "job.launcher": "trainjob"},
        "has no elastic jobs yet",
        "pulumi config set --path job.launcher pytorchjob",
    ),
    ("aws", {"trainer.train.batch_size": 1000}, "16 processes (2 nodes x 8)", "trainer.train.batch_size 992"),
    (
        "aws",
        {"trainer.train.eval_batch_size": 24},
        "trainer.train.eval_batch_size: 16 processes (2 nodes x 8) cannot share it equally: got 24",
        "eval_batch_size 16",
    ),
    ("aws", {"trainer.train.run": "mine"}, "trainer.train.run: set by the cluster: got 'mine'", "job.run instead"),
    ("aws", {"trainer.train.device": "cpu"}, "set by the cluster", "config rm --path trainer.train.device"),
    ("aws", {"trainer.metrics.progress": "bar"}, "set by the cluster", "config rm --path trainer.metrics.progress"),
    ("aws", {"trainer.checkpoint.uri": "s3://x"}, "set by the cluster", "config rm --path trainer.checkpoint.uri"),
    (
        "aws",
        {"trainer.train.colour": 1},
        "trainer.train.colour: unknown key: got 1",
        "config rm --path trainer.train.colour",
    ),
    ("aws", {"job.colour": 1}, "job.colour: unknown key: got 1", "dataset, egress, env"),
    ("aws", {"job.dataset.source": "/elsewhere"}, "not on the shared storage", "job.dataset.source bucket"),
    ("aws", {"job.dataset.source": "ftp://x"}, ": got 'ftp://x'", "job.dataset.source bucket"),
    (
        "aws",
        {"job.dataset": {"source": "bucket", "preprocess": False}},
        "the Job would do nothing",
        "job.dataset.source",
    ),
    (
        "local",
        {"trainer.data": {"source": "criteo", "path": "/criteo"}},
        "trainer.data.path: not in the pods: got '/criteo'",
        "trainer.data.path /data/work/criteo",
    ),
    ("local", {"job.egress": ["10.0.0.1"]}, "job.egress[0]: not cidr:port: got '10.0.0.1'", "10.1.2.3/32:9000"),
    ("local", {"job.egress": ["10.0.0.1/33:80"]}, "not cidr:port", "10.1.2.3/32:9000"),
    (
        "local",
        {"job.grace_seconds": 1},
        "job.grace_seconds: too small: got 1; allowed: at least 10",
        "job.grace_seconds 10",
    ),
]


@pytest.mark.parametrize(("stack", "overrides", "problem", "fix"), CASES, ids=[case[2][:40] for case in CASES])
def test_a_mistake_is_reported_before_any_resource_is_registered(
    stack: str, overrides: dict[str, Any], problem: str, fix: str
) -> None:
    message = problems(stack, overrides)
    assert problem in message, message
    assert fix in message, message


def test_all_mistakes_are_in_one_message() -> None:
    message = problems("local", {"job.run": "A", "trainer.train.batch_size": 1001, "gpu.nodes.min": 9})
    assert message.startswith("stack 'local': 3 settings to fix")


def test_a_mistake_between_keys_of_the_trainer_names_its_section() -> None:
    message = problems("local", {"trainer.model": {"embedding_dim": 32}})
    assert "trainer.model" in message
    assert "dense_arch" in message
    assert "pulumi config set --path 'trainer.model.<key>' '<value>'" in message
    assert "Undefined" not in message


def test_every_key_that_the_cluster_sets_is_refused_in_a_stacks_file() -> None:
    """The cluster would overwrite it silently."""
    overwritten = facts("local").config.model_dump(exclude_defaults=True)
    assert overwritten, "the cluster sets nothing"
    keys = {f"{section}.{key}" for section, values in overwritten.items() for key in values}
    assert keys <= set(checks._SET_BY_CLUSTER), "a key would be ignored silently"


def test_a_batch_size_per_process_need_not_be_divisible() -> None:
    own = {"trainer.train.batch_size_is": "per_process", "trainer.train.batch_size": 1001}
    assert run_stack("local", own).error is None


def test_switching_the_launcher_is_one_line(kubeconfig: Path) -> None:
    for launcher in ("job", "pytorchjob", "trainjob"):
        recording = run_stack("local", {"job.launcher": launcher})
        assert recording.error is None
        assert recording.exports["job"]["launcher"] == launcher


def test_the_clouds_default_to_the_training_operator_and_local_to_a_plain_job() -> None:
    for stack, launcher in (("aws", "pytorchjob"), ("azure", "pytorchjob"), ("gcp", "pytorchjob"), ("local", "job")):
        assert f'"launcher": "{launcher}"' in stack_config(stack)["torchrec-cloud:job"]


def test_a_run_on_synthetic_data_shows_so_with_the_guide_to_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pulumi.log, "info", lines.append)
    assert run_stack("aws", {"job.run": "first"}).error is None
    assert any(line.startswith("run first trains on") and "synthetic clicks" in line for line in lines)
    guide, _, anchor = next(line for line in lines if "synthetic" in line).rpartition(" ")[2].partition("#")
    assert f"## {anchor.replace('-', ' ')}".lower() in (ROOT / guide).read_text().lower().replace(",", "")
    lines.clear()
    own = {
        "data.source": "parquet",
        "data.path": "/data/clicks",
        "data.parquet": {"label": "y", "dense": ["age"], "sparse": ["user"]},
    }
    assert run_stack("aws", {f"trainer.{key}": value for key, value in own.items()}).error is None
    assert not any("synthetic" in line for line in lines)
