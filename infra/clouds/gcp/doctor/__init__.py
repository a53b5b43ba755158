"""Checks of a Google Cloud project before `up`: login, billing, services, and what the zone offers and quotas allow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.clouds.gcp.doctor import causes
from infra.clouds.gcp.doctor.client import Rest, explain
from infra.clouds.gcp.doctor.queries import Queries, auth_plugin
from infra.clouds.gcp.settings import Settings
from infra.findings.errors import explained
from infra.findings.model import Check, Context

PACKAGES = ("pulumi-gcp",)
CAUSES = causes.CAUSES

_CREDENTIALS = "credentials"
_REGISTRY = re.compile(r"^[a-z0-9-]+-docker\.pkg\.dev$|^([a-z]+\.)?gcr\.io$")


def checks(context: Context) -> list[Check]:
    """Return all checks; the first checks the credentials, and those of the project need it."""
    settings = context.settings
    assert isinstance(settings, Settings)
    queries = Queries(Rest(), settings, context)
    runs = {
        "billing": queries.billing,
        "services": queries.services,
        "Kubernetes version": queries.version,
        "machine type": queries.offer,
        "quota": queries.quota,
        "reservation": queries.reservation,
        "existing network": queries.existing_network,
        "bucket": queries.bucket,
    }
    with_cause = explained(lambda error: explain(error, settings.gcp_project))
    first = Check(_CREDENTIALS, with_cause(queries.credentials))
    plugin = [] if settings.service else [Check("auth plug-in", auth_plugin)]
    return [first, *(Check(name, with_cause(run), _CREDENTIALS) for name, run in runs.items()), *plugin]


def devices(_: Settings) -> Mapping[str, int]:
    """Return no devices: pods get the network cards of Fast Socket and TCPX by their annotations."""
    return {}


def login(context: Context, host: str) -> tuple[str, str] | None:
    """Return the user of Artifact Registry and an access token for it."""
    if not _REGISTRY.match(host):
        return None
    assert isinstance(context.settings, Settings)
    project = context.settings.gcp_project
    with explained(lambda error: explain(error, project)):
        from google.auth.transport.requests import Request

        credentials: Any = Rest().credentials
        credentials.refresh(Request())
        return "oauth2accesstoken", str(credentials.token)
