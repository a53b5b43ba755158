"""The API server of the kubeconfig's context, and the messages with which it rejects credentials."""

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
    """Return the server's address, or raise ValueError if the kubeconfig does not name it."""
    found = kubeconfig.read(kubeconfig.locate(settings.kubeconfig.path))
    return kubeconfig.find_server(found, settings.kubeconfig.context or found.current or "")
