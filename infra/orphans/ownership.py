"""Whose the found resources are: this state's, another state's, or those of an update that is running."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.automation import State
from infra.findings.orphans import Leftover

#: Google's APIs return an id with or without its endpoint.
_ENDPOINT = re.compile(r"^(https:)?//[\w.-]+\.googleapis\.com/(compute/)?(v1/)?")


@dataclass(frozen=True)
class Reason:
    """Why no command is printed: in a table's cell, and as a line with the next command."""

    short: str
    text: str


def not_in_state(found: Iterable[Leftover], resources: Sequence[Mapping[str, Any]]) -> list[Leftover]:
    """Return what the state does not know, each once."""
    known = {normalize(text) for resource in resources for text in _identifiers(resource)}
    return [item for item in dict.fromkeys(found) if known.isdisjoint(map(normalize, (item.id, *item.aliases)))]


def reasons(
    stack: str,
    states: tuple[State, State],
    unknown: Iterable[Leftover],
    unlisted: Sequence[str],
    *,
    is_only_state: bool,
) -> list[Reason]:
    """Return the reasons to print no command; `states` were read before and after the search.

    Two stacks of one name, in two backends, have the same tags. A cluster that is in no state and not being deleted is
    therefore the other one's, and so may be all else that was found. `unlisted` are the kinds that show a cluster and
    could not be listed.
    """
    first, last = states
    found: list[Reason] = []
    if first.is_updating or last.is_updating or first.resources != last.resources:
        text = (
            f"no commands: an update of stack {stack} is running or was interrupted, and its resources may not be in "
            f"the state yet. Fix: wait until it ends; if it was interrupted: python -m infra refresh --stack {stack}"
        )
        found.append(Reason("an update is running", text))
    if not is_only_state:
        evidence = _evidence(last, unknown, unlisted)
        if evidence:
            found.append(Reason("another state may own it", _explain(stack, last, evidence)))
    return found


def without_commands(items: Sequence[Leftover], found: Sequence[Reason]) -> list[Leftover]:
    """Return the same resources without commands."""
    return [item.without_command(found[0].short) for item in items]


def _evidence(state: State, unknown: Iterable[Leftover], unlisted: Sequence[str]) -> str:
    """Return what shows that another state may own the resources, empty if nothing does."""
    for item in unknown:
        if item.live == "cluster":
            return f"cluster {item.id} is not in the state"
        # After a `destroy` a bucket may stay on purpose.
        is_expected = bool(state.resources) or (state.was_deployed and item.kept)
        if item.live == "bucket" and not is_expected:
            return f"the state is empty, but bucket {item.id} exists"
    return f"it is unknown whether a cluster exists ({', '.join(unlisted)} not checked)" if unlisted else ""


def _explain(stack: str, state: State, evidence: str) -> str:
    again = f"python -m infra orphans --stack {stack} --only-state"
    return (
        f"no commands: {evidence}; the stack may be up in another state backend than {state.backend}. "
        f"Fix: compare `pulumi whoami -v` and PULUMI_BACKEND_URL with those of everyone who runs stack {stack}; "
        f"if no other backend has it: {again}"
    )


def _identifiers(resource: Mapping[str, Any]) -> list[str]:
    """Return the identifiers of a resource of the state."""
    outputs = resource.get("outputs") or {}
    values = [resource.get("id"), *(outputs.get(key) for key in ("arn", "id", "selfLink"))]
    return [value for value in values if isinstance(value, str) and value]


def normalize(identifier: str) -> str:
    """Return an identifier as it is compared: Azure ignores its case, Google omits its endpoint."""
    return _ENDPOINT.sub("", identifier).lower()
