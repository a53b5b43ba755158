"""Rule no-wildcard-rights: no policy or role allows every action, every resource or everyone."""

from __future__ import annotations

from collections.abc import Iterable

from infra.policy import facts
from infra.policy.rule import Config, resource_rule, strings
from infra.policy_facts import Props, Resource, dicts, listed, matches

_KUBERNETES_ROLES = {f"kubernetes:rbac.authorization.k8s.io/v1:{kind}" for kind in ("ClusterRole", "Role")}

_OPTIONS = {"exceptions": strings("Names of resources that may have such rights, as shell patterns.", [])}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Yield the violations of one resource."""
    if matches(resource.name, config["exceptions"]):
        return
    if resource.type in _KUBERNETES_ROLES:
        yield from _kubernetes_role(resource.props)
    yield from facts.violations(resource, lambda cloud: cloud.rights)


def _kubernetes_role(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("rules")):
        if "*" in listed(rule.get("verbs")) and "*" in listed(rule.get("resources")):
            yield "all verbs on all resources: name those that are needed"


POLICY = resource_rule(
    "no-wildcard-rights", "No policy or role allows every action, every resource or everyone.", check, _OPTIONS
)
