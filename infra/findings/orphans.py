"""Resources that no state knows: what a cloud's search finds, and the interface of the searches."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from infra.findings.errors import explained
from infra.findings.model import Context


@dataclass(frozen=True)
class Leftover:
    """A resource that carries the stack's tags or belongs to its cluster or network.

    `remove` is the command that deletes it. `since` is its creation in UTC, None where the cloud does not report it.
    `kept` is the reason why it stays on purpose, or deletes itself; empty for an orphan. `of_cluster` marks what the
    cluster makes, which is in no state while it is in use. `inside` is the id of what contains it, and is deleted with
    it. `aliases` are its further identifiers, such as an ARN. `withheld` is the reason why `remove` is empty. `live`
    marks the cluster and the bucket: a stack that has one of them may be in use, in a state of another backend.
    """

    kind: str
    id: str
    remove: str
    since: str | None = None
    usd_per_hour: float | None = None
    kept: str = ""
    of_cluster: bool = False
    inside: str = field(default="", repr=False)
    aliases: Sequence[str] = field(default=(), repr=False)
    withheld: str = ""
    live: Literal["", "cluster", "bucket"] = field(default="", repr=False)

    def without_command(self, reason: str) -> Leftover:
        """Return the same resource without the command that deletes it, because it may not be the stack's."""
        return replace(self, remove="", withheld=reason)


def shell(template: str, /, **values: object) -> str:
    """Return a command with all values quoted: the names of resources are not this program's."""
    return template.format(**{key: shlex.quote(str(value)) for key, value in values.items()})


@dataclass(frozen=True)
class Search:
    """A query for one kind of resource of a stack; `finds_clusters` marks the query of clusters."""

    kind: str
    run: Callable[[], Iterable[Leftover]]
    finds_clusters: bool = False


def explain_errors(searches: Iterable[Search], explain: Callable[[Exception], Exception]) -> list[Search]:
    """Return searches that raise what `explain` returns for an exception of a cloud's client."""

    def explained_run(query: Search) -> Callable[[], Sequence[Leftover]]:
        # A generator raises only when it is read.
        return explained(explain)(lambda: list(query.run()))

    return [replace(query, run=explained_run(query)) for query in searches]


class CloudOrphans(Protocol):
    """The interface of a cloud's `orphans` package, which imports the cloud's client only inside its functions.

    `CLUSTER` is the Pulumi type of the cluster: while it is in the state, what the cluster makes is no orphan.
    """

    CLUSTER: str

    def searches(self, context: Context) -> Sequence[Search]:
        """Return the queries of all kinds, in an order in which the found resources can be deleted."""
