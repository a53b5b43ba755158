"""Checks of an AWS account before `up`: credentials, what the region offers, and how much of it the account may use."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from infra.clouds.aws.doctor import causes
from infra.clouds.aws.doctor.clients import explain, open_clients
from infra.clouds.aws.doctor.queries import Queries
from infra.clouds.aws.settings import Settings
from infra.findings.errors import explained
from infra.findings.model import Check, Context

PACKAGES = ("pulumi-aws", "pulumi-eks")
CAUSES = causes.CAUSES

_CREDENTIALS = "credentials"
_REGISTRY = re.compile(r"^\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com$")


def checks(context: Context) -> list[Check]:
    """Return all checks; the first checks the credentials, and the others need it."""
    settings = context.settings
    assert isinstance(settings, Settings)
    queries = Queries(open_clients(settings.region), settings, context)
    runs = {
        "zones": queries.zones,
        "instance type": queries.offer,
        "quota": queries.gpu_quota,
        "quota of system nodes": queries.system_quota,
        "quota of the network": queries.network_quota,
        "reservation": queries.reservation,
        "addresses": queries.overlaps,
        "existing network": queries.existing_network,
        "bucket": queries.bucket,
    }
    with_cause = explained(lambda error: explain(error, settings.region))
    first = Check(_CREDENTIALS, with_cause(queries.credentials))
    return [first, *(Check(name, with_cause(run), _CREDENTIALS) for name, run in runs.items())]


def devices(settings: Settings) -> Mapping[str, int]:
    """Return the number of EFA network cards."""
    count = settings.num_efa_interfaces
    return {"vpc.amazonaws.com/efa": count} if count else {}


def login(context: Context, host: str) -> tuple[str, str] | None:
    """Return user and password for an ECR registry; the password is valid for twelve hours."""
    match = _REGISTRY.match(host)
    if not match:
        return None
    assert isinstance(context.settings, Settings)
    region = context.settings.region
    with explained(lambda error: explain(error, region)):
        answer = open_clients(match[1])("ecr").get_authorization_token()
    user, _, password = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode().partition(":")
    return user, password
