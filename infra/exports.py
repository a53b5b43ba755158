"""What `pulumi stack output` shows: where things are, what an hour costs, which commands come next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi

from infra import clouds
from infra.contract import Cluster
from infra.cost import HourlyCost
from infra.settings import StackSettings


def export_all(cluster: Cluster, settings: StackSettings, then: Sequence[str] = ()) -> None:
    """Export every output of the stack; the kubeconfig is a secret whatever the cloud did.

    `then` are shell lines that come after those which reach the cluster.
    """
    pulumi.export("account", clouds.load(settings.cloud).account(settings))
    pulumi.export("cluster_name", cluster.name)
    pulumi.export("kubeconfig", pulumi.Output.secret(cluster.kubeconfig))
    pulumi.export("bucket_uri", cluster.bucket_uri)
    pulumi.export("checkpoint_uri", cluster.checkpoint_uri)
    pulumi.export("registry", cluster.registry.repository)
    pulumi.export("hourly_cost_usd", hourly_cost(settings))
    pulumi.export("next_steps", next_steps(cluster, then))


def hourly_cost(settings: StackSettings) -> Mapping[str, float | None]:
    """USD per hour at `gpu.nodes.desired` and at `gpu.nodes.max`; spot is None where a spot price is not known."""
    desired = HourlyCost(settings.cost_lines(settings.gpu.nodes.desired))
    most = HourlyCost(settings.cost_lines(settings.gpu.nodes.max))
    return {
        "on_demand": desired.on_demand_usd,
        "spot": desired.spot_usd,
        "on_demand_at_max": most.on_demand_usd,
        "spot_at_max": most.spot_usd,
    }


def next_steps(cluster: Cluster, then: Sequence[str] = ()) -> pulumi.Output[list[str]]:
    """Shell lines for a person, in the order in which they help."""
    connect = [
        "pulumi stack output kubeconfig --show-secrets > kubeconfig.yaml && chmod 600 kubeconfig.yaml",
        "export KUBECONFIG=$PWD/kubeconfig.yaml",
        f"kubectl --namespace {cluster.namespace} get pods --output wide",
    ]
    return pulumi.Output.all(*cluster.commands.values()).apply(
        lambda own: [*connect, *then, *(str(line) for line in own)]
    )
