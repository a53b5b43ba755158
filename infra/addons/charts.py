"""The pinned table of charts, as data."""

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
    """One row: where a chart (or a kustomization) comes from, its version, the namespace it is installed in."""

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
        """What Helm or kustomize is given: a name within a repository, or a whole address.

        A kustomization is pinned by commit: a tag can be moved after it was read.
        """
        if self.kind == "oci":
            return f"{self.source}/{self.chart}"
        if self.kind == "kustomize":
            return f"{self.source}//{self.chart}?ref={self.commit}"
        return self.chart

    @property
    def check(self) -> str:
        """The command that shows newer versions."""
        if self.kind == "oci":
            return f"helm show chart {self.reference} | grep ^version"
        if self.kind == "kustomize":
            return f"git ls-remote --tags {self.source} 'v1.*'"
        return f"helm show chart {self.chart} --repo {self.source} | grep ^version"


@cache
def table() -> Mapping[str, Chart]:
    """All rows by key, in the order of the file."""
    rows = tomllib.loads((Path(__file__).parent / "charts.toml").read_text())
    return {key: Chart(key=key, **row) for key, row in rows.items()}
