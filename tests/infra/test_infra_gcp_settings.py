"""Google Cloud: the validation of settings, the fixes that errors suggest, and the costs."""

from __future__ import annotations

import runpy
from collections.abc import Mapping

import pytest
from gcp_stack import A3, CLUSTER, POOL, Stack, find_problems, parse_settings
from provider_mocks.recording import ROOT, record, stack_config

from infra.config.problems import Problem, SettingsError
from infra.cost import HourlyCost


def test_all_problems_of_a_stack_are_reported_at_once() -> None:
    found = find_problems(
        {
            "gcp:project": None,
            "gcp:zone": "europe-west4-b",
            "gpu.instance_type": "p5.48xlarge",
            "gpu.capacity": "spot",
            "gpu.reservation_id": "ours",
            "gpu.nodes.max": 300,
            "gpu.max_run_hours": 5,
            "network.pods_cidr": "10.0.0.0/24",
            "network.services_cidr": "10.80.0.0/28",
            "network.control_plane_cidr": "172.16.0.0/24",
            "system.instance_type": "m6i.xlarge",
            "storage.size_gib": 1200,
        }
    )
    expected = {
        "gcp:project": "missing",
        "gcp:zone": "not a zone of us-central1",
        "gpu.instance_type": "an instance type of aws, and cloud is 'gcp'",
        "gpu.reservation_id": "capacity 'spot' does not come from a reservation",
        "gpu.max_run_hours": "capacity 'spot' has no time limit",
        "network.pods_cidr": "overlaps network.cidr (10.0.0.0/16)",
        "network.services_cidr": "16 usable addresses, 512 needed for services",
        "network.control_plane_cidr": "a size that GKE rejects",
        "system.instance_type": "unknown value",
        "storage.size_gib": "a size that the service refuses",
    }
    assert {key: problem.message for key, problem in found.items()} == expected
    assert found["gcp:project"].fix == "pulumi config set gcp:project my-project"
    assert found["gcp:zone"].fix == "pulumi config set gcp:zone us-central1-a"
    assert A3 in found["gpu.instance_type"].allowed


def test_an_invalid_stack_registers_no_resource(stack: Stack) -> None:
    recording = stack("gcp", {"gcp:project": None, "storage.size_gib": 1}, fails=True)
    assert "pulumi config set gcp:project my-project" in str(recording.error)
    assert "pulumi config set --path storage.size_gib 1024" in str(recording.error)
    assert recording.registrations == []


@pytest.mark.parametrize(
    ("size_gib", "offered"),
    [
        (1, 1024),
        (1000, 1024),
        (1025, 1280),
        (1200, 1280),
        (9984, None),
        (9985, 10240),
        (10240, None),
        (10241, 12800),
        (12800, None),
        (102400, None),
        (102401, 102400),
    ],
)
def test_filestore_has_two_bands_of_sizes(size_gib: int, offered: int | None) -> None:
    if offered is None:
        assert parse_settings({"storage.size_gib": size_gib}).storage.size_gib == size_gib
        return
    problem = find_problems({"storage.size_gib": size_gib})["storage.size_gib"]
    assert problem.fix == f"pulumi config set --path storage.size_gib {offered}"
    assert "steps of 256" in problem.allowed
    assert "steps of 2560" in problem.allowed
    assert parse_settings({"storage.size_gib": offered})


def test_the_default_size_is_valid_for_filestore() -> None:
    assert parse_settings().storage.size_gib == 1024


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"gpu.capacity": "flex_start", "gpu.nodes.min": 1}, "gpu.nodes.min"),
        ({"gpu.capacity": "flex_start", "gpu.reservation_id": "ours"}, "gpu.reservation_id"),
        ({"gpu.capacity": "flex_start", "gpu.max_run_hours": 169}, "gpu.max_run_hours"),
        ({"gpu.max_run_hours": 24}, "gpu.max_run_hours"),
        ({"gpu.capacity": "reservation"}, "gpu.reservation_id"),
        ({"gpu.capacity": "preemptible"}, "gpu.capacity"),
        ({"gpu.nodes.desired": 0, "gpu.nodes.max": 0}, "gpu.nodes.max"),
    ],
)
def test_an_impossible_kind_of_capacity_is_rejected(overrides: Mapping[str, object], key: str) -> None:
    assert set(find_problems(overrides)) == {key}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"network.cidr": "10.64.0.0/16"}, "network.pods_cidr"),
        ({"network.control_plane_cidr": "10.0.0.0/28"}, "network.control_plane_cidr"),
        ({"network.services_cidr": "10.0.128.0/20"}, "network.services_cidr"),
        ({"network.pods_cidr": "10.64.0.0/24"}, "network.pods_cidr"),
        ({"network.cidr": "10.0.0.0/30"}, "network.cidr"),
        ({"gpu.instance_type": A3, "network.fabric_cidr": "10.0.0.0/18"}, "network.fabric_cidr"),
        ({"gpu.instance_type": A3, "network.fabric_cidr": "10.200.0.0/28"}, "network.fabric_cidr"),
    ],
)
def test_ranges_that_overlap_or_are_too_small_are_rejected_with_one_that_fits(
    overrides: Mapping[str, object], key: str
) -> None:
    problem = find_problems(overrides)[key]
    assert parse_settings({**overrides, key: problem.fix.split()[-1]}), "the suggested command must fix the problem"


