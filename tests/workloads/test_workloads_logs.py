"""`python -m workloads logs`: which lines it prints, their prefixes, and the columns of reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster_objects import NAME, TRAIN, job, line, pod
from fake_cluster import FakeCluster

Command = Callable[..., int]


@pytest.fixture
def two(cluster: FakeCluster) -> tuple[str, str]:
    """Create a job of two pods with logs; return the names of the pods."""
    job(cluster)
    first, second = (str(pod(cluster, index)["metadata"]["name"]) for index in (0, 1))
    cluster.logs = {first: ["hello", line("train", **TRAIN)], second: ["there"]}
    return first, second


def test_every_line_starts_with_the_name_of_its_pod(
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


def test_lines_of_a_single_pod_have_no_prefix(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs", "--rank", "1") == 0
    assert capsys.readouterr().out == "there\n"
    assert command("logs", "--pod", two[0], "--tail", "1", "--no-pretty") == 0
    assert capsys.readouterr().out == line("train", **TRAIN) + "\n"


def test_previous_prints_the_log_of_the_container_before_the_last_restart(
    cluster: FakeCluster, two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.previous_logs[two[0]] = ["the end of it"]
    assert command("logs", "--rank", "0", "--previous") == 0
    assert capsys.readouterr().out == "the end of it\n"


def test_reports_are_printed_as_columns(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs", "--rank", "0", "--pretty") == 0
    greeting, heading, row = capsys.readouterr().out.splitlines()
    assert greeting == "hello"
    assert heading.split() == ["STEP", "LOSS", "NE", "AUC", "SAMPLES/S"]
    assert row.split() == ["340", "0.4321", "0.8100", "0.7654", "1,234,567"]
    assert len(row) == len(heading), "the columns are aligned with their headings"


def test_other_events_are_printed_as_text(
    cluster: FakeCluster, two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.logs[two[0]] = [line("plan", tables=[1, 2, 3]), line("checkpoint", step=5, path="s3://b/5", seconds=1.5)]
    assert command("logs", "--rank", "0", "--pretty") == 0
    assert capsys.readouterr().out.splitlines() == [
        "plan: 3 tables",
        "checkpoint: step 5, path s3://b/5, seconds 1.5000",
    ]


def test_a_pod_without_a_log_does_not_hide_the_other_logs(
    cluster: FakeCluster, two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    del cluster.logs[two[0]]
    assert command("logs") == 1
    printed = capsys.readouterr()
    assert printed.out == f"{two[1]}  there\n"
    assert "is waiting to start: ContainerCreating" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "7"], "run 'criteo' has no pod of this index: got --rank 7; allowed: 0, 1"),
        (["--pod", "x"], f"run 'criteo' has no such pod: got --pod 'x'; allowed: {NAME}-0-x0y, {NAME}-1-x1y"),
    ],
    ids=["rank", "pod"],
)
def test_an_unknown_pod_is_refused_with_the_allowed_ones(
    two: tuple[str, str], command: Command, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert command("logs", *words) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_job_or_pods_is_an_error(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("logs") == 2
    assert "run 'criteo' has no job in namespace 'training'" in capsys.readouterr().err
    job(cluster)
    assert command("logs") == 2
    assert "has no pods. The reason: python -m workloads status" in capsys.readouterr().err
