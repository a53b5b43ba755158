"""Checks of an Azure subscription before `up`: login, features, and what the location offers and the quota allows."""

from __future__ import annotations

import re
from collections.abc import Mapping

from infra.clouds.azure import registry_token
from infra.clouds.azure.doctor import causes
from infra.clouds.azure.doctor.client import SCOPE, Arm, chosen_subscription, explain
from infra.clouds.azure.doctor.queries import Queries
from infra.clouds.azure.settings import Settings
from infra.findings.errors import explained
from infra.findings.model import Check, Context

PACKAGES = ("pulumi-azure-native",)
CAUSES = causes.CAUSES
ENDPOINT = "https://management.azure.com"

_CREDENTIALS = "credentials"
_REGISTRY = re.compile(r"^[a-z0-9]+\.azurecr\.io$")


def checks(context: Context) -> list[Check]:
    """Return all checks; the first checks the credentials, and the others need it."""
    settings = context.settings
    assert isinstance(settings, Settings)
    arm = Arm(ENDPOINT, lambda: chosen_subscription(context.values))
    queries = Queries(arm, settings, context)
    runs = {
        "resource providers": queries.providers,
        "roles": queries.roles,
        "features": queries.features,
        "Kubernetes version": queries.version,
        "instance type": queries.offer,
        "quota": queries.quota,
        "reservation": queries.reservation,
        "addresses": queries.overlaps,
        "existing network": queries.existing_network,
    }
    with_cause = explained(lambda error: explain(error, arm))
    first = Check(_CREDENTIALS, with_cause(queries.credentials))
    return [first, *(Check(name, with_cause(run), _CREDENTIALS) for name, run in runs.items())]


def devices(settings: Settings) -> Mapping[str, int]:
    """Return one InfiniBand virtual function for each network card."""
    return settings.devices


def login(_: Context, host: str) -> tuple[str, str] | None:
    """Return user and password for an Azure registry, which exchanges an Entra token for one of its own."""
    if not _REGISTRY.match(host):
        return None
    with explained(explain):
        from azure.identity import DefaultAzureCredential

        token = DefaultAzureCredential(exclude_interactive_browser_credential=True).get_token(SCOPE).token
        return registry_token.USER, registry_token.refresh_token(host, token)
