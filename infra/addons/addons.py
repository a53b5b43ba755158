"""Installs the operators of a cluster in the right order."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_kubernetes as k8s

from infra.addons import charts, gpu, launchers, monitoring
from infra.addons.install import Operator
from infra.contract import ChartRequest, Cluster


class Addons(pulumi.ComponentResource):
    """All operators of a cluster; a training job depends on `ready`, so that the job is deleted first."""

    ready: Sequence[pulumi.Resource]

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        *,
        launcher: str,
        monitored: bool,
        queued: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:addons:Addons", name, None, opts)
        self._name, self._cluster = name, cluster
        prometheus = self._install_prometheus() if monitored else None
        hardware = self._install_hardware()
        watchers = self._install_watchers(prometheus, hardware) if prometheus else []
        operator = self._install_if_needed(launchers.operator(launcher), [])
        # Kueue looks for the operators' kinds at its start, so it is installed after them.
        queue = self._install_if_needed(launchers.kueue(launcher) if queued else None, operator)
        others = [item for request in cluster.charts for item in self._install_if_needed(request, [])]
        self.ready = (*watchers, *hardware, *operator, *queue, *others)
        self.register_outputs({})

    def _install_hardware(self) -> list[pulumi.Resource]:
        """Install the fabric's operator, then the GPU's, whose driver is built against the network driver."""
        fabric = self._install_if_needed(self._cluster.fabric.chart, [])
        return [*fabric, *self._install_if_needed(self._cluster.gpu.chart, fabric)]

    def _install_prometheus(self) -> Operator:
        """Install Prometheus and Grafana with their operator."""
        return self._install(monitoring.prometheus_stack(self._cluster.disk_class), [])

    def _install_watchers(self, prometheus: Operator, hardware: Sequence[pulumi.Resource]) -> list[pulumi.Resource]:
        """Install the dashboard and the GPU exporter.

        The exporter's ServiceMonitor is a kind of the Prometheus operator, its RuntimeClass an object of the GPU's.
        """
        child = pulumi.ResourceOptions(parent=self, depends_on=list(prometheus.ready), provider=self._cluster.provider)
        namespace = charts.table()[monitoring.prometheus_stack().key].namespace
        board = monitoring.dashboard(f"{self._name}-dashboard", namespace, child)
        exporter: list[pulumi.Resource] = []
        if not self._cluster.gpu.exports_metrics:
            request = gpu.dcgm_exporter(self._cluster.gpu)
            exporter = list(self._install(request, [*prometheus.ready, *hardware], prometheus.namespace).ready)
        return [*prometheus.ready, board, *exporter]

    def _install_if_needed(
        self, request: ChartRequest | None, after: Sequence[pulumi.Resource]
    ) -> list[pulumi.Resource]:
        return list(self._install(request, after).ready) if request else []

    def _install(
        self, request: ChartRequest, after: Sequence[pulumi.Resource], namespace: k8s.core.v1.Namespace | None = None
    ) -> Operator:
        opts = pulumi.ResourceOptions(
            parent=self,
            provider=self._cluster.provider,
            depends_on=[*self._cluster.before_operators, *after],
        )
        return Operator(f"{self._name}-{request.key}", request, self._cluster.labels, opts, namespace)
