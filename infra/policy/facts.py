"""The facts of all clouds, which each cloud's `policy.py` provides, combined for the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

from infra import clouds
from infra.policy_facts import CloudPolicy, PropsCheck, Resource, matches

ValueT = TypeVar("ValueT")


@cache
def of_clouds() -> Sequence[CloudPolicy]:
    """Return the facts of every available cloud."""
    # Without the settings, which need more than the packages of the policy pack.
    return tuple(clouds.policy(name) for name in clouds.available())


def all_of(patterns: Callable[[CloudPolicy], Iterable[str]]) -> list[str]:
    """Return one kind of patterns of every cloud, each pattern once."""
    return list(dict.fromkeys(pattern for cloud in of_clouds() for pattern in patterns(cloud)))


def for_type(kind: str, tables: Callable[[CloudPolicy], Mapping[str, ValueT]]) -> list[ValueT]:
    """Return what the clouds' tables, whose keys are patterns of resource types, hold for a type."""
    return [value for cloud in of_clouds() for key, value in tables(cloud).items() if matches(kind, [key])]


def is_opaque(resource: Resource) -> bool:
    """Return whether it is a provider's component without visible properties; its children are checked instead."""
    return not resource.props and matches(resource.type, all_of(lambda cloud: cloud.component_types))


def violations(resource: Resource, checks: Callable[[CloudPolicy], Mapping[str, PropsCheck]]) -> Iterator[str]:
    """Yield what the clouds' checks find in a resource."""
    if not is_opaque(resource):
        for check in for_type(resource.type, checks):
            yield from check(resource.props)
