"""The clouds' notices are heard, whatever else their metadata servers answer."""

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
GOES: dict[str, tuple[Any, str]] = {
    "aws": ("instance-action", "AWS will terminate this instance at 2030-01-01T00:00:00Z"),
    "azure": ([PREEMPT], "Azure announces Preempt of gpu_3 for Mon, 19 Nov 2030 18:29:47 GMT"),
    "gcp": ("preempted", "Google Cloud preempts this instance"),
}
STAYS: dict[str, list[Any]] = {
    "aws": [None],
    "azure": [None, [PREEMPT | {"Resources": ["gpu_2"]}], [PREEMPT | {"EventType": "Freeze"}]],
    "gcp": [None],
}
WISE: dict[str, str] = {"aws": "rebalance", "gcp": "TERMINATE_ON_HOST_MAINTENANCE"}


def config(server: MetadataServer, kind: str = "auto") -> FaultConfig:
    return FaultConfig(notices=kind, notices_endpoint=server.url, notices_poll_seconds=0.02)


def look(server: MetadataServer, kind: str) -> Notice | None:
    cloud = find_cloud(config(server, kind))
    assert cloud is not None
    return cloud.read()


@pytest.mark.parametrize("cloud", GOES)
def test_a_notice_says_that_the_machine_goes(cloud: str) -> None:
    notice, text = GOES[cloud]
    with MetadataServer(cloud, notice) as server:
        assert look(server, cloud) == Notice(text, terminates=True)


@pytest.mark.parametrize(("cloud", "notice"), [(c, n) for c, notices in STAYS.items() for n in notices])
def test_no_notice_or_one_of_another_machine_says_nothing(cloud: str, notice: Any) -> None:
    with MetadataServer(cloud, notice) as server:
        assert look(server, cloud) is None


@pytest.mark.parametrize("cloud", WISE)
def test_what_may_come_later_is_only_a_reason_to_save(cloud: str) -> None:
    with MetadataServer(cloud, WISE[cloud]) as server:
        found = look(server, cloud)
    assert found is not None
    assert not found.terminates


@pytest.mark.parametrize("cloud", GOES)
def test_auto_finds_out_which_cloud_this_is(cloud: str) -> None:
    with MetadataServer(cloud) as server:
        assert type(find_cloud(config(server))).__name__.lower() == cloud


def test_auto_without_a_metadata_server_watches_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with MetadataServer("none", ill="404") as server:
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


@pytest.mark.parametrize("ill", ["500", "401", "slow"])
def test_a_server_that_refuses_is_asked_on_and_told_once(ill: str, caplog: pytest.LogCaptureFixture) -> None:
    heard: queue.Queue[Notice] = queue.Queue()
    with MetadataServer("gcp", "preempted", ill=ill) as server:
        watch = NoticeWatcher(config(server, "gcp"), heard.put)
        with caplog.at_level(logging.WARNING):
            watch.start()
            while len(server.requests) < (1 if ill == "slow" else 5):
                pass
            assert heard.empty()
            server.ill = None
            assert heard.get(timeout=30).terminates
        watch.close()
    assert caplog.text.count("gives no answer") == 1, "one line per poll would fill a log in a night"


def test_a_notice_is_heard_once_however_often_it_is_read() -> None:
    heard: queue.Queue[Notice] = queue.Queue()
    with MetadataServer("gcp", "preempted") as server:
        watch = NoticeWatcher(config(server, "gcp"), heard.put)
        watch.start()
        heard.get(timeout=30)
        seen = len(server.requests)
        while len(server.requests) < seen + 4:
            pass
        watch.close()
    assert heard.empty()


def test_a_run_saves_and_goes_on_a_notice(machines: Machines) -> None:
    machines.changes = {"train.steps": 2000, "metrics.log_every": 1, "fault.save_if_older_seconds": 0}
    slow = {rank: {"kind": "slow_steps", "seconds": 0.05} for rank in range(2)}
    with MetadataServer("aws") as server:
        run = machines.start(2, slow, **watched(server, "aws"))
        run.wait_for("train", step=3)
        server.notice = "instance-action"
        assert run.wait(help_along=False) == [75, 75], run.log.read_text()[-3000:]
    (gone,) = (e for e in run.events() if e["event"] == "preempted")
    assert gone["because"].startswith("AWS will terminate")
    assert gone["saved_step"] == gone["step"]


def test_a_run_saves_and_stays_where_a_notice_only_recommends_it(machines: Machines) -> None:
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
