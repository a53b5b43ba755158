"""What follows from the Kubernetes version on GKE, and when GKE may upgrade a cluster by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import Literal

from infra.config import maintenance
from infra.config.problems import Problem, fix_by_setting

#: The only channel of this project. In a channel GKE upgrades the control plane, then the nodes, and refuses pools
#: without automatic upgrades.
CHANNEL = "REGULAR"

KubernetesVersion = Literal["1.35", "1.36"]
#: The end of standard support of each version, None where Google has published no date yet. GKE refuses exclusions
#: after it, and upgrades then. https://cloud.google.com/kubernetes-engine/docs/release-schedule (read 2026-11-22)
END_OF_SUPPORT: Mapping[str, date | None] = {"1.35": date(2027, 4, 11), "1.36": None}

#: GKE requires 48 hours of maintenance in any 32 days, in which a weekly window lies four times.
MIN_WINDOW_HOURS = 12
MAX_EXCLUSIONS = 20
#: The exclusion that `maintenance.automatic false` adds.
UNTIL_END_OF_SUPPORT = "until-end-of-support"


class Maintenance(maintenance.Maintenance):
    """When GKE may upgrade the cluster: one weekly window in UTC, of at least 12 hours, except during the exclusions.

    With `automatic` false GKE upgrades neither the minor version nor the nodes before the end of support.
    """

    automatic: bool = True

    def problems_for(self, version: str) -> Iterable[Problem]:
        """Yield what GKE refuses for a cluster of this Kubernetes version."""
        yield from self.problems()
        if self.hours < MIN_WINDOW_HOURS:
            key, message = "maintenance.hours", "GKE requires 48 hours of maintenance in any 32 days"
            allowed = f"{MIN_WINDOW_HOURS} to 24"
            yield Problem(key, message, allowed, fix_by_setting(key, MIN_WINDOW_HOURS), self.hours)
        most = MAX_EXCLUSIONS if self.automatic else MAX_EXCLUSIONS - 1
        if len(self.exclusions) > most:
            key, count = "maintenance.exclusions", len(self.exclusions)
            fix = f"pulumi config rm --path '{key}[{most}]'"
            yield Problem(key, "more exclusions than GKE accepts", f"at most {most}", fix, count)
        last = END_OF_SUPPORT[version]
        for index, exclusion in enumerate(self.exclusions):
            if exclusion.name == UNTIL_END_OF_SUPPORT:
                key, message = f"maintenance.exclusions[{index}].name", "the name of maintenance.automatic's exclusion"
                yield Problem(key, message, "another name", fix_by_setting(key, "long-run"), exclusion.name)
            if last and exclusion.end > last:
                key = f"maintenance.exclusions[{index}].end"
                message = f"after the end of support of Kubernetes {version}"
                yield Problem(key, message, f"{last} or earlier", fix_by_setting(key, last), str(exclusion.end))
