"""The network policy of a stack's pods: they may reach each other, DNS, HTTPS and named endpoints only."""

from __future__ import annotations

from collections.abc import Iterable

from workloads.facts import METRICS_PORT, PART_OF, Facts
from workloads.objects.manifest import Manifest, build_manifest

#: The clouds' instance metadata service, which also announces spot interruptions.
_METADATA = "169.254.169.254/32:80"


def network_policy(facts: Facts) -> Manifest:
    """Return the policy, which drops all other traffic if the cluster's network enforces policies.

    The addresses of object stores cannot be listed, so HTTPS is open to all; `job.egress` adds `cidr:port`.
    """
    own = {"podSelector": {"matchLabels": PART_OF}}
    endpoints = [_METADATA, *facts.identity_endpoints, *facts.job.egress]
    spec = {
        "podSelector": own["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [own]},
            {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": METRICS_PORT}]},
        ],
        "egress": [{"to": [own]}, _dns(), _https(), *_endpoint_rules(endpoints)],
    }
    return build_manifest(facts, "networking.k8s.io/v1", "NetworkPolicy", "training", {"spec": spec})


def _dns() -> Manifest:
    """Return the rule for DNS, open to all: some clusters use a cache on the node, which no pod selector matches."""
    return {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}


def _https() -> Manifest:
    """Return the rule for HTTPS, open to all."""
    return {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"protocol": "TCP", "port": 443}]}


def _endpoint_rules(addresses: Iterable[str]) -> list[Manifest]:
    """Return one rule for each `cidr:port`."""
    rules = []
    for address in dict.fromkeys(addresses):
        cidr, _, port = address.rpartition(":")
        rules.append({"to": [{"ipBlock": {"cidr": cidr}}], "ports": [{"protocol": "TCP", "port": int(port)}]})
    return rules
