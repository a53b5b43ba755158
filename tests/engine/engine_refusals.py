"""How a simulated cloud answers a request that it does not fulfil."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_world import Resource


class Refused(Exception):  # noqa: N818 - a cloud's response, not an error of the program
    """A cloud refuses a request."""


class PartlyCreated(Exception):  # noqa: N818
    """A cloud gives up on a create, and the object exists: an EKS node group in CREATE_FAILED.

    `World` puts the resource into `resource`. The provider reports both, so the engine keeps the resource in its state.
    """

    def __init__(self, message: str, status: str = "CREATE_FAILED") -> None:
        super().__init__(message)
        self.status = status
        self.resource: Resource | None = None


class ConnectionLost(Exception):  # noqa: N818
    """The provider stops before it answers."""
