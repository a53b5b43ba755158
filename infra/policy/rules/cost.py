"""Rule cost-ceiling: limits the hourly cost of a stack's nodes, counted from its resources, not from its settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from infra import catalog, clouds
from infra.policy import facts
from infra.policy.rule import Config, stack_rule
from infra.policy_facts import NodePool, Resource

_OPTIONS: dict[str, dict[str, Any]] = {
    "maxUsdPerHour": {
        "type": "number",
        "default": 100,
        "description": "The most that all nodes may cost, on demand, when every pool is at its maximum.",
    },
    "prices": {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "default": {},
        "description": "USD per hour of instance types that this project has no price for.",
    },
}


def pools(resources: Sequence[Resource]) -> Iterator[tuple[Resource, NodePool]]:
    """Yield each pool of nodes with the resource that defines it."""
    by_urn = {item.urn: item for item in resources}
    for item in resources:
        dependencies = [by_urn[urn] for urn in item.needs if urn in by_urn]
        for read in facts.for_type(item.type, lambda cloud: cloud.node_pools):
            for pool in read(item.props, dependencies):
                yield item, pool


def check(resources: Sequence[Resource], config: Config) -> Iterable[tuple[str, str | None]]:
    """Yield the violations of a stack."""
    prices = {**_prices(), **config["prices"]}
    total, terms = 0.0, []
    for resource, pool in pools(resources):
        name, count = pool.instance_type, pool.num_nodes_max
        if name not in prices:
            yield f"no price is known for {name} ({resource.name}): set it in this rule's `prices`", resource.urn
            continue
        total += count * prices[name]
        terms.append(f"{count:g} x {name} at {prices[name]:g}")
    if total > config["maxUsdPerHour"]:
        limit = config["maxUsdPerHour"]
        yield f"{total:.2f} USD per hour at most ({' + '.join(terms)}), and maxUsdPerHour is {limit:g}", None


@cache
def _prices() -> Mapping[str, float]:
    """Return on-demand prices: the catalog's GPU types and the system nodes in the clouds' `prices.toml`."""
    found = {item.name: item.on_demand_usd_per_hour for item in catalog.instances() if item.on_demand_usd_per_hour}
    for folder in clouds.folders():
        path = folder / "prices.toml"
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for name, price in {**tables.get("system_nodes", {}), **tables.get("system", {})}.items():
            value = price.get("usd_per_hour") if isinstance(price, dict) else price
            if isinstance(value, float):
                found[name] = value
    return found


POLICY = stack_rule("cost-ceiling", "All nodes together cost no more than a ceiling.", check, _OPTIONS)
