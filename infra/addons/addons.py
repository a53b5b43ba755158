"""Which operators a cluster gets, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_kubernetes as k8s

from infra.addons import charts, gpu, launchers, monitoring
from infra.addons.install import Operator
from infra.contract import ChartRequest, Cluster


class Addons(pulumi.ComponentResource):
    """Everything a training job finds installed; `ready` is what the job depends on, so that it is deleted first."""

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
        watched = self._monitoring() if monitored else []
        hardware = self._hardware()
        operator = self._operator(launchers.operator(launcher), [])
        # Kueue looks for the operators' kinds when it starts, so it comes after them.
        queue = self._operator(launchers.kueue(launcher) if queued else None, operator)
        further = [item for request in cluster.charts for item in self._operator(request, [])]
        self.ready = (*watched, *hardware, *operator, *queue, *further)
        self.register_outputs({})

    def _hardware(self) -> list[pulumi.Resource]:
        """Fabric first: it may install the network driver that the GPU driver builds its peer memory against."""
        fabric = self._operator(self._cluster.fabric.chart, [])
        return [*fabric, *self._operator(self._cluster.gpu.chart, fabric)]

    def _monitoring(self) -> list[pulumi.Resource]:
        """Prometheus, then what feeds it: the exporter's monitor is of a kind that Prometheus's operator brings."""
        request = monitoring.prometheus_stack()
        stack = self._install(request, [])
        child = pulumi.ResourceOptions(parent=self, depends_on=list(stack.ready), provider=self._cluster.provider)
        board = monitoring.dashboard(f"{self._name}-dashboard", charts.table()[request.key].namespace, child)
        exporter: list[pulumi.Resource] = []
        if not self._cluster.gpu.exports_metrics:
            exporter = list(self._install(gpu.dcgm_exporter(self._cluster.gpu), stack.ready, stack.namespace).ready)
        return [*stack.ready, board, *exporter]

    def _operator(self, request: ChartRequest | None, after: Sequence[pulumi.Resource]) -> list[pulumi.Resource]:
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
