"""Google Cloud's own metrics and logs: managed Prometheus with GPU metrics, and a dashboard over them."""

from __future__ import annotations

import json

import pulumi
import pulumi_gcp as gcp

#: What GKE collects by itself. cAdvisor is left out: it is billed by the sample and kube-prometheus-stack brings it.
_METRICS = ["SYSTEM_COMPONENTS", "STORAGE", "POD", "JOBSET", "KUBELET", "DCGM"]

_CHARTS = {
    "GPU utilisation": ("avg by (node) (DCGM_FI_DEV_GPU_UTIL{%s})", "%"),
    "Tensor core activity": ("avg by (node) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{%s})", "1"),
    "GPU memory in use": ("sum by (node) (DCGM_FI_DEV_FB_USED{%s}) * 1048576", "By"),
    "NVLink traffic sent": ("sum by (node) (rate(DCGM_FI_PROF_NVLINK_TX_BYTES{%s}[1m]))", "By/s"),
}


def metrics() -> gcp.container.ClusterMonitoringConfigArgs:
    """Managed Prometheus, with DCGM for GPUs and JobSet for jobs."""
    return gcp.container.ClusterMonitoringConfigArgs(
        enable_components=_METRICS,
        managed_prometheus=gcp.container.ClusterMonitoringConfigManagedPrometheusArgs(enabled=True),
    )


def logs() -> gcp.container.ClusterLoggingConfigArgs:
    """Logs of the system and of the jobs; a trainer's log outlives its pod."""
    return gcp.container.ClusterLoggingConfigArgs(enable_components=["SYSTEM_COMPONENTS", "WORKLOADS"])


class Monitoring(pulumi.ComponentResource):
    """A dashboard of the cluster's GPUs in Cloud Monitoring, there when the cluster and its own Grafana are gone."""

    def __init__(self, name: str, cluster: pulumi.Output[str], opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("torchrec-cloud:gcp:Monitoring", name, None, opts)
        gcp.monitoring.Dashboard(
            f"{name}-gpus", dashboard_json=cluster.apply(dashboard), opts=pulumi.ResourceOptions(parent=self)
        )
        self.register_outputs({})


def dashboard(cluster: str) -> str:
    """The dashboard of one cluster, two charts a row."""
    tiles = [
        {"width": 24, "height": 16, "xPos": 24 * (index % 2), "yPos": 16 * (index // 2), "widget": widget}
        for index, widget in enumerate(_widget(title, *chart, cluster) for title, chart in _CHARTS.items())
    ]
    return json.dumps({"displayName": f"GPUs of {cluster}", "mosaicLayout": {"columns": 48, "tiles": tiles}})


def _widget(title: str, query: str, unit: str, cluster: str) -> dict[str, object]:
    source = {"prometheusQuery": query % f'cluster="{cluster}"', "unitOverride": unit}
    return {"title": title, "xyChart": {"dataSets": [{"plotType": "LINE", "timeSeriesQuery": source}]}}
