"""Rule allowed-regions: a stack uses the allowed regions only, or a single region where none are configured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from infra.policy import facts
from infra.policy.rule import Config, stack_rule, strings
from infra.policy_facts import Resource, matches

_KEYS = ("region", "location", "availabilityZone", "zone")
#: Locations of resources that belong to no region.
_NO_REGION = {"global", ""}

_OPTIONS = {"regions": strings("Regions that are allowed, such as us-west-2; empty: any region, but only one.", [])}


def region(resource: Resource) -> str | None:
    """Return a resource's region in lower case without spaces, None where it has none or it is not known."""
    cloud = next((item for item in facts.of_clouds() if matches(resource.type, item.types)), None)
    if cloud is None:
        return None
    places = [resource.props.get(key) for key in _KEYS] + [resource.provider.get(key) for key in _KEYS]
    found = next((place for place in places if isinstance(place, str)), None)
    name = (found or "").lower().replace(" ", "")
    zone = cloud.zone.match(name) if cloud.zone else None
    name = zone.group(1) if zone else name
    return None if name in _NO_REGION else name


def check(resources: Sequence[Resource], config: Config) -> Iterable[tuple[str, str | None]]:
    """Yield the violations of a stack."""
    found = {resource.urn: (resource, place) for resource in resources if (place := region(resource))}
    allowed = [name.lower().replace(" ", "") for name in config["regions"]]
    if not allowed:
        allowed = [name for name, _ in Counter(place for _, place in found.values()).most_common(1)]
    for urn, (resource, place) in found.items():
        if place not in allowed:
            yield f"{resource.name} is in {place}; allowed: {', '.join(allowed)}", urn


POLICY = stack_rule("allowed-regions", "A stack keeps to the allowed regions, or to one.", check, _OPTIONS)
