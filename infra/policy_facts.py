"""What a cloud's `policy.py` gives the policy pack, and helpers that read the properties of resources."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

Props = dict[str, Any]

#: What security rules of the clouds call any address.
_ANYONE = {"*", "any", "internet"}


class _Unknown(dict[str, Any]):
    """A value that a preview does not know: it is present and true, and so is everything inside it."""

    def __bool__(self) -> bool:
        return True

    def get(self, *_: object) -> Any:
        """Return the same unknown value for every key."""
        return self


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Resource:
    """A resource as rules see it. A property that a preview does not know is `UNKNOWN`; `up` checks it.

    `provider` holds the properties of the resource's provider, `needs` the URNs of the resources it depends on.
    """

    type: str
    name: str
    props: Props
    urn: str = ""
    provider: Props = field(default_factory=dict)
    needs: Sequence[str] = ()


@dataclass(frozen=True)
class NodePool:
    """A pool of nodes or of machines: the instance type and the largest number of them."""

    instance_type: str
    num_nodes_max: float


#: Yields a violation for each mistake in the properties of a resource.
PropsCheck = Callable[[Props], Iterable[str]]
#: Yields the pools of a resource, given its properties and the resources that it depends on.
PoolReader = Callable[[Props, Sequence[Resource]], Iterable[NodePool]]


@dataclass(frozen=True)
class CloudPolicy:
    """Facts about one cloud's resource types. Every type, name, image and path may be a shell pattern.

    `encryption`, `exposure` and `rights` check resources by type, for the rules encryption-at-rest, nothing-public and
    no-wildcard-rights. `node_pools` reads the pools of a type, for the rule cost-ceiling.

    `types` are the types that have a region and tags. `component_types` are components of a provider, which have tags
    but whose properties the engine may hide. Types in `untaggable` have no tags unless they are also in `taggable`;
    resources named in `untagged_names` are exempt. `tags_within` names the property that holds a type's tags where they
    are not at the top. `zone` matches the name of a zone and captures its region.

    An annotation in `internal_load_balancers` makes a Kubernetes load balancer internal. Images in `images_by_tag` may
    be named by tag. Images in `fabric_images` are daemons that manage a fabric, whose pods may mount
    `fabric_host_paths`.
    """

    types: Sequence[str] = ()
    component_types: Sequence[str] = ()
    encryption: Mapping[str, PropsCheck] = field(default_factory=dict)
    exposure: Mapping[str, PropsCheck] = field(default_factory=dict)
    rights: Mapping[str, PropsCheck] = field(default_factory=dict)
    node_pools: Mapping[str, PoolReader] = field(default_factory=dict)
    untaggable: Sequence[str] = ()
    taggable: Sequence[str] = ()
    untagged_names: Sequence[str] = ()
    tags_within: Mapping[str, str] = field(default_factory=dict)
    zone: re.Pattern[str] | None = None
    internal_load_balancers: Sequence[str] = ()
    images_by_tag: Sequence[str] = ()
    fabric_images: Sequence[str] = ()
    fabric_host_paths: Sequence[str] = ()


def matches(text: str, patterns: Iterable[str]) -> bool:
    """Return whether a text matches one of the shell patterns."""
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


def listed(value: Any) -> list[Any]:
    """Return a value as a list: a single value becomes a list of one, None an empty list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def dicts(value: Any) -> list[Props]:
    """Return the dictionaries in a list, or the one dictionary, without those that are unknown."""
    return [item for item in listed(value) if isinstance(item, dict) and item is not UNKNOWN]


def number(value: object) -> float:
    """Return a count, 0 where it is absent or not known yet."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def is_true(value: object) -> bool:
    """Return whether a flag is set or not known yet; the engine passes some flags as text."""
    return value is True or value == "true" or value is UNKNOWN


def require_flag(key: str, what: str) -> PropsCheck:
    """Return a check that the flag `key`, which encrypts `what`, is set."""

    def check(props: Props) -> Iterable[str]:
        if not is_true(props.get(key)):
            yield f"{key} is {props.get(key)!r}: {what} must be encrypted; set {key} to true"

    return check


def is_open(source: Any) -> bool:
    """Return whether a range admits the whole internet, or a half or a quarter of it."""
    text = str(source).lower()
    if text in _ANYONE:
        return True
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return False  # a tag, a group or a service of the cloud
    return network.prefixlen < (8 if network.version == 4 else 16)


def open_ranges(values: Iterable[Any], what: str) -> Iterator[str]:
    """Yield a violation for each range that is open to the internet; `what` says what it is allowed to do."""
    for value in values:
        if is_open(value):
            yield f"{what} {value}: name the ranges that need it"
