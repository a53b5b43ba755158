"""Rule tags-present: every resource that can have tags or labels names its owner and its cost centre."""

from __future__ import annotations

from collections.abc import Iterable

from infra.policy import facts
from infra.policy.rule import Config, resource_rule, strings
from infra.policy_facts import UNKNOWN, Resource, matches

#: Properties that hold tags or labels.
_KEYS = ("tags", "labels", "resourceLabels", "userLabels")

_OPTIONS = {
    "required": strings("Keys that each resource must have.", ["project", "stack", "owner", "cost-centre"]),
    "exceptions": strings(
        "Names of resources, as shell patterns, that need no tags.", facts.all_of(lambda cloud: cloud.untagged_names)
    ),
    "untaggable": strings("Further types, as shell patterns, that cannot have tags.", []),
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Yield the violations of one resource."""
    if matches(resource.name, config["exceptions"]) or not _can_have_tags(resource, config):
        return
    holders = [resource.props.get(key) or {} for key in facts.for_type(resource.type, lambda cloud: cloud.tags_within)]
    props = holders[0] if holders else resource.props
    found = [props[key] for key in _KEYS if isinstance(props.get(key), dict)]
    if UNKNOWN in found:
        return
    present = {key for tags in found for key in tags}
    missing = [key for key in config["required"] if key not in present]
    if missing:
        yield f"no tag or label {', '.join(missing)}: give it the stack's labels (settings.labels)"


def _can_have_tags(resource: Resource, config: Config) -> bool:
    of_clouds = facts.all_of(lambda cloud: (*cloud.types, *cloud.component_types))
    if facts.is_opaque(resource) or not matches(resource.type, of_clouds):
        return False
    untaggable = [*facts.all_of(lambda cloud: cloud.untaggable), *config["untaggable"]]
    return matches(resource.type, facts.all_of(lambda cloud: cloud.taggable)) or not matches(resource.type, untaggable)


POLICY = resource_rule("tags-present", "Every resource names its owner and its cost centre.", check, _OPTIONS)
