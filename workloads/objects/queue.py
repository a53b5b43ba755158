"""Kueue's objects: the pool as a flavor, a cluster queue for all of it, and the namespace's local queue."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.objects.arguments import QUEUE
from workloads.objects.manifest import Manifest, build_manifest

_API = "kueue.x-k8s.io/v1beta2"


def build(facts: Facts) -> list[Manifest]:
    """Return flavor, cluster queue and local queue; the first two have no namespace and are named after the stack."""
    shared = f"{facts.stack}-training"
    flavor = {
        "nodeLabels": dict(facts.pool.node_selector),
        "tolerations": [item.manifest for item in facts.pool.tolerations],
    }
    quota = _quota(facts)
    resources = [{"name": name, "nominalQuota": value} for name, value in quota.items()]
    cluster_queue = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": facts.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        "resourceGroups": [{"coveredResources": list(quota), "flavors": [{"name": shared, "resources": resources}]}],
    }
    return [
        build_manifest(facts, _API, "ResourceFlavor", shared, {"spec": flavor}, namespaced=False),
        build_manifest(facts, _API, "ClusterQueue", shared, {"spec": cluster_queue}, namespaced=False),
        build_manifest(facts, _API, "LocalQueue", QUEUE, {"spec": {"clusterQueue": shared}}),
    ]


def _quota(facts: Facts) -> dict[str, str]:
    """Return the resources of the largest pool; Kueue admits no job that requests a resource without a quota."""
    nodes, instance = facts.pool.num_nodes_max, facts.pool.instance
    quota = {"cpu": str(nodes * instance.num_vcpus), "memory": f"{round(nodes * instance.memory_gib)}Gi"}
    for name, limit in facts.pool.resource_limits.items():
        if name not in quota:
            quota[name] = multiply_quantity(limit, nodes)
    return dict(sorted(quota.items()))


def multiply_quantity(quantity: str, factor: int) -> str:
    """Return a whole Kubernetes quantity (`8`, `5120Mi`) times a factor."""
    digits = quantity.rstrip("KMGTPEikm")
    assert digits.isdigit(), f"{quantity} is not a whole number with a unit"
    return f"{int(digits) * factor}{quantity[len(digits) :]}"
