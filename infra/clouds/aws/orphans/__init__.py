"""What a stack can leave in an AWS account: searches of its region for the stack's tags and its cluster's names."""

from __future__ import annotations

from infra.clouds.aws.doctor.clients import explain, open_clients
from infra.clouds.aws.orphans import compute, services
from infra.clouds.aws.orphans.owner import Owner
from infra.clouds.aws.settings import Settings
from infra.findings.model import Context
from infra.findings.orphans import Search, explain_errors

CLUSTER = "aws:eks/cluster:Cluster"


def searches(context: Context) -> list[Search]:
    """Return the searches in an order in which the resources can be deleted: machines, network, then the rest."""
    settings = context.settings
    assert isinstance(settings, Settings)
    owner = Owner(open_clients(settings.region), settings)
    found = [*services.machines(owner), *compute.searches(owner), *services.data(owner)]
    return explain_errors(found, lambda error: explain(error, settings.region))
