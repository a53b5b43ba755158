"""Prometheus and Grafana with a dashboard for training and GPUs."""

from __future__ import annotations

from pathlib import Path

import pulumi
import pulumi_kubernetes as k8s

from infra.contract import ChartRequest

DASHBOARD = Path(__file__).parent / "dashboards" / "training.json"


def prometheus_stack() -> ChartRequest:
    """One Prometheus that scrapes every monitor of the cluster, one Grafana, no Alertmanager.

    A managed control plane hides its controller manager, scheduler, etcd and proxy: monitors for them would only alarm.
    The empty selectors make Prometheus take monitors that other releases and the jobs bring.
    """
    everything = {f"{kind}SelectorNilUsesHelmValues": False for kind in ("serviceMonitor", "podMonitor", "rule")}
    values: dict[str, object] = {
        "alertmanager": {"enabled": False},
        "grafana": {"sidecar": {"dashboards": {"enabled": True, "searchNamespace": "ALL"}}},
        "kubeControllerManager": {"enabled": False},
        "kubeEtcd": {"enabled": False},
        "kubeProxy": {"enabled": False},
        "kubeScheduler": {"enabled": False},
        "prometheus": {"prometheusSpec": everything | {"retention": "15d"}},
    }
    return ChartRequest("kube-prometheus-stack", values)


def dashboard(name: str, namespace: str, opts: pulumi.ResourceOptions) -> k8s.core.v1.ConfigMap:
    """The dashboard, where Grafana's sidecar finds it by its label."""
    metadata = k8s.meta.v1.ObjectMetaArgs(
        name="torchrec-training-dashboard", namespace=namespace, labels={"grafana_dashboard": "1"}
    )
    return k8s.core.v1.ConfigMap(name, metadata=metadata, data={DASHBOARD.name: DASHBOARD.read_text()}, opts=opts)
