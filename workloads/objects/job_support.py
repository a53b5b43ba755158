"""The objects that support the training job of every launcher: settings, account, service, budget, quota, monitor."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.facts import Facts
from workloads.objects.manifest import NO_WAIT, Manifest, build_manifest, hashed_name, pod_selector, training_labels
from workloads.objects.pod import CONFIG_FILE


def config_map(facts: Facts) -> Manifest:
    """Return the trainer's settings as JSON, named by their content; the trainer parses them with the same class."""
    data = {CONFIG_FILE: facts.config.model_dump_json(exclude_defaults=True, indent=2)}
    name = hashed_name(f"{facts.job.run}-config", data)
    body = {"data": data, "immutable": True}
    return build_manifest(facts, "v1", "ConfigMap", name, body, labels=training_labels(facts))


def service_account(facts: Facts) -> Manifest:
    """Return the account that has access to the bucket."""
    return build_manifest(
        facts,
        "v1",
        "ServiceAccount",
        facts.service_account,
        {"automountServiceAccountToken": False},
        annotations=facts.annotations or None,
    )


def headless_service(facts: Facts, name: str, labels: Mapping[str, str]) -> Manifest:
    """Return the service that gives pods DNS names, also before they are ready: the rendezvous needs them."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": pod_selector(labels),
    }
    # Pulumi would wait for an endpoint, and there is none until the first pod runs.
    return build_manifest(facts, "v1", "Service", name, {"spec": spec}, labels=labels, annotations=NO_WAIT)


def disruption_budget(facts: Facts) -> Manifest | None:
    """Return the budget that lets an elastic job continue with its smallest number of nodes during a drain.

    A job that needs all of its nodes has none. It saves on SIGTERM and resumes, and after the first eviction the other
    pods only wait: each further pod that a budget protects costs one more restart, and a node without a replacement
    outlasts the drain. The clouds give up after 15 minutes (EKS) or 30 (AKS), or evict anyway after an hour (GKE).

    `minAvailable` is a number: Kubernetes allows nothing else for pods whose owner has no scale subresource.
    """
    if facts.min_nodes == facts.nodes:
        return None
    labels = training_labels(facts)
    spec = {
        "minAvailable": facts.min_nodes,
        "selector": {"matchLabels": pod_selector(labels)},
        # A pod that is not ready does no work, and protecting it would delay the repair of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return build_manifest(facts, "policy/v1", "PodDisruptionBudget", facts.job.run, {"spec": spec}, labels=labels)


def resource_quota(facts: Facts) -> Manifest:
    """Return the quota: the GPUs of the largest pool, and no service that is reachable from outside."""
    hard = {"services.loadbalancers": "0", "services.nodeports": "0"}
    if facts.pool.gpus_per_node:
        hard["requests.nvidia.com/gpu"] = str(facts.pool.num_nodes_max * facts.pool.gpus_per_node)
    return build_manifest(facts, "v1", "ResourceQuota", "training", {"spec": {"hard": hard}})


def pod_monitor(facts: Facts) -> Manifest:
    """Return the monitor with which Prometheus scrapes the run's pods; only rank 0 has an endpoint."""
    labels = training_labels(facts)
    spec = {
        "selector": {"matchLabels": pod_selector(labels)},
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    }
    return build_manifest(facts, "monitoring.coreos.com/v1", "PodMonitor", facts.job.run, {"spec": spec}, labels=labels)
