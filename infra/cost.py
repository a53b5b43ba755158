"""What an hour of a stack costs, from the catalog and from what a cloud's settings add."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra import catalog
from infra.config.problems import Problem, fix_by_setting

if TYPE_CHECKING:
    from infra.config.settings import StackSettings


@dataclass(frozen=True)
class CostLine:
    """One item of the bill, USD per hour and unit; `spot_usd_per_hour` is None where the item has no spot price.

    `interruptible` items are billed at spot when the stack asks for spot capacity.
    """

    what: str
    count: float
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None = None
    interruptible: bool = False


@dataclass(frozen=True)
class HourlyCost:
    """The sum: on demand, and at spot prices where they are known (None when an interruptible item has none)."""

    lines: Sequence[CostLine]

    @property
    def on_demand_usd(self) -> float:
        """USD per hour with everything on demand."""
        return round(sum(line.count * line.on_demand_usd_per_hour for line in self.lines), 4)

    @property
    def spot_usd(self) -> float | None:
        """USD per hour with the interruptible items at spot; None when a spot price is not known."""
        total = 0.0
        for line in self.lines:
            price = line.spot_usd_per_hour if line.interruptible and line.count else line.on_demand_usd_per_hour
            if price is None:
                return None
            total += line.count * price
        return round(total, 4)

    def billed(self, interruptible: bool) -> float:
        """What counts against a budget: spot where the pool is spot and its price is known, else on demand."""
        spot = self.spot_usd
        return spot if interruptible and spot is not None else self.on_demand_usd


def gpu_nodes(cloud: str, instance_type: str, count: int) -> CostLine:
    """The GPU pool's line; a type or price that the catalog lacks counts as 0, other checks name it."""
    row = next((item for item in catalog.instances(cloud) if item.name == instance_type), None)
    price = row.on_demand_usd_per_hour if row and row.on_demand_usd_per_hour else 0.0
    return CostLine(instance_type, count, price, row.spot_usd_per_hour if row else None, interruptible=True)


def over_budget(settings: StackSettings) -> Iterable[Problem]:
    """The problem of a stack whose pool at its maximum costs more than `budget.max_usd_per_hour`."""
    ceiling = settings.budget.max_usd_per_hour
    if ceiling is None:
        return
    total = HourlyCost(settings.cost_lines(settings.gpu.nodes.max))
    billed = total.billed(settings.interruptible)
    if billed <= ceiling:
        return
    items = " + ".join(f"{line.count:g} x {line.what} at {line.on_demand_usd_per_hour:g}" for line in total.lines)
    known = (
        "" if not settings.interruptible or total.spot_usd is not None else " (no spot price known, on demand counted)"
    )
    wrong = f"the stack costs {billed:.2f} USD per hour at gpu.nodes.max: {items}{known}"
    key = "budget.max_usd_per_hour"
    yield Problem(
        key, wrong, f"at least {billed:.2f}, or fewer nodes", fix_by_setting(key, f"{billed + 0.005:.2f}"), ceiling
    )
