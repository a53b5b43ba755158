"""Facts and prices of instance types, read from `catalog.toml` files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE_NAME = "catalog.toml"
#: Folders that are searched for catalogs, in their subfolders only: a cloud's folder may contain its own catalog.
search_path = [Path(__file__).parent.parent / "clouds"]


@dataclass(frozen=True)
class InstanceType:
    """One row of the catalog; prices are USD per hour in `region`, None if no trustworthy figure is known.

    `memory_gib` is host memory, `hbm_gib_per_gpu` the memory of one GPU. `hbm_gb_per_second` and
    `nvlink_gb_per_second` are one GPU's bandwidth to its memory and to its neighbours (0 without NVLink).
    `network_gbps` is the bandwidth of the node, `num_network_cards` counts its fabric cards. `accelerator` is the name
    of the GPU in the cloud's API, for clouds that require one.
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
    """Return all rows, or those of one cloud, in the order of the files."""
    files = [Path(__file__).parent / _FILE_NAME]
    files += [file for folder in search_path for file in sorted(folder.glob(f"*/{_FILE_NAME}"))]
    return tuple(row for file in files for row in _read(file) if cloud is None or row.cloud == cloud)


def instance(cloud: str, name: str) -> InstanceType:
    """Return the row of one type; raise ValueError with the allowed names if the cloud has no such type."""
    rows = {row.name: row for row in instances(cloud)}
    if name not in rows:
        raise ValueError(f"no such instance type of {cloud!r}: got {name!r}; allowed: {', '.join(rows) or 'none'}")
    return rows[name]


@cache
def _read(file: Path) -> tuple[InstanceType, ...]:
    table = tomllib.loads(file.read_text())
    return tuple(
        InstanceType(cloud=cloud, name=name, **facts) for cloud, types in table.items() for name, facts in types.items()
    )
