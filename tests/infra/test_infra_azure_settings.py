"""Azure: the validation of settings, the fixes that errors suggest, and the costs."""

from __future__ import annotations

import json
import tomllib
from ipaddress import IPv4Network
from typing import Any

import pytest
from azure_stack import RESERVATION, Stack, apply_fixes, find_problems, parse_settings
from provider_mocks.recording import PROJECT, ROOT

from infra.clouds.azure import settings as azure
from infra.config.problems import SettingsError
from infra.stack import parse
from workloads.settings import SECTIONS


def test_the_costs_include_what_runs_without_gpu_nodes() -> None:
    lines = {line.what: line for line in parse_settings({}).cost_lines(0)}
    assert lines["Standard_ND96asr_v4"].count == 0
    assert lines["AKS control plane (Standard tier)"].on_demand_usd_per_hour == 0.10
    assert lines["Standard_D4ds_v5"].count == 2
    netapp = lines["GiB of NetApp Premium (128 MiB/s)"]
    assert netapp.count * netapp.on_demand_usd_per_hour == pytest.approx(0.8253, abs=1e-4)
    assert lines["private endpoint"].count == 4
    assert "managed Grafana (Standard)" in lines
    alone = {line.what: line for line in parse_settings({"monitoring": {"managed": False}}).cost_lines(0)}
    assert alone["private endpoint"].count == 3
    assert "managed Grafana (Standard)" not in alone


def test_every_price_has_a_date_and_a_source() -> None:
    tables = tomllib.loads((ROOT / "infra/clouds/azure/prices.toml").read_text())
    rows = [row for table in tables.values() for row in table.values()]
    assert len(rows) == sum(len(azure.prices(table)) for table in ("system", "netapp", "fixed"))
    assert all(row["usd_per_hour"] > 0 and row["as_of"].startswith("20") and row["source"] for row in rows)


@pytest.mark.parametrize("limit", [23, 24, 50, 54])
def test_a_physical_name_is_valid_for_every_service_and_differs_between_two_groups(limit: int) -> None:
    names = {azure.physical_name("3-My_very-long_stack-name-of-the-team", group, limit) for group in ("a", "b")}
    assert len(names) == 2
    for name in names:
        assert len(name) <= limit
        assert name.isalnum()
        assert name == name.lower()
        assert name[0].isalpha()


BROKEN: dict[str, Any] = {
    "gpu": {
        "instance_type": "p5.48xlarge",
        "capacity": "spot",
        "reservation_id": RESERVATION,
        "zone": "westus-9",
        "nodes": {"desired": 30, "max": 20},
    },
    "network": {
        "cidr": "10.7.0.0/24",
        "netapp_cidr": "10.7.0.0/29",
        "endpoints_cidr": "10.9.0.0/26",
        "pods_cidr": "10.7.0.0/22",
        "services_cidr": "172.30.0.0/16",
        "authorized_cidrs": ["203.0.113.0/24", "10.0.0.0/8"],
    },
    "storage": {"size_gib": 1200, "tier": "Gold"},
    "system": {"instance_type": "Standard_A1"},
    "kubernetes": {"kms_key_id": "https://keys.vault.azure.net/keys/etcd/0123456789abcdef"},
}


def test_all_problems_are_reported_at_once() -> None:
    expected = {
        "gpu.instance_type": "an instance type of aws, and cloud is 'azure'",
        "gpu.reservation_id": "capacity 'spot' does not come from a reservation",
        "gpu.zone": "not a zone of eastus",
        "gpu.nodes.desired": "more than gpu.nodes.max (20)",
        "network.netapp_cidr": "3 usable addresses, 8 needed for NetApp, which needs at least a /28",
        "network.endpoints_cidr": "outside network.cidr (10.7.0.0/24)",
        "network.pods_cidr": "overlaps network.cidr (10.7.0.0/24)",
        "network.services_cidr": "overlaps 172.30.0.0/16, which AKS reserves",
        "network.authorized_cidrs[1]": "a private range, which never arrives from the internet",
        "storage.size_gib": "a size that the service refuses",
        "storage.tier": "unknown value",
        "system.instance_type": "unknown value",
        "kubernetes.kms_vault_id": "missing, and kms_key_id is set",
    }
    found = {key: problem.message for key, problem in find_problems(BROKEN).items()}
    assert found == expected


def test_the_suggested_commands_fix_every_problem() -> None:
    broken: dict[str, Any] = json.loads(json.dumps(BROKEN))
    broken["kubernetes"] = {}
    settings = parse_settings(apply_fixes(broken, find_problems(broken)))
    assert settings.storage.size_gib == 2048
    network = settings.network
    ranges = [IPv4Network(cidr) for cidr in [*network.subnets.values(), network.pods_cidr, network.services_cidr]]
    assert not any(one.overlaps(two) for one in ranges for two in ranges if one is not two)


