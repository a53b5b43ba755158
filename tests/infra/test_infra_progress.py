"""Progress of an operation, from the engine's events to lines for the user."""

from __future__ import annotations

import io
from typing import Any

import pytest
from pulumi.automation import EngineEvent

from infra.automation.display import Display
from infra.automation.progress import Diagnostic, Progress

STACK = "urn:pulumi:dev::torchrec-cloud::"
VPC = STACK + "torchrec-cloud:aws:Network$aws:ec2/vpc:Vpc::aws-network-vpc"


def event(kind: str, **body: Any) -> EngineEvent:
    return EngineEvent.from_json({"sequence": 1, "timestamp": 0, kind: body})


def step(kind: str, op: str, urn: str = VPC) -> EngineEvent:
    return event(kind, metadata={"op": op, "urn": urn, "type": "t", "provider": "p"})


def diagnostic(message: str, severity: str, urn: str = VPC) -> EngineEvent:
    return event("diagnosticEvent", message=message, color="never", severity=severity, urn=urn)


def test_a_completed_step_prints_one_line_with_action_and_seconds() -> None:
    lines: list[str] = []
    times = iter([10.0, 10.0, 22.5, 22.5])
    progress = Progress(planning=False, log=lines.append, clock=lambda: next(times))
    progress.event(step("resourcePreEvent", "create"))
    assert [item.action for item, _ in progress.running.values()] == ["creating"]
    progress.event(step("resOutputsEvent", "create"))
    assert progress.running == {}
    assert lines == ["created           aws:ec2/vpc:Vpc  aws-network-vpc  12.5 s"]
    assert progress.summary(13) == "1 created in 13.0 s"


def test_a_plan_lists_a_replacement_once() -> None:
    progress = Progress(planning=True, log=lambda _: None)
    for op in ("create-replacement", "delete-replaced"):
        progress.event(step("resourcePreEvent", op))
    assert progress.counts == {"replace": 1}
    assert progress.summary(1) == "1 to replace in 1.0 s"


def test_unchanged_resources_are_counted_but_not_listed() -> None:
    lines: list[str] = []
    progress = Progress(planning=False, log=lines.append)
    progress.event(step("resourcePreEvent", "same"))
    progress.event(step("resourcePreEvent", "same", STACK + "pulumi:pulumi:Stack::torchrec-cloud-dev"))
    assert lines == []
    assert progress.summary(1) == "1 unchanged in 1.0 s", "the stack itself does not count as a resource"


def test_the_trace_of_a_stopped_program_is_not_printed() -> None:
    lines: list[str] = []
    progress = Progress(planning=False, log=lines.append)
    for text in ("hello", "Traceback (most recent call last):", '  File "x"', "KeyboardInterrupt"):
        progress.event(diagnostic(text, "info#err"))
    assert lines == ["hello"]


def test_a_failed_step_is_printed_and_its_error_kept_for_the_summary() -> None:
    lines: list[str] = []
    progress = Progress(planning=False, log=lines.append)
    progress.event(step("resourcePreEvent", "create"))
    progress.event(diagnostic("<{%reset%}>no quota<{%reset%}>", "error"))
    progress.event(step("resOpFailedEvent", "create"))
    assert lines[0].startswith("FAILED creating")
    assert progress.errors == [Diagnostic("no quota", "aws:ec2/vpc:Vpc", "aws-network-vpc", VPC)]


def test_without_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    display = Display(stream)
    with display.show("up of stack dev", Progress(planning=False, log=display.print_line)):
        display.print_line("created  a")
    assert stream.getvalue() == "up of stack dev ...\ncreated  a\n"


def test_a_terminal_shows_the_resources_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    display = Display(stream)
    progress = Progress(planning=False, log=display.print_line)
    progress.event(step("resourcePreEvent", "create"))
    with display.show("up of stack dev", progress):
        display.print_line("created  a")
    assert "created  a" in stream.getvalue()
    assert "aws-network-vpc" in stream.getvalue()
