"""CloudWatch's metrics and logs of the cluster, the agent that finds broken nodes, and the metrics server."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.clouds.aws.cluster import Cluster
from infra.clouds.aws.settings import Settings

#: Groups that the add-on's agents write to; made by them they would be kept for ever and outlive the stack.
_LOG_GROUPS = ("application", "dataplane", "host", "performance")


class Monitoring(pulumi.ComponentResource):
    """Add-ons that watch: node repair acts on what the monitoring agent reports."""

    def __init__(
        self, name: str, settings: Settings, cluster: Cluster, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("torchrec-cloud:aws:Monitoring", name, None, opts)
        self._name, self._settings, self._cluster = name, settings, cluster
        cluster.addon(f"{name}-nodes", "eks-node-monitoring-agent", self, after=cluster.ready)
        cluster.addon(f"{name}-metrics-server", "metrics-server", self, after=cluster.ready)
        if settings.monitoring.cloudwatch:
            self._cloudwatch()
        self.register_outputs({})

    def _cloudwatch(self) -> None:
        """Container Insights.

        GPU metrics are left to DCGM and Prometheus where those run: two DCGM exporters on one node take the profiling
        counters from each other. Application Signals stays off, since it would rewrite every pod.
        """
        groups = [self._log_group(kind) for kind in _LOG_GROUPS]
        role = self._cluster.pod_role(f"{self._name}-agent", self, managed=["CloudWatchAgentServerPolicy"])
        insights = {
            "enhanced_container_insights": True,
            "accelerated_compute_metrics": not self._settings.addons.monitoring,
        }
        self._cluster.addon(
            f"{self._name}-cloudwatch",
            "amazon-cloudwatch-observability",
            self,
            after=[*self._cluster.ready, *groups],
            identity=("cloudwatch-agent", role),
            configuration={"agent": {"config": {"logs": {"metrics_collected": {"kubernetes": insights}}}}},
        )

    def _log_group(self, kind: str) -> aws.cloudwatch.LogGroup:
        return aws.cloudwatch.LogGroup(
            f"{self._name}-{kind}-logs",
            name=f"/aws/containerinsights/{self._cluster.eks_name}/{kind}",
            retention_in_days=self._settings.monitoring.log_retention_days,
            tags=self._settings.labels,
            opts=pulumi.ResourceOptions(parent=self),
        )
