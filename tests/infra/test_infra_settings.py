"""Invalid settings of a stack: all reported at once, each with the command that fixes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from provider_mocks.recording import PROJECT

from infra.config import checks
from infra.config.problems import Problem, SettingsError
from infra.stack import Stack, parse
from workloads.settings import SECTIONS

TAGS = {"owner": "me", "cost_centre": "tests"}


def _parse(cloud: str, settings: Mapping[str, Any] | None = None, provider: Mapping[str, str] | None = None) -> Stack:
    """Parse this project's settings and the provider's keys."""
    keys = {"cloud": cloud, "tags": TAGS, **(settings or {})}
    config = {f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    return parse({**config, **(provider or {})}, PROJECT, "test", SECTIONS)


def _problems(cloud: str, settings: Mapping[str, Any], provider: Mapping[str, str] | None = None) -> dict[str, Problem]:
    """Return the problems of settings by key."""
    with pytest.raises(SettingsError) as caught:
        _parse(cloud, settings, provider)
    return {problem.key: problem for problem in caught.value.problems}


def test_all_problems_of_a_stack_are_in_one_message(fourth: str) -> None:
    found = _problems(
        fourth,
        {
            "gpu": {"instance_type": "p5.48xlarge", "nodes": {"desired": 4, "max": 2}, "colour": "red"},
            "network": {"cidr": "10.0.0.0/16", "nodes_cidr": "10.0.0.0/29", "pods_cidr": "10.0.128.0/17"},
            "storage": {"on_destroy": "burn"},
            "budget": {"max_usd_per_hour": 1},
            "qqq": "red",
        },
        {"fourth:zone": "south-9a"},
    )
    expected = {
        "gpu.instance_type": "an instance type of aws, and cloud is 'fourth'",
        "gpu.nodes.desired": "more than gpu.nodes.max (2)",
        "gpu.colour": "unknown key",
        "network.nodes_cidr": "3 usable addresses, 4 needed for the GPU nodes",
        "network.pods_cidr": "overlaps network.cidr (10.0.0.0/16)",
        "storage.on_destroy": "unknown value",
        "fourth:zone": "not a zone of north-1",
        "qqq": "unknown key",
    }
    assert {key: found[key].message for key in expected} == expected
    assert found["gpu.instance_type"].allowed == "f1.large", "the allowed types are listed"


def test_a_problem_is_one_line_with_key_value_allowed_values_and_fix() -> None:
    text = str(_raised({"gpu": {"nodes": {"desired": 4}}}))
    assert (
        "gpu.nodes.desired: more than gpu.nodes.max (2): got 4; allowed: 0 to 2. "
        "Fix: pulumi config set --path gpu.nodes.max 4"
    ) in text


def _raised(settings: Mapping[str, Any]) -> SettingsError:
    """Return the error of a local stack's settings."""
    with pytest.raises(SettingsError) as caught:
        _parse("local", settings)
    return caught.value


def test_the_fix_of_each_problem_works(fourth: str) -> None:
    broken: dict[str, Any] = {
        "gpu": {"instance_type": "x", "nodes": {"desired": 4}},
        "network": {"pods_cidr": "10.0.0.0/17", "nodes_cidr": "192.168.0.0/24"},
        "storage": {"on_destroy": "burn"},
    }
    for problem in _problems(fourth, broken, {"fourth:zone": "x"}).values():
        *_, key, value = problem.fix.split()
        if ":" in key:
            continue
        owner = broken
        *parents, last = key.split(".")
        for part in parents:
            owner = owner.setdefault(part, {})
        owner[last] = value
    assert _parse(fourth, broken).settings.gpu.nodes.max == 4


def test_an_unknown_key_suggests_a_similar_one() -> None:
    problem = _raised({"gpu": {"nodez": 2}}).problems[0]
    assert "did you mean 'nodes'" in problem.message
    assert problem.fix == "pulumi config rm --path gpu.nodez"


def test_an_unknown_cloud_suggests_a_similar_one() -> None:
    with pytest.raises(SettingsError) as caught:
        _parse("locla")
    assert caught.value.problems[0].fix == "pulumi config set --path cloud local"