def test_an_unused_range_is_not_checked() -> None:
    assert parse_settings({"network.fabric_cidr": "10.0.0.0/18"}), "A2 has no additional networks"


@pytest.mark.parametrize(("nodes", "fits"), [(12, True), (13, False)])
def test_every_a3_node_needs_an_address_in_each_additional_network(nodes: int, fits: bool) -> None:
    overrides = {"gpu.instance_type": A3, "network.fabric_cidr": "10.200.0.0/26", "gpu.nodes.max": nodes}
    if fits:
        assert parse_settings(overrides).network.fabric_subnets[3] == "10.200.0.48/28", (
            "16 addresses, 4 of them Google's"
        )
    else:
        assert "network.fabric_cidr" in find_problems(overrides)


@pytest.mark.parametrize(
    ("overrides", "key", "message", "fix"),
    [
        (
            {"maintenance.hours": 11},
            "maintenance.hours",
            "GKE requires 48 hours of maintenance in any 32 days",
            "pulumi config set --path maintenance.hours 12",
        ),
        (
            {"maintenance.exclusions": [{"name": "run", "start": "2027-04-01", "end": "2027-04-12"}]},
            "maintenance.exclusions[0].end",
            "after the end of support of Kubernetes 1.35",
            "pulumi config set --path 'maintenance.exclusions[0].end' 2027-04-11",
        ),
        (
            {
                "maintenance.exclusions": [
                    {"name": f"run-{n}", "start": "2027-01-01", "end": "2027-01-01"} for n in range(21)
                ]
            },
            "maintenance.exclusions",
            "more exclusions than GKE accepts",
            "pulumi config rm --path 'maintenance.exclusions[20]'",
        ),
        (
            {"cluster.kubernetes_version": "1.21"},
            "cluster.kubernetes_version",
            "unknown value",
            "pulumi config set --path cluster.kubernetes_version 1.35",
        ),
    ],
)
def test_an_upgrade_that_gke_refuses_has_its_fix(
    overrides: Mapping[str, object], key: str, message: str, fix: str
) -> None:
    problem = find_problems(overrides)[key]
    assert (problem.message, problem.fix) == (message, fix)


@pytest.mark.parametrize("name", ["Prod", "1st", "team.prod", "a" * 18, "prod-", "goog", "my-google"])
def test_a_stack_name_that_google_cloud_rejects_has_the_command_to_rename_it(name: str) -> None:
    assert find_problems({}, name)["stack"].fix.startswith("pulumi stack rename --stack ")


#: The longest names that each type accepts; 63 is the limit of everything else.
#: resource_container_cluster.go, `ValidateFunc` of name; resource_container_node_pool.go, "name is limited to 40".
_MAX_NAMES = {CLUSTER: 40, POOL: 40}
#: What pulumi-gcp appends to the logical name; `SetAutonaming` allows 255 characters, so it shortens none.
_SUFFIX = "-0a1b2c3"


def test_every_generated_name_of_the_longest_stack_name_is_accepted() -> None:
    recording = record(
        lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__"),
        stack_config("gcp", {"gpu.instance_type": A3}),
        "a" * 17,
    )
    assert recording.error is None
    for item in recording.registrations:
        if item.type.startswith("gcp:") and "name" not in item.inputs:
            assert len(item.name + _SUFFIX) <= _MAX_NAMES.get(item.type, 63), f"{item.type} {item.name}"


def test_vertex_ai_allows_a_longer_stack_name() -> None:
    assert "stack" not in {problem.key for problem in _problems_of_service("a" * 30)}
    assert "30 at most" in next(one.allowed for one in _problems_of_service("a" * 31) if one.key == "stack")


def _problems_of_service(name: str) -> list[Problem]:
    """Return the problems of a stack whose jobs run on Vertex AI."""
    try:
        parse_settings({"job.launcher": "vertex"}, name)
    except SettingsError as error:
        return list(error.problems)
    return []


def test_a_label_that_google_cloud_rejects_is_reported() -> None:
    assert set(find_problems({"tags.extra": {"Team": "ads"}})) == {'tags.extra["Team"]'}


def test_the_costs_include_everything_billed_by_the_hour() -> None:
    settings = parse_settings()
    lines = {line.what: line for line in settings.cost_lines(2)}
    assert lines["GKE control plane"].on_demand_usd_per_hour == 0.10
    assert lines["system node e2-standard-4"].count == 2
    assert lines["GiB of Filestore"].count == 1024
    assert lines["Cloud NAT gateway"].on_demand_usd_per_hour == pytest.approx(4 * 0.0014)
    total = HourlyCost(settings.cost_lines(2)).on_demand_usd
    assert total == pytest.approx(
        2 * 29.387 + 0.10 + 2 * 0.134012 + 1024 * 0.25 / 730 + 0.0056 + 0.005 + 0.06 / 730, abs=1e-3
    )


def test_nat_is_billed_for_at_most_thirty_two_nodes() -> None:
    lines = {line.what: line for line in parse_settings().cost_lines(100)}
    assert lines["Cloud NAT gateway"].on_demand_usd_per_hour == 0.044


def test_a_budget_below_the_costs_is_rejected_with_the_costs() -> None:
    problem = find_problems({"budget.max_usd_per_hour": 50})["budget.max_usd_per_hour"]
    assert "59.50 USD per hour" in problem.message
