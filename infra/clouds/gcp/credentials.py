"""The project in use, the services that it needs, and the messages with which Google Cloud rejects credentials."""

from __future__ import annotations

from collections.abc import Sequence

from infra.clouds.gcp.settings import Settings

ASKS = False
LOGIN = "gcloud auth application-default login"

#: The Google Cloud services of a cluster's resources, and those of a job on Vertex AI; a new project has none of them
#: enabled.
CLUSTER_APIS = (
    "artifactregistry",
    "cloudkms",
    "cloudresourcemanager",
    "compute",
    "container",
    "file",
    "iam",
    "iamcredentials",
    "logging",
    "monitoring",
    "storage",
)
JOB_APIS = ("aiplatform", "artifactregistry", "cloudresourcemanager", "iam", "iamcredentials", "logging", "storage")

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
    """Return the configured project: the credentials of one user may reach many projects."""
    return settings.gcp_project
