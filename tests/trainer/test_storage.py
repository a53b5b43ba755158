"""Retry policies and atomic writes, which every store and command shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.storage.atomic_write import atomic_replace, write_json, write_text
from trainer.storage.retry import RetriesExhaustedError, RetryPolicy

QUICK = RetryPolicy(attempts=4, first_delay_seconds=1, max_delay_seconds=3, jitter=0)


class Flaky:
    """An operation that fails with the given errors before it succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def run(operation: Flaky, policy: RetryPolicy = QUICK) -> tuple[str, list[Any]]:
    """Run the operation and return its result and everything that was logged and slept, in order."""
    seen: list[Any] = []

    def on_retry(error: Exception, attempt: int, delay: float) -> None:
        seen.append((str(error), attempt, delay))

    return policy.run(operation, lambda error: isinstance(error, PermissionError), on_retry, seen.append), seen


def test_delays_grow_by_the_factor_up_to_the_maximum() -> None:
    assert [QUICK.delay_seconds(failures) for failures in (1, 2, 3, 4)] == [1, 2, 3, 3]


def test_jitter_spreads_the_delays_around_the_nominal_one() -> None:
    delays = {RetryPolicy(first_delay_seconds=1, jitter=0.25).delay_seconds(1) for _ in range(200)}
    assert len(delays) > 100, "processes that were throttled together would retry together"
    assert min(delays) >= 0.75
    assert max(delays) <= 1.25


def test_an_operation_is_retried_until_it_succeeds() -> None:
    result, seen = run(Flaky(OSError("a"), OSError("b")))
    assert result == "done"
    assert seen == [("a", 2, 1), 1, ("b", 3, 2), 2]


def test_a_permanent_error_is_raised_unchanged_and_without_a_retry() -> None:
    operation = Flaky(PermissionError("no"))
    with pytest.raises(PermissionError, match="no"):
        run(operation)
    assert operation.calls == 1


def test_the_last_error_is_reported_after_the_last_attempt() -> None:
    operation = Flaky(*(OSError(str(number)) for number in range(9)))
    with pytest.raises(RetriesExhaustedError, match="3") as caught:
        run(operation)
    assert operation.calls == 4
    assert isinstance(caught.value.error, OSError)


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_replace(path) as part:
        part.write_text("new", encoding="utf-8")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail() -> None:
        with atomic_replace(path) as part:
            part.write_text("half", encoding="utf-8")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_files_are_indented_and_end_with_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "file", {"a": [1]})
    text = (tmp_path / "file").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert json.loads(text) == {"a": [1]}
