"""The weekly window in which a cloud may upgrade a cluster, and the dates on which it may not."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infra.config.problems import Problem, fix_by_removing, fix_by_setting
from infra.config.settings import Section


def _drop_midnight(value: object) -> object:
    """Return the date of a time stamp: Pulumi passes a date of a stack's file on as `2026-12-01 00:00:00 +0000 UTC`."""
    return value.removesuffix(" 00:00:00 +0000 UTC") if isinstance(value, str) else value


Date = Annotated[date, BeforeValidator(_drop_midnight), Field(examples=["2026-12-01"])]


#: The days of a week in the order of `date.weekday()`.
Day = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


class Exclusion(Section):
    """A period without upgrades, from 00:00 UTC of its first day to the end of its last day."""

    name: str = Field(
        pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="a lowercase letter, then at most 39 of a-z, 0-9 and -, the last no hyphen",
        examples=["long-run"],
    )
    start: Date
    end: Date = Field(le=date(2100, 12, 31))

    @property
    def num_days(self) -> int:
        """Return the number of days, the first and the last included."""
        return (self.end - self.start).days + 1


class Maintenance(Section):
    """When the cloud may upgrade the cluster and its nodes: one weekly window in UTC, except during the exclusions.

    AKS accepts windows of 4 to 24 hours:
    https://learn.microsoft.com/azure/aks/planned-maintenance
    GKE requires 48 hours in 32 days, made of windows of at least 4 hours, thus 12 hours of a weekly window:
    https://cloud.google.com/kubernetes-engine/docs/concepts/maintenance-windows-and-exclusions
    """

    day: Day = "saturday"
    start: str = Field("02:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$", description="HH:MM in UTC", examples=["02:00"])
    hours: int = Field(12, ge=4, le=24)
    exclusions: tuple[Exclusion, ...] = ()

    def problems(self) -> Iterable[Problem]:
        """Yield exclusions that end before they start, and names used twice."""
        names: set[str] = set()
        for index, exclusion in enumerate(self.exclusions):
            path = f"maintenance.exclusions[{index}]"
            if exclusion.end < exclusion.start:
                key, allowed = f"{path}.end", f"{exclusion.start} or later"
                fix = fix_by_setting(key, exclusion.start)
                yield Problem(key, f"before its start ({exclusion.start})", allowed, fix, str(exclusion.end))
            if exclusion.name in names:
                key = f"{path}.name"
                yield Problem(key, "a name used twice", "a name of its own", fix_by_removing(path), exclusion.name)
            names.add(exclusion.name)
