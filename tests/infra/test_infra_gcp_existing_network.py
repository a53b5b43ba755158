"""Tests of `network.existing` on Google Cloud: the stack uses the VPC and adds only its own firewall rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gcp_stack import CLUSTER, FILESTORE, FIREWALL, find_problems, parse_settings
from provider_mocks.recording import Recording

Stack = Callable[..., Recording]

NAMES = {"network": "shared", "subnetwork": "gpus", "pods_range": "pods", "services_range": "services"}
EXISTING: dict[str, object] = {"network.existing": NAMES}
VPC = "projects/my-project/global/networks/shared"


@pytest.fixture
def made(stack: Stack) -> Recording:
    return stack("gcp", EXISTING)


def test_no_part_of_the_network_belongs_to_the_stack(made: Recording) -> None:
    found = {item.type for item in made.registrations if item.type.startswith("gcp:compute/")}
    assert found <= {FIREWALL, "gcp:compute/resourcePolicy:ResourcePolicy"}


def test_the_cluster_uses_the_subnet_and_its_secondary_ranges(made: Recording) -> None:
    inputs = made.one(CLUSTER).inputs
    assert inputs["network"] == VPC
    assert inputs["subnetwork"] == "projects/my-project/regions/us-central1/subnetworks/gpus"
    assert inputs["ipAllocationPolicy"]["clusterSecondaryRangeName"] == "pods"


def test_the_firewall_admits_the_subnets_own_ranges(made: Recording) -> None:
    [nodes] = [item.inputs for item in made.of_type(FIREWALL) if item.name.endswith("-nodes")]
    assert (nodes["network"], nodes["sourceRanges"]) == (VPC, ["10.9.0.0/20", "10.96.0.0/14"])


def test_filestore_is_in_the_network(stack: Stack, made: Recording) -> None:
    assert made.one(FILESTORE).inputs["networks"][0]["network"] == "shared"
    peered = stack("gcp", {"network.existing": {**NAMES, "private_service_access": True}})
    assert peered.one(FILESTORE).inputs["networks"][0]["connectMode"] == "PRIVATE_SERVICE_ACCESS"


def test_ranges_of_another_network_are_refused() -> None:
    problems = find_problems(EXISTING | {"network.cidr": "10.1.0.0/16"})
    assert "network.existing is set" in str(problems["network.cidr"])


def test_pods_and_services_need_a_range_each() -> None:
    problems = find_problems({"network.existing": {**NAMES, "services_range": "pods"}})
    assert "the range of the pods" in str(problems["network.existing.services_range"])


def test_a_missing_name_is_reported() -> None:
    assert set(find_problems({"network.existing.network": "shared"})) >= {"network.existing.subnetwork"}


def test_nat_is_paid_for_elsewhere() -> None:
    assert not [line.what for line in parse_settings(EXISTING).cost_lines(1) if "NAT" in line.what]
