"""Everything that follows from the Kubernetes version of an AKS cluster.

AKS chooses the versions of its own add-ons, and its node pools get the newest image of their version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date

from infra.config.problems import Problem, fix_by_setting

_KEY = "cluster.kubernetes_version"


@dataclass(frozen=True)
class Release:
    """One minor version: the last month of its support, and the operating system of its nodes."""

    supported_until: date
    node_os: str


#: https://learn.microsoft.com/azure/aks/supported-kubernetes-versions (August 2026).
RELEASES: Mapping[str, Release] = {
    "1.34": Release(date(2026, 11, 30), "Ubuntu 22.04"),
    "1.35": Release(date(2027, 3, 31), "Ubuntu 24.04"),
    "1.36": Release(date(2027, 6, 30), "Ubuntu 24.04"),
}


def minor(version: str) -> str:
    """Return the minor version of a version that may name a patch."""
    return ".".join(version.split(".")[:2])


def problems(version: str) -> Iterable[Problem]:
    """Check that AKS offers the version."""
    if minor(version) not in RELEASES:
        allowed = f"{' | '.join(RELEASES)}, or one of their patches"
        nearest = min(RELEASES, key=lambda known: abs(number(known) - number(version)))
        yield Problem(_KEY, "not a Kubernetes version that AKS offers", allowed, fix_by_setting(_KEY, nearest), version)


def number(version: str) -> int:
    """Return the number of the minor version."""
    return int(version.split(".")[1])
