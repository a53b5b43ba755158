"""Resources that no state knows: what a cloud's search finds, and the interface of the searches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infra.findings.model import Context


@dataclass(frozen=True)
class Leftover:
    """A resource that carries the stack's tags or belongs to its cluster or network.

    `remove` is the command that deletes it. `since` is its creation in UTC, None where the cloud does not report it.
    `kept` is the reason why it stays on purpose, or deletes itself; empty for an orphan. `of_cluster` marks what the
    cluster makes, which is in no state while it is in use. `aliases` are its further identifiers, such as an ARN.
    """

    kind: str
    id: str
    remove: str
    since: str | None = None
    usd_per_hour: float | None = None
    kept: str = ""
    of_cluster: bool = False
    aliases: Sequence[str] = field(default=(), repr=False)


@dataclass(frozen=True)
class Search:
    """A query for one kind of resource of a stack."""

    kind: str
    run: Callable[[], Iterable[Leftover]]


class CloudOrphans(Protocol):
    """The interface of a cloud's `orphans` package, which imports the cloud's client only inside its functions.

    `CLUSTER` is the Pulumi type of the cluster: while it is in the state, what the cluster makes is no orphan.
    """

    CLUSTER: str

    def searches(self, context: Context) -> Sequence[Search]:
        """Return the queries of all kinds, in an order in which the found resources can be deleted."""
