"""Turns the engine's events into progress: one line for each completed step, and the steps in progress."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pulumi.automation import EngineEvent
from pulumi.automation.events import DiagnosticEvent, PolicyEvent, StepEventMetadata

#: The words for an operation in progress and for a completed one; operations that are missing here change nothing.
_ACTIONS = {
    "create": ("creating", "created"),
    "update": ("updating", "updated"),
    "delete": ("deleting", "deleted"),
    "create-replacement": ("replacing", "replaced"),
    "delete-replaced": ("deleting original", "deleted original"),
    "read": ("reading", "read"),
    "import": ("importing", "imported"),
    "import-replacement": ("re-importing", "re-imported"),
    "discard": ("discarding", "discarded"),
}
_PLANNED = {"create-replacement": "replace", "import-replacement": "replace"}
#: Operations without a line in a plan: the second step of a replacement, and reads.
_NOT_PLANNED = {"delete-replaced", "read"}
_COLOUR = re.compile(r"<\{%[^%]*%\}>")


@dataclass(frozen=True)
class Step:
    """One action on one resource; `seconds` is None in a plan."""

    action: str
    type: str
    name: str
    seconds: float | None = None
    failed: bool = False

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f"  {self.seconds:.1f} s"
        return f"{self.action:<17} {self.type}  {self.name}{duration}"


@dataclass(frozen=True)
class Diagnostic:
    """An error that the engine, a provider or a policy reported, with the resource that it is about."""

    message: str
    type: str = ""
    name: str = ""
    urn: str = ""

    @property
    def is_from_program(self) -> bool:
        """Return whether it is about the program instead of a resource."""
        return self.type in {"", "pulumi:pulumi:Stack"}


@dataclass
class Progress:
    """The progress of one operation; it passes each line for the user to `log`."""

    planning: bool
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    running: dict[str, tuple[Step, float]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    errors: list[Diagnostic] = field(default_factory=list)
    violations: list[Diagnostic] = field(default_factory=list)
    num_unchanged: int = 0
    in_trace: bool = False

    def event(self, event: EngineEvent) -> None:
        """Process one event; called from the thread that receives them."""
        if event.resource_pre_event:
            self._start(event.resource_pre_event.metadata)
        elif event.res_outputs_event:
            self._finish(event.res_outputs_event.metadata, failed=False)
        elif event.res_op_failed_event:
            self._finish(event.res_op_failed_event.metadata, failed=True)
        elif event.diagnostic_event:
            self._report_message(event.diagnostic_event)
        elif event.policy_event:
            self._report_violation(event.policy_event)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of completed, or planned, steps by action."""
        return dict(Counter(step.action for step in self.steps if not step.failed))

    def summary(self, seconds: float) -> str:
        """Return the last line: totals and time."""
        parts = [f"{count} {'to ' if self.planning else ''}{action}" for action, count in self.counts.items()]
        failed = sum(step.failed for step in self.steps)
        parts += [f"{failed} failed"] if failed else []
        parts += [f"{self.num_unchanged} unchanged"] if self.num_unchanged else []
        return f"{', '.join(parts) or 'nothing to do'} in {seconds:.1f} s"

    def _start(self, step: StepEventMetadata) -> None:
        kind = str(step.op.value)
        if kind == "same":
            self.num_unchanged += not _is_internal(step.urn)
        if kind not in _ACTIONS or _is_internal(step.urn):
            return
        if not self.planning:
            self.running[step.urn] = (Step(_ACTIONS[kind][0], *_type_and_name(step.urn)), self.clock())
        elif kind not in _NOT_PLANNED:
            self._add(Step(_PLANNED.get(kind, kind), *_type_and_name(step.urn)))

    def _finish(self, step: StepEventMetadata, *, failed: bool) -> None:
        kind = str(step.op.value)
        started, since = self.running.pop(step.urn, (None, self.clock()))
        if self.planning or kind not in _ACTIONS or _is_internal(step.urn):
            return
        # Component resources have no start event of their own; a refresh reports its result only at the end.
        seconds = self.clock() - since if started else 0.0
        action = f"FAILED {_ACTIONS[kind][0]}" if failed else _ACTIONS[kind][1]
        self._add(Step(action, *_type_and_name(step.urn), seconds, failed))

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self.log(str(step))

    def _report_message(self, event: DiagnosticEvent) -> None:
        text = _COLOUR.sub("", event.message).strip()
        if event.ephemeral or not text:
            return
        if event.severity == "error":
            self.errors.append(Diagnostic(text, *_type_and_name(event.urn or ""), event.urn or ""))
            return
        if event.severity not in {"warning", "info", "info#err"}:
            return
        # A program that Ctrl-C or a policy stops prints a trace line by line; it does not help the user.
        self.in_trace = self.in_trace or text.startswith("Traceback (most recent call last)")
        if not self.in_trace:
            self.log(f"{'warning: ' if event.severity == 'warning' else ''}{text}")

    def _report_violation(self, event: PolicyEvent) -> None:
        text = _COLOUR.sub("", event.message).strip()
        kind, name = _type_and_name(event.resource_urn or "")
        if event.enforcement_level == "mandatory":
            self.violations.append(Diagnostic(f"{event.policy_name}: {text}", kind, name))
        else:
            self.log(f"warning: policy {event.policy_name}: {kind} {name}: {text}")


def _type_and_name(urn: str) -> tuple[str, str]:
    """Return type and name of a resource from its URN, `urn:pulumi:stack::project::parent$type::name`."""
    parts = urn.split("::", 3)
    return (parts[2].rpartition("$")[2], parts[3]) if len(parts) == 4 else ("", "")


def _is_internal(urn: str) -> bool:
    """Return whether it is the stack itself, or a default provider that the engine created."""
    kind, name = _type_and_name(urn)
    return kind == "pulumi:pulumi:Stack" or (kind.startswith("pulumi:providers:") and name.startswith("default"))
