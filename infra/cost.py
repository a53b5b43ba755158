"""The cost of a stack per hour, computed from catalog prices and from the items that a cloud's settings add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra import catalog


@dataclass(frozen=True)
class CostLine:
    """One item of the bill, in USD per hour and unit; `spot_usd_per_hour` is None if the item has no spot price.

    `interruptible` items are billed at the spot price if the stack requests spot capacity.
    """

    what: str
    count: float
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None = None
    interruptible: bool = False


@dataclass(frozen=True)
class HourlyCost:
    """The sum of all items, on demand and at spot prices."""

    lines: Sequence[CostLine]

    @property
    def on_demand_usd(self) -> float:
        """Return the USD per hour with all items on demand."""
        return round(sum(line.count * line.on_demand_usd_per_hour for line in self.lines), 4)

    @property
    def spot_usd(self) -> float | None:
        """Return the USD per hour with interruptible items at spot prices; None if one of these is unknown."""
        total = 0.0
        for line in self.lines:
            price = line.spot_usd_per_hour if line.interruptible and line.count else line.on_demand_usd_per_hour
            if price is None:
                return None
            total += line.count * price
        return round(total, 4)

    def billed(self, interruptible: bool) -> float:
        """Return the cost that counts against a budget: spot if the pool is spot and its price is known."""
        spot = self.spot_usd
        return spot if interruptible and spot is not None else self.on_demand_usd


def gpu_nodes(cloud: str, instance_type: str, count: int) -> CostLine:
    """Return the GPU pool's item; an unknown type or price counts as 0, because other checks report it."""
    row = next((item for item in catalog.instances(cloud) if item.name == instance_type), None)
    price = row.on_demand_usd_per_hour if row and row.on_demand_usd_per_hour else 0.0
    return CostLine(instance_type, count, price, row.spot_usd_per_hour if row else None, interruptible=True)
