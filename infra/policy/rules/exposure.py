"""Rule nothing-public: no node, API server, bucket, registry or service is open to the internet."""

from __future__ import annotations

from collections.abc import Iterable

from infra.policy import facts
from infra.policy.rule import Config, resource_rule, strings
from infra.policy_facts import Props, Resource, listed, matches, open_ranges

_OPTIONS = {
    "exceptions": strings("Names of resources that may be public, as shell patterns, such as *-monitoring-*.", []),
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Yield the violations of one resource."""
    if matches(resource.name, config["exceptions"]):
        return
    if resource.type == "kubernetes:core/v1:Service":
        yield from _service(resource.props)
    yield from facts.violations(resource, lambda cloud: cloud.exposure)


def _service(props: Props) -> Iterable[str]:
    spec, annotations = props.get("spec") or {}, (props.get("metadata") or {}).get("annotations") or {}
    internal = facts.all_of(lambda cloud: cloud.internal_load_balancers)
    if spec.get("type") != "LoadBalancer" or any(
        str(annotations.get(key, "")).lower() in {"internal", "true"} for key in internal
    ):
        return
    ranges = listed(spec.get("loadBalancerSourceRanges"))
    if not ranges:
        yield "the load balancer is open to the internet: make it internal, or set loadBalancerSourceRanges"
    yield from open_ranges(ranges, "the load balancer is open to")


POLICY = resource_rule(
    "nothing-public", "No node, API server, bucket, registry or service is open to 0.0.0.0/0.", check, _OPTIONS
)