def test_each_missing_tag_is_reported(kubeconfig: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        parse({f"{PROJECT}:cloud": "local"}, PROJECT, "test", SECTIONS)
    assert [problem.key for problem in caught.value.problems] == ["tags.owner", "tags.cost_centre"]


def test_a_key_of_the_provider_in_this_project_names_the_providers_key(fourth: str) -> None:
    assert _problems(fourth, {"region": "north-1"})["region"].allowed == "fourth:region"


def test_settings_of_the_provider_reach_the_cloud(fourth: str) -> None:
    settings: Any = _parse(fourth, {}, {"fourth:region": "south-2", "fourth:zone": "south-2b"}).settings
    assert (settings.region, settings.zone) == ("south-2", "south-2b")


def test_invalid_json_is_a_problem() -> None:
    with pytest.raises(SettingsError, match="not JSON"):
        parse({f"{PROJECT}:cloud": "local", f"{PROJECT}:gpu": "{nodes"}, PROJECT, "test", SECTIONS)


def test_spot_with_a_reservation_is_rejected(fourth: str) -> None:
    problem = _problems(fourth, {"gpu": {"capacity": "spot", "reservation_id": "r-1"}})["gpu.reservation_id"]
    assert problem.fix == "pulumi config rm --path gpu.reservation_id"


def test_a_reservation_without_its_id_is_rejected(fourth: str) -> None:
    assert "missing" in _problems(fourth, {"gpu": {"capacity": "reservation"}})["gpu.reservation_id"].message


def test_a_problem_in_a_section_of_the_workloads_is_reported_with_the_others() -> None:
    keys = {problem.key for problem in _raised({"job": {"launcher": "slurm"}, "colour": 1}).problems}
    assert {"job.launcher", "colour"} <= keys


def test_a_problem_found_by_a_further_check_is_reported_with_the_others(kubeconfig: Path) -> None:
    config = {f"{PROJECT}:cloud": "local", f"{PROJECT}:tags": json.dumps(TAGS)}
    further = [lambda stack: [Problem("job.nodes", f"cloud {stack.cloud.name}", "", "")]]
    with pytest.raises(SettingsError, match="cloud local"):
        parse(config, PROJECT, "test", SECTIONS, further)


def test_the_budget_is_compared_with_the_cost_of_the_pool_at_its_maximum(fourth: str) -> None:
    found = _problems(fourth, {"gpu": {"nodes": {"desired": 1, "max": 3}}, "budget": {"max_usd_per_hour": 29}})
    problem = found["budget.max_usd_per_hour"]
    assert "30.00 USD per hour at gpu.nodes.max: 3 x f1.large at 10" in problem.message
    assert _parse(fourth, {"gpu": {"nodes": {"desired": 1, "max": 3}}, "budget": {"max_usd_per_hour": 30}})


def test_the_budget_counts_a_spot_pool_at_its_spot_price(fourth: str) -> None:
    gpu = {"capacity": "spot", "nodes": {"desired": 1, "max": 3}}
    assert _parse(fourth, {"gpu": gpu, "budget": {"max_usd_per_hour": 12}})
    assert (
        "12.00"
        in _problems(fourth, {"gpu": gpu, "budget": {"max_usd_per_hour": 11}})["budget.max_usd_per_hour"].message
    )


def test_a_missing_kubeconfig_context_lists_the_existing_ones(kubeconfig: Path) -> None:
    problem = _problems("local", {"kubeconfig": {"context": "prod"}})["kubeconfig.context"]
    assert problem.allowed == "lab | laptop"
    assert problem.value == "prod"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("a: [", "is not YAML"), ("kind: Config", "has no list of contexts")],
)
def test_a_file_that_is_no_kubeconfig_is_reported_in_one_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    problem = _problems("local", {"kubeconfig": {"path": str(path)}})["kubeconfig.path"]
    assert message in problem.message
    assert "\n" not in problem.message


def test_checkpoints_in_a_pods_own_file_system_are_rejected(kubeconfig: Path) -> None:
    problem = _problems("local", {"storage": {"bucket_uri": "file:///tmp/x"}})["storage.bucket_uri"]
    assert problem.allowed == "file:///data/work or a folder in it"


def test_checked_settings_are_immutable(kubeconfig: Path) -> None:
    settings: Any = _parse("local").settings
    with pytest.raises(ValueError, match="frozen"):
        settings.namespace = "other"


@pytest.mark.parametrize(("zone", "good"), [("us-west-2a", True), ("us-west-2", False), ("us-east-1a", False)])
def test_a_zone_is_its_region_and_a_letter(zone: str, good: bool) -> None:
    assert (not checks.zone_in_region("zone", zone, "us-west-2")) is good


def test_a_free_range_is_proposed_for_an_overlapping_one() -> None:
    (problem,) = checks.disjoint({"a": "10.0.0.0/8", "b": "10.1.0.0/16"})
    assert problem.fix.endswith("172.16.0.0/16")


@pytest.mark.parametrize(("cidr", "fits"), [("10.0.0.0/27", True), ("10.0.0.0/28", False)])
def test_a_subnet_needs_addresses_for_its_nodes_besides_those_of_the_cloud(cidr: str, fits: bool) -> None:
    assert (not checks.holds("subnet", cidr, 12, "nodes")) is fits


def test_the_proposed_wider_subnet_is_wide_enough() -> None:
    (problem,) = checks.holds("subnet", "10.0.0.0/28", 12, "nodes")
    assert not checks.holds("subnet", problem.fix.split()[-1], 12, "nodes")
