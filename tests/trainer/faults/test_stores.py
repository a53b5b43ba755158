"""Checkpoints in the three clouds' object stores, which stumble: requests are made again, and nothing half-written
counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fsspec
import pytest
from small_jobs import main_here
from stores import SERVERS, Bucket
from unreliable import Trouble

from trainer.checkpoint import open_store
from trainer.config import CheckpointConfig

QUICK = {"checkpoint.request_timeout_seconds": 1, "checkpoint.attempts": 4, "checkpoint.every_minutes": 0}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with SERVERS[request.param]() as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A folder of its own in that server's bucket."""
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    server.proxy.trouble = None
    server.proxy.log.clear()
    folder = "".join(c if c.isalnum() else "-" for c in request.node.name)
    with ExitStack() as stack:
        for protocol in ("s3", "gs", "abfs"):
            kind = fsspec.get_filesystem_class(protocol)
            kind.clear_instance_cache()
            stack.callback(kind.clear_instance_cache)
        yield Bucket(f"{server.uri}/{folder}", server.environ, server.proxy)


class Runs:
    """Runs of the trainer in this process, against a bucket."""

    def __init__(self, bucket: Bucket, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self.bucket, self._tmp, self._capsys = bucket, tmp_path, capsys

    def train(self, steps: int, uri: str | None = None, **changes: Any) -> list[dict[str, Any]]:
        """Events of `train --train.steps STEPS`, which must succeed."""
        tree = QUICK | {"checkpoint.uri": uri or self.bucket.uri, "metrics.dir": str(self._tmp / "logs")}
        tree |= {name.replace("__", "."): value for name, value in changes.items()}
        self._capsys.readouterr()
        code = main_here(self._tmp, "train", f"--train.steps={steps}", changes=tree)
        out, err = self._capsys.readouterr()
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def complete(self) -> list[int]:
        return open_store(self.bucket.uri, "a", CheckpointConfig(request_timeout_seconds=5)).complete_steps()


@pytest.fixture
def runs(bucket: Bucket, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(bucket, tmp_path, capsys)


def loss(events: list[dict[str, Any]]) -> float:
    return next(e["loss"] for e in events if e["event"] == "result")


def test_a_run_saves_lists_resumes_and_keeps_what_it_should(runs: Runs, tmp_path: Any) -> None:
    whole = loss(runs.train(8, str(tmp_path / "local")))
    runs.train(5, checkpoint__every_steps=1, checkpoint__asynchronous=False)
    assert runs.complete() == [4, 5], "checkpoint.keep is 2"
    again = runs.train(8)
    assert [e["step"] for e in again if e["event"] == "resume"] == [5]
    assert loss(again) == whole, "the store changed the run"
    assert runs.complete() == [5, 8]


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble("500", 3),
        Trouble("503", 6),  # what S3 says when it wants fewer requests
        Trouble("429", 6),  # what Google Cloud Storage says then
        Trouble("silent", 2, ("PUT", "POST")),
        Trouble("cut", 3, ("PUT", "POST")),
        Trouble("500", 25, ("PUT", "POST")),  # more than the clients themselves put up with
    ],
    ids=lambda t: f"{t.kind}-x{t.times}",
)
def test_a_save_gets_through_trouble(trouble: Trouble, runs: Runs) -> None:
    runs.bucket.proxy.trouble = Trouble(trouble.kind, trouble.times, trouble.methods)
    runs.train(4, checkpoint__attempts=10)
    assert runs.bucket.proxy.met() >= min(trouble.times, 2), "the trouble never came"
    runs.bucket.proxy.trouble = None
    assert runs.complete() == [4]
    assert [e["step"] for e in runs.train(5) if e["event"] == "resume"] == [4]


@pytest.mark.parametrize("kind", ["500", "silent", "cut_answer"])
def test_a_resume_gets_through_trouble(kind: str, runs: Runs) -> None:
    runs.train(4)
    runs.bucket.proxy.trouble = Trouble(kind, 2, ("GET",))
    events = runs.train(6, checkpoint__attempts=10)
    assert runs.bucket.proxy.met() == 2
    assert [e["step"] for e in events if e["event"] == "resume"] == [4], "trouble on the way is no damage"


def test_an_outage_during_saves_costs_those_saves_and_not_the_run(runs: Runs) -> None:
    runs.train(2)
    runs.bucket.proxy.trouble = Trouble("403", 10_000, ("PUT", "POST"))
    events = runs.train(6, checkpoint__every_steps=2, checkpoint__max_failures=100, **LIFTED)
    failed = [e for e in events if e["event"] == "checkpoint_failed"]
    assert failed, "no save met the outage"
    assert runs.complete()[-1] == 6, "once the store answered again, the last save was to come through"


LIFTED: dict[str, Any] = {"checkpoint__attempts": 1}
