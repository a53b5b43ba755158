"""Prometheus and Grafana, with a dashboard for training and GPUs."""

from __future__ import annotations

import json

import pulumi
import pulumi_kubernetes as k8s

from infra.addons import charts
from infra.contract import ChartRequest, CustomResource
from infra.monitoring import alerts, board

_NAME, _STACK = "torchrec-training", "kube-prometheus-stack"


def prometheus_stack() -> ChartRequest:
    """Return one Prometheus that scrapes every monitor of the cluster, with the alerts, and one Grafana.

    A managed control plane hides its controller manager, scheduler, etcd and proxy, so monitors for them would only
    raise alerts. Without selectors Prometheus also uses the monitors of other releases and of the jobs.
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
    rules = CustomResource(
        "monitoring.coreos.com/v1", "PrometheusRule", _NAME, alerts.rules(), charts.table()[_STACK].namespace
    )
    return ChartRequest(_STACK, values, (rules,))


def dashboard(name: str, namespace: str, opts: pulumi.ResourceOptions) -> k8s.core.v1.ConfigMap:
    """Create the dashboard's ConfigMap, which Grafana's sidecar finds by its label."""
    metadata = k8s.meta.v1.ObjectMetaArgs(
        name=f"{_NAME}-dashboard", namespace=namespace, labels={"grafana_dashboard": "1"}
    )
    return k8s.core.v1.ConfigMap(
        name, metadata=metadata, data={"training.json": json.dumps(board.dashboard())}, opts=opts
    )