def test_an_invalid_setting_registers_no_resource(stack: Stack) -> None:
    recording = stack("azure", {"storage.size_gib": 1200, "gpu.zone": "9"}, fails=True)
    assert "storage.size_gib" in str(recording.error)
    assert "gpu.zone" in str(recording.error)
    assert recording.registrations == []


@pytest.mark.parametrize(("size", "nearest"), [(100, 1024), (1500, 2048), (200_000, 102_400)])
def test_an_invalid_netapp_size_lists_the_allowed_sizes_and_the_nearest_one(size: int, nearest: int) -> None:
    problem = find_problems({"storage": {"size_gib": size}})["storage.size_gib"]
    assert "1024, 2048, 3072 ... 102400" in problem.allowed
    assert problem.fix == f"pulumi config set --path storage.size_gib {nearest}"


@pytest.mark.parametrize("size", [1024, 5120, 102_400])
def test_whole_tebibytes_are_allowed(size: int) -> None:
    assert parse_settings({"storage": {"size_gib": size}}).storage.size_gib == size


@pytest.mark.parametrize("zone", ["4", "westus-1", "a", "eastus1", "eastus-4"])
def test_a_zone_outside_the_region_is_rejected(zone: str) -> None:
    assert find_problems({"gpu": {"instance_type": "Standard_ND96asr_v4", "zone": zone}})["gpu.zone"].fix.endswith(" 1")


def test_a_zone_in_a_region_without_zones_is_rejected() -> None:
    problem = find_problems({"gpu": {"instance_type": "Standard_ND96asr_v4", "zone": "1"}}, "westus")["gpu.zone"]
    assert problem.fix == "pulumi config rm --path gpu.zone"


def test_a_vnet_too_small_for_its_nodes_is_rejected_with_a_sufficient_range() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "nodes": {"desired": 2, "max": 100}}
    network: dict[str, Any] = {"cidr": "10.0.0.0/25"}
    problem = find_problems({"gpu": gpu, "network": network})["network.cidr"]
    network["cidr"] = problem.fix.split()[-1]
    assert parse_settings({"gpu": gpu, "network": network})


def test_the_fixes_of_overlapping_subnets_are_separate_ranges_of_the_vnet() -> None:
    network = {"cidr": "192.168.0.0/16", "netapp_cidr": "192.168.0.0/24", "endpoints_cidr": "192.168.0.0/24"}
    problems = find_problems({"network": network})
    assert set(problems) == {"network.netapp_cidr", "network.endpoints_cidr"}, "the default subnet does not move"
    fixed = parse_settings(apply_fixes({"network": dict(network)}, problems)).network
    ranges = [IPv4Network(cidr) for cidr in fixed.subnets.values()]
    assert not any(one.overlaps(two) for one in ranges for two in ranges if one is not two)
    assert all(cidr.subnet_of(IPv4Network("192.168.0.0/16")) for cidr in ranges)


def test_the_overlay_needs_a_range_for_every_node() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "nodes": {"desired": 2, "max": 20}}
    problem = find_problems({"gpu": gpu, "network": {"pods_cidr": "10.244.0.0/20"}})["network.pods_cidr"]
    assert "4096 usable addresses, 5888 needed for a /24 for each of 23 nodes" in problem.message


def test_a_placement_group_with_a_reservation_is_rejected() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "capacity": "reservation", "reservation_id": RESERVATION}
    problem = find_problems({"gpu": gpu, "network": {"proximity_placement": True}})["network.proximity_placement"]
    assert problem.fix == "pulumi config rm --path network.proximity_placement"


def test_an_id_that_is_no_reservation_group_is_rejected_with_an_example() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "capacity": "reservation", "reservation_id": "cr-123"}
    assert "capacityReservationGroups" in find_problems({"gpu": gpu})["gpu.reservation_id"].allowed


def test_a_missing_location_names_the_key_of_the_provider() -> None:
    config = {
        f"{PROJECT}:cloud": "azure",
        f"{PROJECT}:tags": '{"owner": "me", "cost_centre": "tests"}',
        f"{PROJECT}:gpu": '{"instance_type": "Standard_ND96asr_v4"}',
    }
    with pytest.raises(SettingsError, match="pulumi config set azure-native:location eastus"):
        parse(config, PROJECT, "test", SECTIONS)


def test_the_former_key_of_the_kubernetes_version_is_rejected_with_the_new_key() -> None:
    problem = find_problems({"kubernetes": {"version": "1.34"}})["kubernetes.version"]
    assert problem.message == "renamed to cluster.kubernetes_version"
    assert problem.fix.startswith("pulumi config set --path cluster.kubernetes_version 1.34; ")
    assert problem.fix.endswith("pulumi config rm --path kubernetes.version")
