"""From the engine's events to what a person follows: one line for each thing done, and what is being done now."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pulumi.automation import EngineEvent
from pulumi.automation.events import DiagnosticEvent, PolicyEvent, StepEventMetadata

#: The engine's operations: what is under way, what is done; those that are not here change nothing.
_WORDS = {
    "create": ("creating", "created"),
    "update": ("updating", "updated"),
    "delete": ("deleting", "deleted"),
    "create-replacement": ("creating anew", "created anew"),
    "delete-replaced": ("deleting the old", "deleted the old"),
    "read": ("reading", "read"),
    "import": ("importing", "imported"),
    "import-replacement": ("importing anew", "imported anew"),
    "discard": ("forgetting", "forgotten"),
}
_PLANNED = {"create-replacement": "replace", "import-replacement": "replace"}
#: One of two steps of a replacement: not a line of a plan of its own.
_NOT_PLANNED = {"delete-replaced", "read"}
_COLOUR = re.compile(r"<\{%[^%]*%\}>")


@dataclass(frozen=True)
class Step:
    """One resource and what is done to it; `seconds` is None for a plan."""

    action: str
    type: str
    name: str
    seconds: float | None = None
    failed: bool = False

    def __str__(self) -> str:
        took = "" if self.seconds is None else f"  {self.seconds:.1f} s"
        return f"{self.action:<17} {self.type}  {self.name}{took}"


@dataclass(frozen=True)
class Complaint:
    """An error that the engine, a provider or a policy reported, with the resource that it is about."""

    message: str
    type: str = ""
    name: str = ""

    @property
    def of_program(self) -> bool:
        """Whether it is about no resource in particular."""
        return self.type in {"", "pulumi:pulumi:Stack"}


@dataclass
class Progress:
    """What has happened in one operation; `say` gets each line that is worth one."""

    planning: bool
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    running: dict[str, tuple[Step, float]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    complaints: list[Complaint] = field(default_factory=list)
    violations: list[Complaint] = field(default_factory=list)
    num_unchanged: int = 0
    in_trace: bool = False

    def event(self, event: EngineEvent) -> None:
        """Take in one event; called from the thread that receives them."""
        if event.resource_pre_event:
            self._begins(event.resource_pre_event.metadata)
        elif event.res_outputs_event:
            self._ends(event.res_outputs_event.metadata, failed=False)
        elif event.res_op_failed_event:
            self._ends(event.res_op_failed_event.metadata, failed=True)
        elif event.diagnostic_event:
            self._message(event.diagnostic_event)
        elif event.policy_event:
            self._policy(event.policy_event)

    @property
    def counts(self) -> dict[str, int]:
        """How often each action was done (or is planned)."""
        return dict(Counter(step.action for step in self.steps if not step.failed))

    def summary(self, seconds: float) -> str:
        """The last line: totals and time."""
        parts = [f"{count} {'to ' if self.planning else ''}{action}" for action, count in self.counts.items()]
        failed = sum(step.failed for step in self.steps)
        parts += [f"{failed} failed"] if failed else []
        parts += [f"{self.num_unchanged} unchanged"] if self.num_unchanged else []
        return f"{', '.join(parts) or 'nothing to do'} in {seconds:.1f} s"

    def _begins(self, step: StepEventMetadata) -> None:
        kind = str(step.op.value)
        if kind == "same":
            self.num_unchanged += not _is_own(step.urn)
        if kind not in _WORDS or _is_own(step.urn):
            return
        if not self.planning:
            self.running[step.urn] = (Step(_WORDS[kind][0], *_named(step.urn)), self.clock())
        elif kind not in _NOT_PLANNED:
            self._add(Step(_PLANNED.get(kind, kind), *_named(step.urn)))

    def _ends(self, step: StepEventMetadata, *, failed: bool) -> None:
        kind = str(step.op.value)
        begun, since = self.running.pop(step.urn, (None, self.clock()))
        if self.planning or kind not in _WORDS or _is_own(step.urn):
            return
        # The resources of a component program end as they begin; a refresh tells what it found only at the end.
        seconds = self.clock() - since if begun else 0.0
        action = f"FAILED {_WORDS[kind][0]}" if failed else _WORDS[kind][1]
        self._add(Step(action, *_named(step.urn), seconds, failed))

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self.say(str(step))

    def _message(self, event: DiagnosticEvent) -> None:
        text = _COLOUR.sub("", event.message).strip()
        if event.ephemeral or not text:
            return
        if event.severity == "error":
            self.complaints.append(Complaint(text, *_named(event.urn or "")))
            return
        if event.severity not in {"warning", "info", "info#err"}:
            return
        # A program that is stopped, on Ctrl-C or by a policy, dies with a trace that says nothing: line by line.
        self.in_trace = self.in_trace or text.startswith("Traceback (most recent call last)")
        if not self.in_trace:
            self.say(f"{'warning: ' if event.severity == 'warning' else ''}{text}")

    def _policy(self, event: PolicyEvent) -> None:
        text = _COLOUR.sub("", event.message).strip()
        kind, name = _named(event.resource_urn or "")
        if event.enforcement_level == "mandatory":
            self.violations.append(Complaint(f"{event.policy_name}: {text}", kind, name))
        else:
            self.say(f"warning: policy {event.policy_name}: {kind} {name}: {text}")


def _named(urn: str) -> tuple[str, str]:
    """Type and name of a resource: `urn:pulumi:stack::project::parent$type::name`."""
    parts = urn.split("::", 3)
    return (parts[2].rpartition("$")[2], parts[3]) if len(parts) == 4 else ("", "")


def _is_own(urn: str) -> bool:
    """The stack itself, or a provider that the engine made because the program named none: nobody's resource."""
    kind, name = _named(urn)
    return kind == "pulumi:pulumi:Stack" or (kind.startswith("pulumi:providers:") and name.startswith("default"))
