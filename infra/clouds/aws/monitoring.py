"""CloudWatch metrics and logs of the cluster, the node monitoring agent, and the metrics server."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.clouds.aws.cluster import EksCluster
from infra.clouds.aws.settings import Settings

#: Groups that the add-on's agents write to; groups that the agents create never expire and outlive the stack.
_LOG_GROUPS = ("application", "dataplane", "host", "performance")


class Monitoring(pulumi.ComponentResource):
    """The monitoring add-ons; node repair acts on what the node monitoring agent reports."""

    def __init__(
        self, name: str, settings: Settings, cluster: EksCluster, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("torchrec-cloud:aws:Monitoring", name, None, opts)
        self._name, self._settings, self._cluster = name, settings, cluster
        cluster.create_addon(f"{name}-nodes", "eks-node-monitoring-agent", self, after=cluster.ready)
        cluster.create_addon(f"{name}-metrics-server", "metrics-server", self, after=cluster.ready)
        if settings.monitoring.cloudwatch:
            self._create_cloudwatch()
        self.register_outputs({})

    def _create_cloudwatch(self) -> None:
        """Create Container Insights and its log groups.

        DCGM and Prometheus report GPU metrics where they run: two DCGM exporters on one node compete for the profiling
        counters. Application Signals stays off, because it would modify every pod.
        """
        groups = [self._create_log_group(kind) for kind in _LOG_GROUPS]
        role = self._cluster.create_pod_role(f"{self._name}-agent", self, managed=["CloudWatchAgentServerPolicy"])
        insights = {
            "enhanced_container_insights": True,
            "accelerated_compute_metrics": not self._settings.addons.monitoring,
        }
        self._cluster.create_addon(
            f"{self._name}-cloudwatch",
            "amazon-cloudwatch-observability",
            self,
            after=[*self._cluster.ready, *groups],
            identity=("cloudwatch-agent", role),
            configuration={"agent": {"config": {"logs": {"metrics_collected": {"kubernetes": insights}}}}},
        )

    def _create_log_group(self, kind: str) -> aws.cloudwatch.LogGroup:
        return aws.cloudwatch.LogGroup(
            f"{self._name}-{kind}-logs",
            name=pulumi.Output.concat("/aws/containerinsights/", self._cluster.eks_name, f"/{kind}"),
            retention_in_days=self._settings.monitoring.log_retention_days,
            tags=self._settings.labels,
            opts=pulumi.ResourceOptions(parent=self),
        )
