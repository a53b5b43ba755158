"""`python -m workloads logs`: whose lines, with whose name in front, and how reports look."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster_objects import NAME, TRAIN, job, line, pod
from fake_cluster import FakeCluster

Command = Callable[..., int]


@pytest.fixture
def two(cluster: FakeCluster) -> tuple[str, str]:
    """A job of two pods that have written something; their names."""
    job(cluster)
    first, second = (str(pod(cluster, index)["metadata"]["name"]) for index in (0, 1))
    cluster.logs = {first: ["hello", line("train", **TRAIN)], second: ["there"]}
    return first, second


def test_every_line_has_its_pod_in_front(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{two[0]}  hello",
        f"{two[0]}  {line('train', **TRAIN)}",
        f"{two[1]}  there",
    ]


def test_following_merges_the_pods_until_all_have_ended(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs", "--follow") == 0
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == sorted([f"{two[0]}  hello", f"{two[0]}  {line('train', **TRAIN)}", f"{two[1]}  there"])


def test_one_pod_needs_no_name_in_front(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs", "--rank", "1") == 0
    assert capsys.readouterr().out == "there\n"
    assert command("logs", "--pod", two[0], "--tail", "1", "--no-pretty") == 0
    assert capsys.readouterr().out == line("train", **TRAIN) + "\n"


def test_the_container_before_the_last_restart(
    cluster: FakeCluster, two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.previous_logs[two[0]] = ["the end of it"]
    assert command("logs", "--rank", "0", "--previous") == 0
    assert capsys.readouterr().out == "the end of it\n"


def test_reports_become_columns(two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("logs", "--rank", "0", "--pretty") == 0
    greeting, heading, row = capsys.readouterr().out.splitlines()
    assert greeting == "hello"
    assert heading.split() == ["STEP", "LOSS", "NE", "AUC", "SAMPLES/S"]
    assert row.split() == ["340", "0.4321", "0.8100", "0.7654", "1,234,567"]
    assert len(row) == len(heading), "columns stand under their headings"


def test_other_events_become_words(
    cluster: FakeCluster, two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.logs[two[0]] = [line("plan", tables=[1, 2, 3]), line("checkpoint", step=5, path="s3://b/5", seconds=1.5)]
    assert command("logs", "--rank", "0", "--pretty") == 0
    assert capsys.readouterr().out.splitlines() == [
        "plan: 3 tables",
        "checkpoint: step 5, path s3://b/5, seconds 1.5000",
    ]


def test_a_pod_that_has_written_nothing_does_not_hide_the_others(
    cluster: FakeCluster, two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    del cluster.logs[two[0]]
    assert command("logs") == 1
    told = capsys.readouterr()
    assert told.out == f"{two[1]}  there\n"
    assert "is waiting to start: ContainerCreating" in told.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rank", "7"], "--rank is 7; the pods of run 'criteo' have the indices 0, 1"),
        (["--pod", "x"], f"--pod is 'x'; the pods of run 'criteo' are: {NAME}-0-x0y, {NAME}-1-x1y"),
    ],
    ids=["rank", "pod"],
)
def test_a_pod_that_is_not_there(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert command("logs", *words) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_pods_or_without_a_job(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs") == 2
    assert "run 'criteo' has no job in namespace 'training'" in capsys.readouterr().err
    job(cluster)
    assert command("logs") == 2
    assert "has no pods; `python -m workloads status" in capsys.readouterr().err
