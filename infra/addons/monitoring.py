"""Prometheus and Grafana, with a dashboard for training and GPUs."""

from __future__ import annotations

import json

import pulumi
import pulumi_kubernetes as k8s

from infra.addons import charts
from infra.contract import ChartRequest, CustomResource
from infra.monitoring import alerts, board

_DISK_GIB = 50
_NAME, _STACK = "torchrec-training", "kube-prometheus-stack"


def prometheus_stack(disk_class: str | None = None) -> ChartRequest:
    """Return one Prometheus that scrapes every monitor of the cluster, with the alerts, and one Grafana.

    It keeps its series on a disk of `disk_class`; without one, a restart of its pod on another node loses them.

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
        "prometheus": {"prometheusSpec": everything | {"retention": "15d"} | _disk(disk_class)},
    }
    rules = CustomResource(
        "monitoring.coreos.com/v1", "PrometheusRule", _NAME, alerts.rules(), charts.table()[_STACK].namespace
    )
    return ChartRequest(_STACK, values, (rules,))


def _disk(disk_class: str | None) -> dict[str, object]:
    """Return the claim of a disk that is deleted with Prometheus; the oldest series go before the disk is full."""
    if disk_class is None:
        return {}
    claim = {
        "storageClassName": disk_class,
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{_DISK_GIB}Gi"}},
    }
    return {
        "retentionSize": f"{_DISK_GIB - 5}GiB",
        "storageSpec": {"volumeClaimTemplate": {"spec": claim}},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
    }


def dashboard(name: str, namespace: str, opts: pulumi.ResourceOptions) -> k8s.core.v1.ConfigMap:
    """Create the dashboard's ConfigMap, which Grafana's sidecar finds by its label."""
    metadata = k8s.meta.v1.ObjectMetaArgs(
        name=f"{_NAME}-dashboard", namespace=namespace, labels={"grafana_dashboard": "1"}
    )
    return k8s.core.v1.ConfigMap(
        name, metadata=metadata, data={"training.json": json.dumps(board.dashboard())}, opts=opts
    )
