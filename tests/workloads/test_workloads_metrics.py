"""`python -m workloads metrics`: the newest metrics, from the endpoint of rank 0 or from its log."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import pytest
from cluster_objects import NAME, TRAIN, job, line, pod
from fake_cluster import FakeCluster

Command = Callable[..., int]
FIRST, SECOND = f"{NAME}-0-x0y", f"{NAME}-1-x1y"


@pytest.fixture
def served() -> str:
    """Return the page of the trainer's own endpoint after a report, an evaluation and a checkpoint."""
    pytest.importorskip("torch", reason="the test uses the trainer's own endpoint")
    from trainer.metrics.prometheus import Prometheus

    sink = Prometheus("127.0.0.1", 0, "criteo")
    try:
        sink.event("train", {**TRAIN, "step_ms": 6.5, "samples_since_last": 8192})
        sink.event("eval", {"step": 340, "auc": 0.8, "loss": 0.4})
        sink.event("checkpoint", {"step": 340})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink._server.server_address[1]}/metrics") as page:
            return str(page.read().decode())
    finally:
        sink.close()


@pytest.fixture
def two(cluster: FakeCluster) -> None:
    """Create a job of two pods."""
    job(cluster)
    pod(cluster, 0)
    pod(cluster, 1)


@pytest.mark.usefixtures("two")
def test_the_trainers_endpoint_is_read_from_any_pod(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], served: str
) -> None:
    cluster.metrics[SECOND] = served
    assert command("metrics", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    saved, source = found.pop("checkpoint_time"), found.pop("source")
    assert saved.endswith("+00:00"), "the time of the newest complete checkpoint"
    assert source == f"pod {SECOND}, port 9400"
    assert found == pytest.approx({**TRAIN, "step_ms": 6.5, "eval_auc": 0.8, "eval_loss": 0.4})


@pytest.mark.usefixtures("two")
def test_without_an_endpoint_the_metrics_come_from_the_log(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.logs[SECOND] = ["noise"]
    cluster.logs[FIRST] = [
        line("start", total_steps=1000),
        line("train", **{**TRAIN, "step": 320}),
        line("checkpoint", step=330, path="s3://b/step_330"),
        line("train", **TRAIN),
        '{"event": "train", "tim',
    ]
    assert command("metrics") == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 340/1,000, 1,234,567 samples/s, loss 0.4321, NE 0.8100, AUC 0.7654, 41.5 GiB",
        "last checkpoint s3://b/step_330",
        "last checkpoint 2026-11-21T10:00:00+00:00",
        f"from log of pod {FIRST}",
    ]


@pytest.mark.usefixtures("two")
def test_a_run_without_metrics_yet_exits_with_1(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("metrics") == 1
    assert "no metrics yet" in capsys.readouterr().out


def test_with_a_forbidden_proxy_the_metrics_come_from_the_log(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0)
    cluster.forbidden.add(("GET", "/proxy"))
    cluster.logs[FIRST] = [line("train", **TRAIN)]
    assert command("metrics") == 0
    assert f"from log of pod {FIRST}" in capsys.readouterr().out
