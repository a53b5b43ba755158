"""A check, what it finds, and the causes that it knows: the one list that tables of results and of guides come from."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from infra.config.settings import StackSettings

#: `unknown`: the check could not be made. `skipped`: it makes no sense here, or waits for another to be mended.
Status = Literal["ok", "problem", "unknown", "skipped"]


@dataclass(frozen=True)
class Cause:
    """One thing that goes wrong: what a person sees when nobody looked first, why, and the cure.

    `{name}` in a cure is filled in by the check that found it, and shows as `<name>` in a guide; where all of a cure
    comes from the case, `guide` is what a guide says instead.
    """

    key: str
    sign: str
    why: str
    cure: str
    guide: str = ""

    def cured(self, values: Mapping[str, object]) -> str:
        """The cure of one case."""
        return self.cure.format_map(values)

    @property
    def general(self) -> str:
        """The cure for anyone, its blanks left open."""
        if self.guide:
            return self.guide
        names = {name for _, name, _, _ in string.Formatter().parse(self.cure) if name}
        return self.cure.format_map({name: f"<{name}>" for name in names})


@dataclass(frozen=True)
class Finding:
    """One row of the result. `cause` is the key of the cause that `cure` comes from, empty where nothing is wrong."""

    status: Status
    result: str
    cure: str = ""
    cause: str = ""
    check: str = ""


class CannotAskError(Exception):
    """A question that was not answered; a row of status unknown, or a problem where a person `must_act`."""

    def __init__(self, cause: Cause, result: str, *, must_act: bool = False, **values: object) -> None:
        self.finding = (problem if must_act else unknown)(cause, result, **values)
        super().__init__(result)


def ok(result: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", result)


def problem(cause: Cause, result: str, **values: object) -> Finding:
    """Something to mend before going on."""
    return Finding("problem", result, cause.cured(values), cause.key)


def unknown(cause: Cause, result: str, **values: object) -> Finding:
    """Something that nobody could look at."""
    return Finding("unknown", result, cause.cured(values), cause.key)


def skipped(result: str) -> Finding:
    """Something that does not concern this stack, or not yet."""
    return Finding("skipped", result)


def named(check: str, found: Finding | Sequence[Finding]) -> list[Finding]:
    """What a check found, under its name."""
    listed = [found] if isinstance(found, Finding) else found
    return [replace(item, check=item.check or check) for item in listed]


@dataclass(frozen=True)
class Check:
    """One question. `needs` is the name of a check without whose `ok` this one makes no sense."""

    name: str
    run: Callable[[], Finding | Sequence[Finding]]
    needs: str | None = None
    seconds: float = 30.0


@dataclass(frozen=True)
class Context:
    """What the checks of one stack are made from.

    `values` is the raw configuration (`namespace:key` to text), `job` the section of that name, `outputs` what the
    last `up` told, None before it.
    """

    settings: StackSettings
    values: Mapping[str, str]
    job: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] | None = None

    @property
    def stack(self) -> str:
        """The stack's name."""
        return self.settings.stack


class CloudDoctor(Protocol):
    """A cloud's `doctor.py`. It imports the cloud's client in its functions only.

    `CAUSES` are those of this cloud, `PACKAGES` the Pulumi SDKs that its program loads.
    """

    CAUSES: Sequence[Cause]
    PACKAGES: Sequence[str]

    def checks(self, context: Context) -> Sequence[Check]:
        """What to ask the cloud; the first is who is asking, and the others need it."""

    def devices(self, settings: Any) -> Mapping[str, int]:
        """What Kubernetes must advertise on one GPU node beside GPUs: the fabric's devices."""

    def login(self, context: Context, host: str) -> tuple[str, str] | None:
        """User and password for a registry of this cloud; None for another's."""
