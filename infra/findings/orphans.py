"""Resources that no state knows: what a cloud's search finds, and the interface of the searches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infra.findings.errors import explained
from infra.findings.model import Context


@dataclass(frozen=True)
class Leftover:
    """A resource that carries the stack's tags or belongs to its cluster or network.

    `remove` is the command that deletes it. `since` is its creation in UTC, None where the cloud does not report it.
    `kept` is the reason why it stays on purpose, or deletes itself; empty for an orphan. `of_cluster` marks what the
    cluster makes, which is in no state while it is in use. `inside` is the id of what contains it, and is deleted with
    it. `aliases` are its further identifiers, such as an ARN.
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


@dataclass(frozen=True)
class Search:
    """A query for one kind of resource of a stack."""

    kind: str
    run: Callable[[], Iterable[Leftover]]


def explain_errors(searches: Iterable[Search], explain: Callable[[Exception], Exception]) -> list[Search]:
    """Return searches that raise what `explain` returns for an exception of a cloud's client."""

    def explained_run(query: Search) -> Callable[[], Sequence[Leftover]]:
        # A generator raises only when it is read.
        return explained(explain)(lambda: list(query.run()))

    return [Search(query.kind, explained_run(query)) for query in searches]


class CloudOrphans(Protocol):
    """The interface of a cloud's `orphans` package, which imports the cloud's client only inside its functions.

    `CLUSTER` is the Pulumi type of the cluster: while it is in the state, what the cluster makes is no orphan.
    """

    CLUSTER: str

    def searches(self, context: Context) -> Sequence[Search]:
        """Return the queries of all kinds, in an order in which the found resources can be deleted."""
