"""Azure: managed Prometheus and Grafana, and the tags of all resources."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

import pytest
from azure_stack import AKS, CHOSEN, GRAFANA, ROLE, TRIAL, Stack
from provider_mocks.recording import PROJECT


def test_the_workspace_collects_the_clusters_metrics_and_grafana_reads_them(stack: Stack) -> None:
    recording = stack("azure")
    assert recording.one(AKS).inputs["azureMonitorProfile"]["metrics"]["enabled"] is True
    rule = recording.one("azure-native:monitor:DataCollectionRule").inputs
    workspace = "azure-monitoring-workspace-id"
    assert rule["destinations"]["monitoringAccounts"][0]["accountResourceId"] == workspace
    assert rule["dataFlows"][0]["streams"] == ["Microsoft-PrometheusMetrics"]
    association = recording.one("azure-native:monitor:DataCollectionRuleAssociation").inputs
    assert association["resourceUri"] == "azure-aks-id"
    assert association["dataCollectionRuleId"] == "azure-monitoring-dcr-id"
    reads = recording.one(ROLE, "azure-monitoring-read").inputs
    assert (reads["scope"], reads["principalId"]) == (workspace, "grafana-principal")


def test_grafana_is_private_by_default(stack: Stack) -> None:
    assert stack("azure").one(GRAFANA).inputs["properties"]["publicNetworkAccess"] == "Disabled"
    public = stack("azure", CHOSEN).one(GRAFANA).inputs["properties"]
    assert public["publicNetworkAccess"] == "Enabled"
    assert public["apiKey"] == "Disabled"


def test_managed_monitoring_can_be_disabled(stack: Stack) -> None:
    recording = stack("azure", {"monitoring.managed": False})
    assert not [item for item in recording.registrations if "monitor" in item.name and "azure-native" in item.type]
    assert recording.one(AKS).inputs["azureMonitorProfile"]["metrics"]["enabled"] is False


def _taggable(token: str) -> bool:
    """Return whether the SDK's class of this type has tags."""
    _, module, name = token.split(":")
    resource = getattr(importlib.import_module(f"pulumi_azure_native.{module}"), name)
    return "tags" in inspect.signature(resource._internal_init).parameters


@pytest.mark.parametrize("overrides", [{}, TRIAL])
def test_every_taggable_resource_is_tagged(stack: Stack, overrides: Mapping[str, object]) -> None:
    expected = {"project": PROJECT, "stack": "azure", "owner": "ml-platform", "cost-centre": "recommendation"}
    taggable = [
        item
        for item in stack("azure", overrides).registrations
        if item.type.startswith("azure-native:") and _taggable(item.type)
    ]
    assert len(taggable) >= 30
    untagged = [item.name for item in taggable if not expected.items() <= item.inputs.get("tags", {}).items()]
    assert not untagged
    system = stack("azure").one(AKS).inputs["agentPoolProfiles"][0]
    assert expected.items() <= system["tags"].items(), "the system nodes are part of the cluster resource"
