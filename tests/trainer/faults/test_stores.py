"""Checkpoints in the object stores of three clouds that fail: requests are retried, partial saves are ignored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest
from small_jobs import main_here, tiny_tree, trainer
from stores import SERVERS, Bucket, shorten_client_delays
from unreliable import Proxy, Trouble

from trainer.bench.measures.uploads import PAIRS
from trainer.checkpoint import open_store
from trainer.checkpoint.requests import StoreUnavailableError
from trainer.config import CheckpointConfig
from trainer.storage import retry
from trainer.storage.retry import RetryPolicy
from trainer.training import loop as train

QUICK = {"checkpoint.request_timeout_seconds": 1, "checkpoint.attempts": 4, "checkpoint.every_minutes": 0}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with SERVERS[request.param]() as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """Return a folder of the test in that server's bucket."""
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "STORE_RETRY", RetryPolicy(first_delay_seconds=0.01, max_delay_seconds=0.1))
    shorten_client_delays(monkeypatch)
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
        """Run `train --train.steps STEPS`, which must succeed, and return its events."""
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


def test_a_run_saves_lists_resumes_and_deletes_checkpoints(runs: Runs, tmp_path: Any) -> None:
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
        Trouble("503", 3),  # S3 throttles
        Trouble("429", 3),  # Google Cloud Storage throttles
        Trouble("silent", 2, ("PUT", "POST")),
        Trouble("cut", 3, ("PUT", "POST")),
        Trouble("500", 25, ("PUT", "POST")),  # more than the clients retry by themselves
    ],
    ids=lambda t: f"{t.kind}-x{t.times}",
)
def test_a_save_survives_failing_requests(trouble: Trouble, runs: Runs) -> None:
    if trouble.times > 10 and "s3" not in runs.bucket.uri:
        pytest.skip("this case tests code that all stores share, and these clients would wait for minutes")
    runs.bucket.proxy.trouble = Trouble(trouble.kind, trouble.times, trouble.methods)
    runs.train(4, checkpoint__attempts=10)
    assert runs.bucket.proxy.met() >= min(trouble.times, 2), "no request failed"
    runs.bucket.proxy.trouble = None
    assert runs.complete() == [4]
    assert [e["step"] for e in runs.train(5) if e["event"] == "resume"] == [4]


@pytest.mark.parametrize("kind", ["500", "silent", "cut_answer"])
def test_a_resume_survives_failing_requests(kind: str, runs: Runs) -> None:
    runs.train(4)
    runs.bucket.proxy.trouble = Trouble(kind, 2, ("GET",))
    events = runs.train(6, checkpoint__attempts=10)
    assert runs.bucket.proxy.met() == 2
    assert [e["step"] for e in events if e["event"] == "resume"] == [4], (
        "a failing request must not count as a damaged checkpoint"
    )


def test_an_outage_fails_those_saves_and_not_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = runs.bucket.proxy
    proxy.trouble = Trouble("500", 10_000, ("PUT", "POST"))
    monkeypatch.setattr(train.TrainingRun, "_step", end_faults_before(proxy, step=5))
    events = runs.train(
        6, checkpoint__every_steps=2, checkpoint__asynchronous=False, checkpoint__attempts=1, checkpoint__max_failures=9
    )
    assert [e["step"] for e in events if e["event"] == "checkpoint_failed"] == [2, 4]
    assert runs.complete() == [6], "a partial save must be neither complete nor left behind"


def end_faults_before(proxy: Proxy, step: int) -> Any:
    """Return a training step that ends all faults before `step`."""
    original = train.TrainingRun._step

    def with_end(self: Any, *arguments: Any) -> None:
        if self.progress.step == step - 1:
            proxy.trouble = None
        original(self, *arguments)

    return with_end


def commit_error(bucket: Bucket, attempts: int, seconds: int) -> str:
    """Return the error of a commit to a store that keeps failing."""
    bucket.proxy.log.clear()
    config = CheckpointConfig(attempts=attempts, request_timeout_seconds=seconds)
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(bucket.uri, "a", config).commit(1, {})
    return str(caught.value)


def test_a_failing_store_is_an_error_after_the_configured_attempts(bucket: Bucket) -> None:
    bucket.proxy.trouble = Trouble("501", 10_000)  # no client retries this status by itself
    message = commit_error(bucket, attempts=3, seconds=5)
    assert "failed 3 times" in message
    assert bucket.proxy.met() >= 3


def test_a_silent_store_is_an_error_after_the_timeout(bucket: Bucket) -> None:
    if "gs" in bucket.uri:
        pytest.skip("gcsfs retries six times before it reports an error, which takes minutes")
    bucket.proxy.trouble = Trouble("silent", 10_000)
    began = time.monotonic()
    commit_error(bucket, attempts=1, seconds=1)
    assert bucket.proxy.met() / 3 < time.monotonic() - began, "it waited for the answers, which take 3 s each"


def test_the_bench_of_saves_compares_with_one_large_file_and_deletes_both(bucket: Bucket, tmp_path: Path) -> None:
    tree = tiny_tree({"checkpoint.uri": bucket.uri})
    (tmp_path / "config.json").write_text(json.dumps(tree))
    short = ["--blocks", "1", "--steps", "2", "--warmup", "1", "--config", str(tmp_path / "config.json")]
    done = trainer("bench", "--nproc", "1", "--checkpoints", *short)
    assert done.returncode == 0, done.stderr
    upload = json.loads(done.stdout.splitlines()[-1])["upload"]
    assert upload["bytes"] > 0
    assert upload["ratio"] > 0
    assert "of one file's" in " ".join(done.stdout.split()), "the text output lacks it"
    removed = [path for method, path, _ in bucket.proxy.log if method == "DELETE" and "one-file" in path]
    assert len(removed) > PAIRS, "the other side of the comparison was not uploaded"
    fs, folder = fsspec.core.url_to_fs(bucket.uri)
    assert fs.find(folder) == [], "a bench must not fill a bucket"
