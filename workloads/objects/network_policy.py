"""Who the pods of a stack may talk to: each other, DNS, the object store, and nobody else."""

from __future__ import annotations

from collections.abc import Iterable

from workloads.facts import METRICS_PORT, PART_OF, Facts
from workloads.objects.common import manifest
from workloads.objects.names import Manifest

#: Where clouds answer a node's questions about itself: the notice of a preemption among them.
_METADATA = "169.254.169.254/32:80"


def network_policy(facts: Facts) -> Manifest:
    """Everything in or out that is not named here is dropped, where the cluster's network enforces policies.

    Object stores have addresses that no policy can list, so HTTPS goes anywhere; `job.egress` adds `cidr:port`.
    """
    own = {"podSelector": {"matchLabels": PART_OF}}
    further = [_METADATA, *facts.identity_endpoints, *facts.job.egress]
    spec = {
        "podSelector": own["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [own]},
            {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]},
        ],
        "egress": [{"to": [own]}, _dns(), _https(), *_endpoints(further)],
    }
    return manifest(facts, "networking.k8s.io/v1", "NetworkPolicy", "training", {"spec": spec})


def _dns() -> Manifest:
    """Port 53 anywhere: some clusters resolve through a cache on the node, which no selector of pods reaches."""
    return {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}


def _https() -> Manifest:
    return {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"protocol": "TCP", "port": 443}]}


def _endpoints(addresses: Iterable[str]) -> list[Manifest]:
    rules = []
    for address in dict.fromkeys(addresses):
        cidr, _, port = address.rpartition(":")
        rules.append({"to": [{"ipBlock": {"cidr": cidr}}], "ports": [{"protocol": "TCP", "port": int(port)}]})
    return rules
