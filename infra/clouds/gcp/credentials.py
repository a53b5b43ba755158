"""Which project is used, and what Google Cloud says when it refuses the credentials."""

from __future__ import annotations

from collections.abc import Sequence

from infra.clouds.gcp.settings import Settings

ASKS = False
LOGIN = "gcloud auth application-default login"

#: https://cloud.google.com/docs/authentication/troubleshoot-adc and RFC 6749's codes.
REFUSED: Sequence[str] = (
    "invalid_grant",
    "invalid_rapt",
    "could not find default credentials",
    "Reauthentication is needed",
    "ACCESS_TOKEN_EXPIRED",
    "CREDENTIALS_MISSING",
    "Request had invalid authentication credentials",
    "reauth related error",
)


def account(settings: Settings) -> str:
    """The project: credentials here belong to a person or a service, who may reach many of them."""
    return settings.gcp_project
