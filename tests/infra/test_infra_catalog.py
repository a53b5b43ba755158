"""The catalog of instance types, the pinned charts, and the commands that print them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from provider_mocks.recording import ROOT

from infra import catalog
from infra.addons import charts

GUIDE_TYPES = {
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "Standard_ND96asr_v4",
    "Standard_ND96amsr_A100_v4",
    "Standard_ND96isr_H100_v5",
    "a2-highgpu-8g",
    "a2-ultragpu-8g",
    "a3-highgpu-8g",
}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m infra`."""
    command = [sys.executable, "-m", "infra", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_all_nine_types_of_the_guides_have_eight_gpus_and_a_price() -> None:
    rows = {row.name: row for row in catalog.instances()}
    assert set(rows) >= GUIDE_TYPES
    assert all(rows[name].num_gpus == 8 and rows[name].on_demand_usd_per_hour for name in GUIDE_TYPES)


def test_every_cloud_has_a_type_below_two_usd_per_hour() -> None:
    for cloud in {row.cloud for row in catalog.instances()}:
        cheap = [row for row in catalog.instances(cloud) if (row.on_demand_usd_per_hour or 99) < 2]
        assert cheap, cloud


def test_every_price_has_a_date_and_a_source_and_spot_is_below_on_demand() -> None:
    for row in catalog.instances():
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", row.as_of), row
        assert row.source
        assert row.spot_usd_per_hour is None or row.spot_usd_per_hour < (row.on_demand_usd_per_hour or 0)


@pytest.mark.parametrize(
    ("name", "fact", "value"),
    [
        ("a2-highgpu-8g", "memory_gib", 680),
        ("a2-highgpu-8g", "network_gbps", 100),
        ("a3-highgpu-8g", "network_gbps", 1000),
        ("p5.48xlarge", "num_network_cards", 32),
        ("p4d.24xlarge", "num_network_cards", 4),
        ("Standard_ND96asr_v4", "num_network_cards", 8),
    ],
)
def test_facts_that_other_sources_report_differently_are_correct(name: str, fact: str, value: float) -> None:
    row = next(row for row in catalog.instances() if row.name == name)
    assert getattr(row, fact) == value


def test_an_unknown_type_is_an_error_with_the_allowed_types() -> None:
    with pytest.raises(ValueError, match=r"p4d\.24xlarge, p4de\.24xlarge"):
        catalog.instance("aws", "a2-highgpu-8g")


def test_instances_prints_one_line_per_type() -> None:
    run = _run("instances")
    assert run.returncode == 0
    lines = run.stdout.splitlines()
    assert lines[0].startswith("CLOUD")
    assert len(lines) == 1 + len(catalog.instances())


def test_instances_prints_json() -> None:
    rows = json.loads(_run("instances", "--cloud", "gcp", "--json").stdout)
    assert {row["cloud"] for row in rows} == {"gcp"}


def test_an_unknown_cloud_is_an_error_that_lists_the_clouds() -> None:
    run = _run("instances", "--cloud", "oracle")
    assert run.returncode == 2
    assert "aws, azure, gcp" in run.stderr


def test_every_chart_has_one_pinned_version_and_a_command_that_checks_for_a_newer_one() -> None:
    for row in charts.table().values():
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", row.version), row
        assert row.check
        assert row.why
    assert all(row in _run("charts").stdout for row in charts.table())


def test_a_kustomization_is_pinned_by_commit_because_tags_can_move() -> None:
    rows = [row for row in charts.table().values() if row.kind == "kustomize"]
    assert rows
    assert all(re.search(r"\?ref=[0-9a-f]{40}$", row.reference) for row in rows)
