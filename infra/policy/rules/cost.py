"""A ceiling on what a stack's nodes may cost an hour, counted from the resources and not from the settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from infra import catalog, clouds
from infra.policy.reading import Config, Props, Resource, dicts, listed, stack_rule

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


def pools(resources: Sequence[Resource]) -> Iterator[tuple[Resource, str, float]]:
    """Each pool of nodes: the instance type and how many nodes it may have at most."""
    templates = {item.urn: item for item in resources if item.type == "aws:ec2/launchTemplate:LaunchTemplate"}
    for item in resources:
        props = item.props
        if item.type == "aws:eks/nodeGroup:NodeGroup":
            needed = [templates[urn].props for urn in item.needs if urn in templates]
            kinds = listed(props.get("instanceTypes")) or [template.get("instanceType") for template in needed]
            yield (
                item,
                str(kinds[0] if kinds else "unknown"),
                _number((props.get("scalingConfig") or {}).get("maxSize")),
            )
        elif item.type == "azure-native:containerservice:AgentPool":
            yield item, str(props.get("vmSize")), _azure_nodes(props)
        elif item.type == "azure-native:containerservice:ManagedCluster":
            for pool in dicts(props.get("agentPoolProfiles")):
                yield item, str(pool.get("vmSize")), _azure_nodes(pool)
        elif item.type == "gcp:container/nodePool:NodePool":
            scaling, zones = props.get("autoscaling") or {}, len(listed(props.get("nodeLocations"))) or 1
            in_each = scaling.get("maxNodeCount") or props.get("nodeCount") or props.get("initialNodeCount")
            most = _number(scaling.get("totalMaxNodeCount")) or _number(in_each) * zones
            yield item, str((props.get("nodeConfig") or {}).get("machineType")), most
        elif item.type == "azure-native:machinelearningservices:Compute":
            compute = (props.get("properties") or {}).get("properties") or {}
            yield item, str(compute.get("vmSize")), _number((compute.get("scaleSettings") or {}).get("maxNodeCount"))
        elif item.type == "pulumi-python:dynamic/vertex:CustomJob":
            yield item, str(props.get("machineType")), _number(props.get("numMachines"))


def check(resources: Sequence[Resource], config: Config) -> Iterable[tuple[str, str | None]]:
    """Violations of a stack."""
    prices = {**_prices(), **config["prices"]}
    total, parts = 0.0, []
    for pool, kind, count in pools(resources):
        if kind not in prices:
            text = f"no price is known for {kind} ({pool.name}): give it in this rule's `prices`"
            yield text, pool.urn
            continue
        total += count * prices[kind]
        parts.append(f"{count:g} x {kind} at {prices[kind]:g}")
    if total > config["maxUsdPerHour"]:
        sums = " + ".join(parts)
        yield f"{total:.2f} USD per hour at most ({sums}), and maxUsdPerHour is {config['maxUsdPerHour']:g}", None


@cache
def _prices() -> Mapping[str, float]:
    """On-demand prices: the catalog's GPU types and the node types of the clouds' own tables."""
    found = {item.name: item.on_demand_usd_per_hour for item in catalog.instances() if item.on_demand_usd_per_hour}
    for folder in clouds.folders():
        path = folder / "prices.toml"
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for name, price in {**tables.get("system_nodes", {}), **tables.get("system", {})}.items():
            value = price.get("usd_per_hour") if isinstance(price, dict) else price
            if isinstance(value, float):
                found[name] = value
    return found


def _azure_nodes(pool: Props) -> float:
    return _number(pool.get("maxCount") if pool.get("enableAutoScaling") else pool.get("count"))


def _number(value: object) -> float:
    """A count; 0 where it is absent or not known yet."""
    return float(value) if isinstance(value, (int, float)) else 0.0


POLICY = stack_rule("cost-ceiling", "All nodes together cost no more than a ceiling.", check, _OPTIONS)
