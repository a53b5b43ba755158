"""Which API server the kubeconfig's context leads to, and what it says when it refuses the credentials."""

from __future__ import annotations

from collections.abc import Sequence

from infra.clouds.local import kubeconfig
from infra.clouds.local.settings import Settings

ASKS = False
LOGIN = "kubectl cluster-info"

REFUSED: Sequence[str] = (
    "the server has asked for the client to provide credentials",
    "You must be logged in to the server",
    "getting credentials: exec",
)


def account(settings: Settings) -> str:
    """The server's address; ValueError where the kubeconfig cannot say it."""
    found = kubeconfig.read(kubeconfig.locate(settings.kubeconfig.path))
    return kubeconfig.server(found, settings.kubeconfig.context or found.current or "")
