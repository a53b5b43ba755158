"""Facts and prices of instance types, read from `catalog.toml` here and in each cloud's folder."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class InstanceType:
    """One row of the catalog. Prices are USD per hour in `region`, None where no trustworthy figure is known.

    `memory_gib` is host memory, `hbm_gib_per_gpu` one GPU's; `hbm_gb_per_second` and `nvlink_gb_per_second` are one
    GPU's bandwidth to its memory and to its neighbours (0 without NVLink); `network_gbps` is the node's.
    `num_network_cards` counts fabric cards; `accelerator` is what the cloud's API calls the GPU, where it asks.
    """

    cloud: str
    name: str
    gpu_model: str
    num_gpus: int
    hbm_gib_per_gpu: float
    hbm_gb_per_second: float
    nvlink_gb_per_second: float
    num_vcpus: int
    memory_gib: float
    network_gbps: float
    num_network_cards: int
    fabric: str
    on_demand_usd_per_hour: float | None
    as_of: str
    source: str
    spot_usd_per_hour: float | None = None
    region: str = ""
    accelerator: str = ""


def instances(cloud: str | None = None) -> tuple[InstanceType, ...]:
    """All rows, or those of one cloud, in the order of the file."""
    rows = _read(_HERE / "catalog.toml") + tuple(row for path in _cloud_catalogs() for row in _read(path))
    return tuple(row for row in rows if cloud is None or row.cloud == cloud)


def instance(cloud: str, name: str) -> InstanceType:
    """The row of one type; ValueError with the legal list when the cloud has no such type."""
    rows = instances(cloud)
    for row in rows:
        if row.name == name:
            return row
    raise ValueError(f"no instance type {name!r} for {cloud!r}; legal: {', '.join(row.name for row in rows) or 'none'}")


def _cloud_catalogs() -> list[Path]:
    """Catalogs that clouds bring along, so that adding a cloud stays adding one folder."""
    from infra import clouds

    return [path for folder in clouds.folders() if (path := folder / "catalog.toml").is_file()]


@cache
def _read(path: Path) -> tuple[InstanceType, ...]:
    table = tomllib.loads(path.read_text())
    return tuple(
        InstanceType(cloud=cloud, name=name, **facts) for cloud, types in table.items() for name, facts in types.items()
    )
