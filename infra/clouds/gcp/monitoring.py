"""Google Cloud's metrics and logs: managed Prometheus with GPU metrics, and a dashboard."""

from __future__ import annotations

import json

import pulumi
import pulumi_gcp as gcp

#: The metrics that GKE collects, without cAdvisor: it is billed per sample, and kube-prometheus-stack collects it.
_METRICS = ["SYSTEM_COMPONENTS", "STORAGE", "POD", "JOBSET", "KUBELET", "DCGM"]

_CHARTS = {
    "GPU utilisation": ("avg by (node) (DCGM_FI_DEV_GPU_UTIL{%s})", "%"),
    "Tensor core activity": ("avg by (node) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{%s})", "1"),
    "GPU memory in use": ("sum by (node) (DCGM_FI_DEV_FB_USED{%s}) * 1048576", "By"),
    "NVLink traffic sent": ("sum by (node) (rate(DCGM_FI_PROF_NVLINK_TX_BYTES{%s}[1m]))", "By/s"),
}


def metrics_config() -> gcp.container.ClusterMonitoringConfigArgs:
    """Return managed Prometheus with DCGM for GPUs and JobSet for jobs."""
    return gcp.container.ClusterMonitoringConfigArgs(
        enable_components=_METRICS,
        managed_prometheus=gcp.container.ClusterMonitoringConfigManagedPrometheusArgs(enabled=True),
    )


def logging_config() -> gcp.container.ClusterLoggingConfigArgs:
    """Return the collection of system and job logs, which keeps a trainer's log after its pod is deleted."""
    return gcp.container.ClusterLoggingConfigArgs(enable_components=["SYSTEM_COMPONENTS", "WORKLOADS"])


class Monitoring(pulumi.ComponentResource):
    """A dashboard of the cluster's GPUs in Cloud Monitoring, independent of the cluster's own Grafana."""

    def __init__(self, name: str, cluster: pulumi.Output[str], opts: pulumi.ResourceOptions | None = None) -> None:
        """Create the dashboard of one cluster."""
        super().__init__("torchrec-cloud:gcp:Monitoring", name, None, opts)
        gcp.monitoring.Dashboard(
            f"{name}-gpus", dashboard_json=cluster.apply(dashboard), opts=pulumi.ResourceOptions(parent=self)
        )
        self.register_outputs({})


def dashboard(cluster: str) -> str:
    """Return the dashboard of one cluster as JSON, with two charts per row."""
    tiles = [
        {"width": 24, "height": 16, "xPos": 24 * (index % 2), "yPos": 16 * (index // 2), "widget": widget}
        for index, widget in enumerate(_widget(title, *chart, cluster) for title, chart in _CHARTS.items())
    ]
    return json.dumps({"displayName": f"GPUs of {cluster}", "mosaicLayout": {"columns": 48, "tiles": tiles}})


def _widget(title: str, query: str, unit: str, cluster: str) -> dict[str, object]:
    """Return a line chart of one query, restricted to the cluster."""
    source = {"prometheusQuery": query % f'cluster="{cluster}"', "unitOverride": unit}
    return {"title": title, "xyChart": {"dataSets": [{"plotType": "LINE", "timeSeriesQuery": source}]}}
