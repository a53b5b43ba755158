"""Where a stack may be: the regions that are allowed, and one region only where none are named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from infra.policy.reading import Config, Resource, matches, stack_rule, strings

_KEYS = ("region", "location", "availabilityZone", "zone")
#: A zone is its region and a letter: us-west-2a, us-central1-a.
_ZONE = re.compile(r"^(?:([a-z]{2}(?:-[a-z]+)+-\d)[a-z]|([a-z]+-[a-z]+\d+)-[a-z])$")
#: In no region.
_NOWHERE = {"global", ""}
_CLOUDS = ("aws:*", "azure-native:*", "gcp:*")

_OPTIONS = {"regions": strings("Regions that are allowed, such as us-west-2; none named: any one, but only one.", [])}


def region(resource: Resource) -> str | None:
    """The region of a resource in the cloud's spelling without spaces; None where it has none or it is not known."""
    if not matches(resource.type, _CLOUDS):
        return None
    places = [resource.props.get(key) for key in _KEYS] + [resource.provider.get(key) for key in _KEYS]
    found = next((place for place in places if isinstance(place, str)), None)
    name = (found or "").lower().replace(" ", "")
    zone = _ZONE.match(name)
    name = (zone.group(1) or zone.group(2)) if zone else name
    return None if name in _NOWHERE else name


def check(resources: Sequence[Resource], config: Config) -> Iterable[tuple[str, str | None]]:
    """Violations of a stack."""
    found = {resource.urn: (resource, place) for resource in resources if (place := region(resource))}
    allowed = [name.lower().replace(" ", "") for name in config["regions"]]
    if not allowed:
        allowed = [name for name, _ in Counter(place for _, place in found.values()).most_common(1)]
    for urn, (resource, place) in found.items():
        if place not in allowed:
            yield f"{resource.name} is in {place}; allowed: {', '.join(allowed)}", urn


POLICY = stack_rule("allowed-regions", "A stack keeps to the allowed regions, or to one.", check, _OPTIONS)
