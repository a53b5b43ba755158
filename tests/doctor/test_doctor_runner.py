"""How checks are run: side by side, in time, each after what it needs, and what is shown meanwhile."""

from __future__ import annotations

import io
import threading

import pytest

from infra.doctor import runner
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import Cause, Check, Finding, QueryFailedError, ok, problem


def run(*checks: Check) -> dict[str, Finding]:
    return {item.check: item for item in runner.run(checks, "test", io.StringIO())}


def test_checks_run_side_by_side_and_are_told_in_the_order_given() -> None:
    meeting = threading.Barrier(2, timeout=20)

    def meet() -> Finding:
        meeting.wait()
        return ok("met")

    found = runner.run([Check("one", meet), Check("two", meet)], "test", io.StringIO())
    assert [(item.check, item.result) for item in found] == [("one", "met"), ("two", "met")]


def test_a_check_that_takes_too_long_is_given_up_and_the_others_are_told() -> None:
    never = threading.Event()
    found = run(Check("slow", lambda: (never.wait(60), ok("late"))[1], seconds=0.2), Check("quick", lambda: ok("fine")))
    never.set()
    assert (found["slow"].status, found["slow"].cause) == ("unknown", SLOW.key)
    assert found["quick"].status == "ok"


@pytest.mark.parametrize("first", [problem(NO_CLIENT, "x"), None], ids=["a problem", "no answer"])
def test_what_needs_a_check_that_failed_is_left_out(first: Finding | None) -> None:
    def who() -> Finding:
        if first is None:
            raise QueryFailedError(NO_CLIENT, "missing")
        return first

    found = run(Check("who", who), Check("then", lambda: pytest.fail("asked"), needs="who"))
    assert found["then"].status == "skipped"
    assert "'who'" in found["then"].result


def test_a_check_that_is_broken_costs_its_own_row_alone() -> None:
    def broken() -> Finding:
        raise KeyError("state")

    found = run(Check("broken", broken), Check("well", lambda: ok("fine")))
    assert found["broken"].status == "unknown"
    assert found["broken"].result == "KeyError: 'state'"
    assert found["well"].status == "ok"


def test_without_a_terminal_what_is_going_on_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_blanks_of_a_cure_are_filled_for_a_case_and_named_for_a_guide() -> None:
    cause = Cause("k", "sign", "why", "ask for {value} of {metric}")
    assert problem(cause, "r", value=8, metric="GPUS").fix == "ask for 8 of GPUS"
    assert cause.generic_fix == "ask for <value> of <metric>"
