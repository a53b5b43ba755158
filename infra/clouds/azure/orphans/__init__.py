"""What a stack can leave in an Azure subscription: resources, groups, role assignments and deleted key vaults."""

from __future__ import annotations

from infra.clouds.azure import doctor
from infra.clouds.azure.doctor.client import GRAPH_SCOPE, Arm, chosen_subscription, explain
from infra.clouds.azure.orphans.queries import Queries
from infra.clouds.azure.settings import Settings
from infra.findings.model import Context
from infra.findings.orphans import Search, explain_errors

CLUSTER = "azure-native:containerservice:ManagedCluster"
GRAPH = "https://graph.microsoft.com"


def searches(context: Context) -> list[Search]:
    """Return the searches: resources, then their groups, then what outlives a group."""
    settings = context.settings
    assert isinstance(settings, Settings)
    arm = Arm(doctor.ENDPOINT, lambda: chosen_subscription(context.values))
    graph = Arm(GRAPH, lambda: arm.subscription, GRAPH_SCOPE)
    queries = Queries(arm, graph, settings)
    found = [
        Search("resource", queries.resources, finds_clusters=True),
        Search("resource group", queries.groups),
        Search("role assignment", queries.role_assignments),
        Search("deleted key vault", queries.deleted_vaults),
    ]
    return explain_errors(found, lambda error: explain(error, arm))
