"""Running checks: concurrency, time limits, dependencies and progress."""

from __future__ import annotations

import io
import threading

import pytest

from infra.doctor import runner
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import Cause, Check, Finding, QueryFailedError, ok, problem


def run(*checks: Check) -> dict[str, Finding]:
    """Run checks and return the finding of each."""
    return {item.check: item for item in runner.run(checks, "test", io.StringIO())}


def test_checks_run_concurrently_and_keep_their_order_in_the_result() -> None:
    both_running = threading.Barrier(2, timeout=20)

    def meet() -> Finding:
        both_running.wait()
        return ok("met")

    found = runner.run([Check("one", meet), Check("two", meet)], "test", io.StringIO())
    assert [(item.check, item.result) for item in found] == [("one", "met"), ("two", "met")]


def test_a_check_over_its_time_limit_is_unknown_and_the_others_are_reported() -> None:
    never = threading.Event()
    found = run(Check("slow", lambda: (never.wait(60), ok("late"))[1], seconds=0.2), Check("quick", lambda: ok("fine")))
    never.set()
    assert (found["slow"].status, found["slow"].cause) == ("unknown", SLOW.key)
    assert found["quick"].status == "ok"


@pytest.mark.parametrize("first", [problem(NO_CLIENT, "x"), None], ids=["a problem", "no answer"])
def test_a_check_is_skipped_if_the_one_it_needs_failed(first: Finding | None) -> None:
    def who() -> Finding:
        if first is None:
            raise QueryFailedError(NO_CLIENT, "missing")
        return first

    found = run(Check("who", who), Check("then", lambda: pytest.fail("it ran"), needs="who"))
    assert found["then"].status == "skipped"
    assert "'who'" in found["then"].result


def test_an_exception_in_a_check_affects_only_that_check() -> None:
    def broken() -> Finding:
        raise KeyError("state")

    found = run(Check("broken", broken), Check("well", lambda: ok("fine")))
    assert found["broken"].status == "unknown"
    assert found["broken"].result == "KeyError: 'state'"
    assert found["well"].status == "ok"


def test_progress_is_printed_from_time_to_time_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PROGRESS_SECONDS", 0.0)
    stream, go = io.StringIO(), threading.Event()

    def wait() -> Finding:
        go.wait(20)
        return ok("done")

    threading.Timer(0.3, go.set).start()
    runner.run([Check("quota", wait)], "stack x", stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "stack x: 1 checks ..."
    assert lines[1].startswith("... 0 of 1 done")
    assert lines[1].endswith("now: quota")


def test_ctrl_c_does_not_wait_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.Progress, "show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Check("slow", lambda: (never.wait(60), ok("late"))[1]))
    never.set()


def test_the_placeholders_of_a_fix_are_filled_in_a_finding_and_shown_in_a_guide() -> None:
    cause = Cause("key", "symptom", "reason", "ask for {value} of {metric}")
    assert problem(cause, "r", value=8, metric="GPUS").fix == "ask for 8 of GPUS"
    assert cause.generic_fix == "ask for <value> of <metric>"
