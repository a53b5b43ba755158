"""Spot interruption notices of the clouds, and metadata servers that fail."""

from __future__ import annotations

import logging
import queue
from typing import Any

import pytest
from machines import Machines
from metadata import MetadataServer

from trainer.config import FaultConfig
from trainer.runtime.spot_notices import Notice, NoticeWatcher, find_cloud

PREEMPT = {"EventType": "Preempt", "Resources": ["gpu_2", "gpu_3"], "NotBefore": "Mon, 19 Nov 2030 18:29:47 GMT"}
TERMINATES: dict[str, tuple[Any, str]] = {
    "aws": ("instance-action", "AWS will terminate this instance at 2030-01-01T00:00:00Z"),
    "azure": ([PREEMPT], "Azure announces Preempt of gpu_3 for Mon, 19 Nov 2030 18:29:47 GMT"),
    "gcp": ("preempted", "Google Cloud preempts this instance"),
}
NO_NOTICE: dict[str, list[Any]] = {
    "aws": [None],
    "azure": [None, [PREEMPT | {"Resources": ["gpu_2"]}], [PREEMPT | {"EventType": "Freeze"}]],
    "gcp": [None],
}
RECOMMENDS_SAVE: dict[str, str] = {"aws": "rebalance", "gcp": "TERMINATE_ON_HOST_MAINTENANCE"}


def config(server: MetadataServer, kind: str = "auto") -> FaultConfig:
    return FaultConfig(notices=kind, notices_endpoint=server.url, notices_poll_seconds=0.02)


def read(server: MetadataServer, kind: str) -> Notice | None:
    cloud = find_cloud(config(server, kind))
    assert cloud is not None
    return cloud.read()


@pytest.mark.parametrize("cloud", TERMINATES)
def test_an_interruption_notice_terminates_the_machine(cloud: str) -> None:
    notice, text = TERMINATES[cloud]
    with MetadataServer(cloud, notice) as server:
        assert read(server, cloud) == Notice(text, terminates=True)


@pytest.mark.parametrize(("cloud", "notice"), [(c, n) for c, notices in NO_NOTICE.items() for n in notices])
def test_no_notice_and_one_of_another_machine_are_ignored(cloud: str, notice: Any) -> None:
    with MetadataServer(cloud, notice) as server:
        assert read(server, cloud) is None


@pytest.mark.parametrize("cloud", RECOMMENDS_SAVE)
def test_an_early_warning_only_recommends_a_save(cloud: str) -> None:
    with MetadataServer(cloud, RECOMMENDS_SAVE[cloud]) as server:
        notice = read(server, cloud)
    assert notice is not None
    assert not notice.terminates


@pytest.mark.parametrize("cloud", TERMINATES)
def test_auto_detects_the_cloud(cloud: str) -> None:
    with MetadataServer(cloud) as server:
        assert type(find_cloud(config(server))).__name__.lower() == cloud


def test_auto_without_a_metadata_server_logs_that_nothing_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    with MetadataServer("none", fault="404") as server:
        assert find_cloud(config(server)) is None
    assert "no metadata server answers" in caplog.text


def test_an_expired_token_is_renewed() -> None:
    with MetadataServer("aws", "instance-action") as server:
        cloud = find_cloud(config(server, "aws"))
        assert cloud is not None
        assert cloud.read() is not None
        server.tokens = set()
        server.requests.clear()
        assert cloud.read() is not None
        assert server.requests.count("PUT /latest/api/token") == 1


@pytest.mark.parametrize("fault", ["500", "401", "slow"])
def test_a_failing_server_is_polled_again_and_logged_once(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    handled: queue.Queue[Notice] = queue.Queue()
    with MetadataServer("gcp", "preempted", fault=fault) as server:
        watcher = NoticeWatcher(config(server, "gcp"), handled.put)
        with caplog.at_level(logging.WARNING):
            watcher.start()
            while len(server.requests) < (1 if fault == "slow" else 5):
                pass
            assert handled.empty()
            server.fault = None
            assert handled.get(timeout=30).terminates
        watcher.close()
    assert caplog.text.count("gives no answer") == 1, "one line per poll would fill a log in a night"


def test_a_notice_is_handled_only_once() -> None:
    handled: queue.Queue[Notice] = queue.Queue()
    with MetadataServer("gcp", "preempted") as server:
        watcher = NoticeWatcher(config(server, "gcp"), handled.put)
        watcher.start()
        handled.get(timeout=30)
        seen = len(server.requests)
        while len(server.requests) < seen + 4:
            pass
        watcher.close()
    assert handled.empty()


def test_a_run_saves_and_stops_on_an_interruption_notice(machines: Machines) -> None:
    machines.changes = {"train.steps": 2000, "metrics.log_every": 1, "fault.save_if_older_seconds": 0}
    slow = {rank: {"kind": "slow_steps", "seconds": 0.05} for rank in range(2)}
    with MetadataServer("aws") as server:
        run = machines.start(2, slow, **watched(server, "aws"))
        run.wait_for("train", step=3)
        server.notice = "instance-action"
        assert run.wait(help_along=False) == [75, 75], run.log.read_text()[-3000:]
    (preempted,) = (e for e in run.events() if e["event"] == "preempted")
    assert preempted["because"].startswith("AWS will terminate")
    assert preempted["saved_step"] == preempted["step"]


def test_a_run_saves_and_continues_when_a_notice_recommends_a_save(machines: Machines) -> None:
    machines.changes = {"train.steps": 60, "metrics.log_every": 1, "checkpoint.every_minutes": 0}
    slow = {0: {"kind": "slow_steps", "seconds": 0.05}}
    with MetadataServer("aws", "rebalance") as server:
        run = machines.start(1, slow, **watched(server, "auto"))
        assert run.wait() == [0], run.log.read_text()[-3000:]
    saves = [e["step"] for e in run.events() if e["event"] == "checkpoint"]
    assert len(saves) == 2, f"one on the recommendation and one at the end: {saves}"


def watched(server: MetadataServer, kind: str) -> dict[str, Any]:
    return {
        "fault__notices": kind,
        "fault__notices_endpoint": server.url,
        "fault__notices_poll_seconds": 0.05,
    }
