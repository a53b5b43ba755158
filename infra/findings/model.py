"""Checks, findings and causes: both the result table and the guides' tables are generated from them."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from infra.config.settings import StackSettings

#: `unknown`: the check could not run. `skipped`: the check does not apply, or a check that it needs did not pass.
Status = Literal["ok", "problem", "unknown", "skipped"]


@dataclass(frozen=True)
class Cause:
    """A known failure: its symptom when no check ran first, its reason and its fix.

    The check that finds it fills in each `{name}` of the fix; a guide shows `<name>`. If the whole fix depends on the
    case, a guide shows `guide` instead. `errors` are parts of the errors of `up` and `destroy` that it explains.
    """

    key: str
    symptom: str
    reason: str
    fix: str
    guide: str = ""
    errors: tuple[str, ...] = ()

    def format_fix(self, values: Mapping[str, object]) -> str:
        """Return the fix of one case."""
        return self.fix.format_map(values)

    @property
    def generic_fix(self) -> str:
        """Return the fix with placeholders, for a guide."""
        if self.guide:
            return self.guide
        names = {name for _, name, _, _ in string.Formatter().parse(self.fix) if name}
        return self.fix.format_map({name: f"<{name}>" for name in names})


@dataclass(frozen=True)
class Finding:
    """One row of the result; `cause` is the key of the cause that `fix` comes from, empty if nothing is wrong."""

    status: Status
    result: str
    fix: str = ""
    cause: str = ""
    check: str = ""


class QueryFailedError(Exception):
    """A query without an answer; its finding has the status unknown, or problem if the user has to act."""

    def __init__(self, cause: Cause, result: str, *, is_problem: bool = False, **values: object) -> None:
        """Build the finding; `values` fill in the cause's fix."""
        self.finding = (problem if is_problem else unknown)(cause, result, **values)
        super().__init__(result)


def ok(result: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding("ok", result)


def problem(cause: Cause, result: str, **values: object) -> Finding:
    """Return a finding that the user has to fix; `values` fill in the cause's fix."""
    return Finding("problem", result, cause.format_fix(values), cause.key)


def unknown(cause: Cause, result: str, **values: object) -> Finding:
    """Return the finding of a check that could not run; `values` fill in the cause's fix."""
    return Finding("unknown", result, cause.format_fix(values), cause.key)


def skipped(result: str) -> Finding:
    """Return the finding of a check that does not apply to this stack, or not yet."""
    return Finding("skipped", result)


def with_check_name(check: str, found: Finding | Sequence[Finding]) -> list[Finding]:
    """Return the findings labelled with the name of their check."""
    listed = [found] if isinstance(found, Finding) else found
    return [replace(item, check=item.check or check) for item in listed]


@dataclass(frozen=True)
class Check:
    """A named query with a time limit; it is skipped unless the check named by `needs` is ok."""

    name: str
    run: Callable[[], Finding | Sequence[Finding]]
    needs: str | None = None
    seconds: float = 30.0


@dataclass(frozen=True)
class Context:
    """The input of one stack's checks.

    `values` is the raw configuration (`namespace:key` to text), `job` the section of that name, `outputs` the outputs
    of the last `up`, None before the first one.
    """

    settings: StackSettings
    values: Mapping[str, str]
    job: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] | None = None

    @property
    def stack(self) -> str:
        """Return the stack's name."""
        return self.settings.stack


class CloudDoctor(Protocol):
    """The interface of a cloud's `doctor.py`, which imports the cloud's client only inside its functions.

    `CAUSES` are the causes specific to this cloud, `PACKAGES` the Pulumi SDKs that its program loads.
    """

    CAUSES: Sequence[Cause]
    PACKAGES: Sequence[str]

    def checks(self, context: Context) -> Sequence[Check]:
        """Return the checks of the cloud account; the first checks the credentials, and the others need it."""

    def devices(self, settings: Any) -> Mapping[str, int]:
        """Return the fabric devices that Kubernetes must advertise on each GPU node, in addition to its GPUs."""

    def login(self, context: Context, host: str) -> tuple[str, str] | None:
        """Return user and password for a registry of this cloud, None for any other registry."""
