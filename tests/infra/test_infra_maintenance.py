"""Maintenance windows and exclusions: what the settings accept, and what they answer to a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import pytest

from infra.config.maintenance import Exclusion, Maintenance
from infra.config.problems import Problem
from infra.config.settings import Section
from infra.config.validation import validate_leniently


class _Settings(Section):
    """The settings of a cloud with a maintenance window."""

    maintenance: Maintenance = Maintenance()


def _problems(section: Mapping[str, object]) -> dict[str, Problem]:
    """Return the problems of a section by key."""
    settings, found = validate_leniently(_Settings, {"maintenance": section})
    return {problem.key: problem for problem in [*found, *settings.maintenance.problems()]}


def test_the_default_window_is_accepted_by_aks_and_gke() -> None:
    window = Maintenance()
    assert (window.day, window.start, window.hours, window.exclusions) == ("saturday", "02:00", 12, ())
    assert not _problems({})


@pytest.mark.parametrize("spelling", ["2026-12-20", "2026-12-20 00:00:00 +0000 UTC", "2026-12-20T00:00:00Z"])
def test_a_date_has_the_spelling_of_the_command_line_or_of_pulumis_engine(spelling: str) -> None:
    # An unquoted date in Pulumi.<stack>.yaml reaches the program as `2026-12-20 00:00:00 +0000 UTC`.
    exclusion = Exclusion.model_validate({"name": "long-run", "start": "2026-12-01", "end": spelling})
    assert exclusion.end == date(2026, 12, 20)
    assert exclusion.num_days == 20, "the last day is part of the exclusion"


@pytest.mark.parametrize(
    ("section", "key", "message", "fix"),
    [
        ({"hours": 3}, "hours", "too small", "pulumi config set --path maintenance.hours 4"),
        ({"hours": 25}, "hours", "too large", "pulumi config set --path maintenance.hours 24"),
        ({"day": "sabbath"}, "day", "unknown value", "pulumi config set --path maintenance.day saturday"),
        ({"start": "2:00"}, "start", "not of this form", "pulumi config set --path maintenance.start 02:00"),
        ({"start": "24:00"}, "start", "not of this form", "pulumi config set --path maintenance.start 02:00"),
    ],
)
def test_a_mistake_in_the_window_names_its_fix(section: Mapping[str, object], key: str, message: str, fix: str) -> None:
    problem = _problems(section)[f"maintenance.{key}"]
    assert message in problem.message
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("change", "key", "message", "fix"),
    [
        ({"end": "2026-11-30"}, ".end", "before its start (2026-12-01)", "set --path 'X.end' 2026-12-01"),
        ({"end": "christmas"}, ".end", "not a date", "set --path 'X.end' 2026-12-01"),
        ({"end": None}, ".end", "missing", "set --path 'X.end' 2026-12-01"),
        ({"end": "9999-12-31"}, ".end", "too large", "set --path 'X.end' 2100-12-31"),
        ({"name": "Long Run"}, ".name", "not of this form", "set --path 'X.name' long-run"),
        ({"reason": "benchmark"}, ".reason", "unknown key", "rm --path 'X.reason'"),
    ],
)
def test_a_mistake_in_an_exclusion_names_its_fix(
    change: Mapping[str, str | None], key: str, message: str, fix: str
) -> None:
    exclusion = {"name": "long-run", "start": "2026-12-01", "end": "2026-12-20", **change}
    given = {name: value for name, value in exclusion.items() if value is not None}
    problem = _problems({"exclusions": [given]})[f"maintenance.exclusions[0]{key}"]
    assert message in problem.message
    assert problem.fix == f"pulumi config {fix}".replace("X", "maintenance.exclusions[0]")
    if key == ".reason":
        assert problem.allowed == "end, name, start"


def test_two_exclusions_have_two_names() -> None:
    exclusion = {"name": "long-run", "start": "2026-12-01", "end": "2026-12-20"}
    problem = _problems({"exclusions": [exclusion, exclusion]})["maintenance.exclusions[1].name"]
    assert problem.fix == "pulumi config rm --path 'maintenance.exclusions[1]'"
