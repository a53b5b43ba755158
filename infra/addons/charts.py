"""The table of pinned charts in `charts.toml`, as data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Level = Literal["privileged", "baseline", "restricted"]


@dataclass(frozen=True)
class Chart:
    """One row of the table: the source of a chart or a kustomization, its version and its namespace."""

    key: str
    kind: Literal["chart", "oci", "kustomize"]
    source: str
    chart: str
    version: str
    namespace: str
    why: str
    commit: str = ""
    namespace_level: Level | None = None

    @property
    def reference(self) -> str:
        """Return what Helm or kustomize needs to find it: a name in a repository, or a full address.

        A kustomization is pinned by commit, because a tag can be moved.
        """
        if self.kind == "oci":
            return f"{self.source}/{self.chart}"
        if self.kind == "kustomize":
            return f"{self.source}//{self.chart}?ref={self.commit}"
        return self.chart

    @property
    def check(self) -> str:
        """Return the command that shows newer versions."""
        if self.kind == "oci":
            return f"helm show chart {self.reference} | grep ^version"
        if self.kind == "kustomize":
            return f"git ls-remote --tags {self.source} 'v1.*'"
        return f"helm show chart {self.chart} --repo {self.source} | grep ^version"


@cache
def table() -> Mapping[str, Chart]:
    """Return all rows by key, in the order of the file."""
    rows = tomllib.loads((Path(__file__).parent / "charts.toml").read_text())
    return {key: Chart(key=key, **row) for key, row in rows.items()}
