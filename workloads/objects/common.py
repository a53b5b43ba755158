"""The objects that every launcher's job stands on: settings, account, service, protection from disruption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.facts import COMPONENT_LABEL, RUN_LABEL, Facts
from workloads.objects.names import Manifest, hashed
from workloads.objects.pod import CONFIG_FILE

TRAINING = "training"


def training_labels(facts: Facts) -> dict[str, str]:
    """What finds the run's own pods, and its objects."""
    return {**facts.run_labels, COMPONENT_LABEL: TRAINING}


def component_labels(facts: Facts, component: str) -> dict[str, str]:
    """What finds the pods of a companion, which serves all runs of the stack."""
    return {**facts.common_labels, COMPONENT_LABEL: component}


#: Pulumi must not wait for a training to end.
NO_WAIT = {"pulumi.com/skipAwait": "true"}


def manifest(
    facts: Facts,
    api_version: str,
    kind: str,
    name: str,
    body: Mapping[str, Any],
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    namespaced: bool = True,
) -> Manifest:
    """An object with the labels of its stack, or those given."""
    metadata: Manifest = {"name": name, "labels": dict(labels or facts.common_labels)}
    if namespaced:
        metadata["namespace"] = facts.namespace
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def config_map(facts: Facts) -> Manifest:
    """The trainer's settings as the JSON that it parses with the same class; named by their content."""
    data = {CONFIG_FILE: facts.config.model_dump_json(exclude_defaults=True, indent=2)}
    name = hashed(f"{facts.job.run}-config", data)
    return manifest(facts, "v1", "ConfigMap", name, {"data": data, "immutable": True}, labels=training_labels(facts))


def service_account(facts: Facts) -> Manifest:
    """The account that the cloud lets into the bucket."""
    return manifest(
        facts,
        "v1",
        "ServiceAccount",
        facts.service_account,
        {"automountServiceAccountToken": False},
        annotations=facts.annotations or None,
    )


def selector(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels by which pods are found; the others (owner, cost centre) may change while a service stays."""
    return {key: labels[key] for key in (RUN_LABEL, COMPONENT_LABEL) if key in labels}


def headless_service(facts: Facts, name: str, labels: Mapping[str, str]) -> Manifest:
    """Names for the pods, also before they are ready: they find each other in order to become so."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(labels),
    }
    # An empty service is how Pulumi would see it until the first pod runs.
    return manifest(facts, "v1", "Service", name, {"spec": spec}, labels=labels, annotations=NO_WAIT)


def disruption_budget(facts: Facts) -> Manifest:
    """Keeps a drain from taking pods that the job cannot train without.

    `minAvailable` is a number: for pods whose owner has no scale subresource Kubernetes takes nothing else.
    """
    spec = {
        "minAvailable": facts.min_nodes,
        "selector": {"matchLabels": selector(training_labels(facts))},
        # A pod that is not ready protects nothing, and would only hold up the repair of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return manifest(
        facts, "policy/v1", "PodDisruptionBudget", facts.job.run, {"spec": spec}, labels=training_labels(facts)
    )


def resource_quota(facts: Facts) -> Manifest:
    """As many GPUs as the pool may have, and no way to the outside through a service."""
    hard = {"services.loadbalancers": "0", "services.nodeports": "0"}
    if facts.pool.gpus_per_node:
        hard["requests.nvidia.com/gpu"] = str(facts.pool.num_nodes_max * facts.pool.gpus_per_node)
    return manifest(facts, "v1", "ResourceQuota", "training", {"spec": {"hard": hard}})


def pod_monitor(facts: Facts) -> Manifest:
    """Prometheus asks the pods of the run; the process of rank 0 answers, the others have no endpoint."""
    spec = {
        "selector": {"matchLabels": selector(training_labels(facts))},
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    }
    return manifest(
        facts, "monitoring.coreos.com/v1", "PodMonitor", facts.job.run, {"spec": spec}, labels=training_labels(facts)
    )
