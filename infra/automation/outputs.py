"""The outputs of a stack that is up, with types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.automation.errors import OperationError

HIDDEN = "[secret]"


@dataclass(frozen=True)
class HourlyUsd:
    """USD per hour at `gpu.nodes.desired` and at `gpu.nodes.max`; spot is None where a spot price is not known."""

    on_demand: float
    spot: float | None
    on_demand_at_max: float
    spot_at_max: float | None


@dataclass(frozen=True)
class StackOutputs:
    """The outputs of a stack.

    `kubeconfig` is a secret and is not printed; it is None where the job runs on a training service. `job` holds the
    run, its namespace, and the kind and name of its object.
    """

    account: str
    cluster_name: str
    kubeconfig: str | None = field(repr=False)
    bucket_uri: str
    checkpoint_uri: str
    registry: str | None
    hourly_cost_usd: HourlyUsd
    next_steps: tuple[str, ...]
    job: Mapping[str, object]

    def as_dict(self, *, secrets: bool = False) -> dict[str, object]:
        """Return plain values for printing, with the kubeconfig only if `secrets` is set."""
        values = dataclasses.asdict(self)
        return values if secrets or self.kubeconfig is None else {**values, "kubeconfig": HIDDEN}


def parse_outputs(stack: str, values: Mapping[str, Any]) -> StackOutputs:
    """Return the engine's outputs with types; raise OperationError if some are missing, as after a failed `up`."""
    names = [item.name for item in dataclasses.fields(StackOutputs)]
    # The engine does not store an output without a value, such as the registry of a cluster that has none.
    required = [name for name in names if name not in ("registry", "kubeconfig")]
    missing = [name for name in required if name not in values]
    if missing:
        what = "has no outputs" if len(missing) == len(required) else f"has no output {', '.join(missing)}"
        raise OperationError(f"stack {stack!r} {what}: it is not up. Fix: python -m infra up --stack {stack}")
    return StackOutputs(
        account=values["account"],
        cluster_name=values["cluster_name"],
        kubeconfig=values.get("kubeconfig"),
        bucket_uri=values["bucket_uri"],
        checkpoint_uri=values["checkpoint_uri"],
        registry=values.get("registry"),
        hourly_cost_usd=_parse_cost(values["hourly_cost_usd"]),
        next_steps=tuple(values["next_steps"]),
        job=values["job"],
    )


def _parse_cost(values: Mapping[str, Any]) -> HourlyUsd:
    return HourlyUsd(
        on_demand=values["on_demand"],
        spot=values.get("spot"),
        on_demand_at_max=values["on_demand_at_max"],
        spot_at_max=values.get("spot_at_max"),
    )
