"""The stack outputs: addresses, hourly cost and the next commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import pulumi

from infra import clouds
from infra.config.settings import StackSettings
from infra.contract import Cluster, TrainingService
from infra.cost import HourlyCost


def export_all(cluster: Cluster, settings: StackSettings, then: Sequence[str] = ()) -> None:
    """Export every output of a stack with a cluster; the kubeconfig is always a secret.

    `then` are shell lines to show after those that connect to the cluster.
    """
    _export_common(cluster, settings)
    pulumi.export("kubeconfig", pulumi.Output.secret(cluster.kubeconfig))
    pulumi.export("next_steps", next_steps(cluster, then))


def export_service(service: TrainingService, settings: StackSettings, job: pulumi.Output[Mapping[str, object]]) -> None:
    """Export every output of a stack with a training service, which has no kubeconfig.

    `job` contains the commands that show the run.
    """
    _export_common(service, settings)
    run = job.apply(lambda known: list(cast("Mapping[str, str]", known["commands"]).values()))
    lines = pulumi.Output.all(run, *service.commands.values())
    pulumi.export("next_steps", lines.apply(lambda known: [*known[0], *known[1:]]))


def _export_common(place: Cluster | TrainingService, settings: StackSettings) -> None:
    """Export the outputs that clusters and training services share."""
    pulumi.export("account", clouds.load(settings.cloud).account(settings))
    pulumi.export("cluster_name", place.name)
    pulumi.export("bucket_uri", place.bucket_uri)
    pulumi.export("checkpoint_uri", place.checkpoint_uri)
    pulumi.export("registry", place.registry.repository)
    pulumi.export("hourly_cost_usd", hourly_cost(settings))


def hourly_cost(settings: StackSettings) -> Mapping[str, float | None]:
    """Return the USD per hour at `gpu.nodes.desired` and at `gpu.nodes.max`; spot is None if a price is unknown."""
    desired = HourlyCost(settings.cost_lines(settings.gpu.nodes.desired))
    most = HourlyCost(settings.cost_lines(settings.gpu.nodes.max))
    return {
        "on_demand": desired.on_demand_usd,
        "spot": desired.spot_usd,
        "on_demand_at_max": most.on_demand_usd,
        "spot_at_max": most.spot_usd,
    }


def next_steps(cluster: Cluster, then: Sequence[str] = ()) -> pulumi.Output[list[str]]:
    """Return shell lines in the order in which a user needs them."""
    connect = [
        "pulumi stack output kubeconfig --show-secrets > kubeconfig.yaml && chmod 600 kubeconfig.yaml",
        "export KUBECONFIG=$PWD/kubeconfig.yaml",
        f"kubectl --namespace {cluster.namespace} get pods --output wide",
    ]
    return pulumi.Output.all(*cluster.commands.values()).apply(
        lambda own: [*connect, *then, *(str(line) for line in own)]
    )
