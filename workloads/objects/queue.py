"""Kueue's objects: the pool as a flavor, a queue that may use all of it, and the namespace's way into that queue."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.objects.arguments import QUEUE
from workloads.objects.common import manifest
from workloads.objects.names import Manifest

_API = "kueue.x-k8s.io/v1beta2"


def manifests(facts: Facts) -> list[Manifest]:
    """Flavor, cluster queue, local queue; the first two belong to the whole cluster, so they carry the stack's name."""
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
        manifest(facts, _API, "ResourceFlavor", shared, {"spec": flavor}, namespaced=False),
        manifest(facts, _API, "ClusterQueue", shared, {"spec": cluster_queue}, namespaced=False),
        manifest(facts, _API, "LocalQueue", QUEUE, {"spec": {"clusterQueue": shared}}),
    ]


def _quota(facts: Facts) -> dict[str, str]:
    """All that the pool may grow to. Kueue holds back a job that asks for anything no quota names."""
    nodes, instance = facts.pool.num_nodes_max, facts.pool.instance
    quota = {"cpu": str(nodes * instance.num_vcpus), "memory": f"{round(nodes * instance.memory_gib)}Gi"}
    for name, limit in facts.pool.resource_limits.items():
        if name not in quota:
            quota[name] = times(limit, nodes)
    return dict(sorted(quota.items()))


def times(quantity: str, factor: int) -> str:
    """A whole Kubernetes quantity (`8`, `5120Mi`) times a number."""
    digits = quantity.rstrip("KMGTPEikm")
    assert digits.isdigit(), f"{quantity} is not a whole number with a unit"
    return f"{int(digits) * factor}{quantity[len(digits) :]}"
