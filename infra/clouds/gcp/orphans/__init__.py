"""What a stack can leave in a Google Cloud project: labelled resources, its network, and what GKE makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from infra.clouds.gcp.doctor.client import DISABLED, ApiError, Rest, explain
from infra.clouds.gcp.orphans import compute, services
from infra.clouds.gcp.orphans.owner import Owner
from infra.clouds.gcp.settings import Settings
from infra.findings.model import Context
from infra.findings.orphans import Leftover, Search, explain_errors

CLUSTER = "gcp:container/cluster:Cluster"


def searches(context: Context) -> list[Search]:
    """Return the searches in an order in which the resources can be deleted."""
    settings = context.settings
    assert isinstance(settings, Settings)
    owner = Owner(Rest(), settings)
    queries = [*services.clusters(owner), *compute.searches(owner), *services.data(owner)]
    found = [_where_enabled(query) for query in queries]
    return explain_errors(found, lambda error: explain(error, settings.gcp_project))


def _where_enabled(query: Search) -> Search:
    """Return a search that finds nothing where its service is disabled: a service without API has no resources."""

    def run() -> Iterable[Leftover]:
        try:
            return list(query.run())
        except ApiError as error:
            if not DISABLED & set(error.reasons):
                raise
            return ()

    return replace(query, run=run)
