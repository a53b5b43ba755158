"""Settings of a stack on AWS: validation before any resource is registered, and the hourly cost."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from provider_mocks.recording import PROJECT

from infra.clouds.aws import settings as aws
from infra.config.problems import Problem, SettingsError
from infra.cost import HourlyCost
from infra.stack import Stack, parse
from workloads.settings import SECTIONS


def _parse(keys: Mapping[str, Any], region: str | None = "us-west-2", stack: str = "aws") -> Stack:
    gpu = {"instance_type": "p4d.24xlarge", **keys.get("gpu", {})}
    settings = {"cloud": "aws", "tags": {"owner": "me", "cost_centre": "tests"}, **keys, "gpu": gpu}
    config = {
        f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()
    }
    return parse(config | ({"aws:region": region} if region else {}), PROJECT, stack, SECTIONS)


def _settings(keys: Mapping[str, Any]) -> aws.Settings:
    settings = _parse(keys).settings
    assert isinstance(settings, aws.Settings)
    return settings


def _problems(keys: Mapping[str, Any], region: str | None = "us-west-2", stack: str = "aws") -> dict[str, Problem]:
    with pytest.raises(SettingsError) as caught:
        _parse(keys, region, stack)
    return {problem.key: problem for problem in caught.value.problems}


# Cost


def test_the_hourly_cost_includes_everything_that_is_billed_by_the_hour() -> None:
    settings = _settings({"gpu": {"instance_type": "p5.48xlarge"}})
    lines = {line.what: line for line in settings.cost_lines(2)}
    assert {"EKS control plane", "NAT gateway", "interface endpoint", "GiB of FSx for Lustre"} <= set(lines)
    assert all(line.on_demand_usd_per_hour > 0 for line in lines.values())
    assert lines["interface endpoint"].count == 4, "two services in two zones"
    total = HourlyCost(settings.cost_lines(2))
    without_gpus = 0.10 + 2 * 0.192 + 0.045 + 0.005 + 4 * 0.01 + (600 * 0.08 + 1200 * 0.21 + 1) / 730
    assert total.on_demand_usd == pytest.approx(2 * 55.04 + without_gpus, abs=1e-3)
    assert total.spot_usd == pytest.approx(2 * 22.73 + without_gpus, abs=1e-3)


def test_extended_support_has_its_price() -> None:
    def price(support: str) -> float:
        lines = _settings({"cluster": {"support": support}}).cost_lines(0)
        return next(line.on_demand_usd_per_hour for line in lines if "control" in line.what)

    assert price("extended") == pytest.approx(6 * price("standard"))


def test_every_price_has_a_unit_a_date_and_a_source() -> None:
    rows = tomllib.loads((Path(aws.__file__).parent / "prices.toml").read_text())
    assert all({"per", "as_of", "source"} <= set(row) for row in rows.values())


# Validation


@pytest.mark.parametrize(
    ("keys", "key", "allowed", "fix"),
    [
        (
            {"gpu": {"instance_type": "a2-highgpu-8g"}},
            "gpu.instance_type",
            "p5.48xlarge",
            "gpu.instance_type g5.xlarge",
        ),
        ({"gpu": {"zone": "eu-west-1a"}}, "gpu.zone", "us-west-2a, us-west-2b", "gpu.zone us-west-2a"),
        (
            {"gpu": {"zone": "us-west-2c"}, "network": {"zones": ["us-west-2a", "us-west-2b"]}},
            "gpu.zone",
            "us-west-2a | us-west-2b",
            "gpu.zone us-west-2b",
        ),
        ({"gpu": {"nodes": {"min": 0, "desired": 0, "max": 0}}}, "gpu.nodes.max", "at least 1", "gpu.nodes.max 1"),
        ({"gpu": {"nodes": {"max": 100}}}, "gpu.nodes.max", "at most 79", "gpu.nodes.max 79"),
        (
            {"gpu": {"capacity": "spot", "reservation_id": "cr-12345678"}},
            "gpu.reservation_id",
            "only with",
            "config rm",
        ),
        ({"gpu": {"capacity": "capacity_block"}}, "gpu.reservation_id", "the id", "gpu.reservation_id"),
        ({"gpu": {"capacity": "reservation", "reservation_id": "my"}}, "gpu.reservation_id", "cr-", "cr-<id>"),
        (
            {"gpu": {"instance_type": "g5.xlarge", "capacity": "capacity_block", "reservation_id": "cr-12345678"}},
            "gpu.capacity",
            "a type with EFA",
            "gpu.capacity on_demand",
        ),
        ({"network": {"zones": ["us-west-2a"]}}, "network.zones", "2 to 6", "'network.zones[1]' us-west-2b"),
        ({"network": {"zones": [f"us-west-2{x}" for x in "abcdefg"]}}, "network.zones", "2 to 6", "'network.zones[6]'"),
        ({"network": {"zones": ["us-west-2a", "eu-west-1b"]}}, "network.zones[1]", "us-west-2b", "us-west-2b"),
        ({"network": {"zones": ["us-west-2a", "us-west-2a"]}}, "network.zones[1]", "each zone once", "config rm"),
        ({"network": {"cidr": "10.0.0.0/8"}}, "network.cidr", "/16 to /28", "network.cidr 10.0.0.0/16"),
        ({"network": {"cidr": "10.9.9.0/24"}}, "network.cidr", "/20 or wider", "network.cidr 10.9.0.0/20"),
        (
            {"network": {"services_cidr": "10.0.8.0/22"}},
            "network.services_cidr",
            "a range of its own",
            "services_cidr 10.1",
        ),
        ({"network": {"services_cidr": "172.20.0.0/28"}}, "network.services_cidr", "/12 to /24", "172.20.0.0/16"),
        ({"network": {"services_cidr": "8.8.0.0/16"}}, "network.services_cidr", "a private range", "172.20.0.0/16"),
        ({"network": {"authorized_cidrs": ["10.1.0.0/16"]}}, "network.authorized_cidrs[0]", "public", "config rm"),
        ({"network": {"authorized_cidrs": "1.2.3.4/32"}}, "network.authorized_cidrs", "a list", "config rm"),
        ({"cluster": {"kubernetes_version": "1.28"}}, "cluster.kubernetes_version", "1.35", "kubernetes_version 1.35"),
        ({"cluster": {"admin_role_arns": ["ops"]}}, "cluster.admin_role_arns[0]", "arn:aws", "admin_role_arns[0]"),
        ({"system": {"instance_type": "t3.micro"}}, "system.instance_type", "m6i.xlarge", "system.instance_type m6i"),
        ({"system": {"num_nodes": 1}}, "system.num_nodes", "at least 2", "system.num_nodes 2"),
        ({"storage": {"size_gib": 600}}, "storage.size_gib", "1200, 2400 or a multiple", "storage.size_gib 1200"),
        ({"storage": {"size_gib": 2000}}, "storage.size_gib", "1200, 2400 or a multiple", "storage.size_gib 2400"),
        ({"storage": {"size_gib": 3600}}, "storage.size_gib", "1200, 2400 or a multiple", "storage.size_gib 4800"),
        (
            {"storage": {"throughput_mb_per_second_per_tib": 200}},
            "storage.throughput_mb_per_second_per_tib",
            "125 | 250 | 500 | 1000",
            "per_tib 250",
        ),
        ({"monitoring": {"log_retention_days": 10}}, "monitoring.log_retention_days", "30", "log_retention_days 7"),
    ],
)
def test_an_invalid_setting_is_reported_with_allowed_values_and_a_fix(
    keys: Mapping[str, Any], key: str, allowed: str, fix: str
) -> None:
    found = _problems(keys)
    assert set(found) == {key}, "one mistake must cause one problem"
    assert allowed in found[key].allowed
    assert fix in found[key].fix


def test_the_zone_of_a_reservation_is_added_after_the_default_zones() -> None:
    settings = _settings({"gpu": {"zone": "us-west-2d"}})
    assert settings.zones == ("us-west-2a", "us-west-2b", "us-west-2d")
    assert settings.gpu_zone == "us-west-2d"


@pytest.mark.parametrize("size_gib", [1200, 2400, 4800, 24000])
def test_sizes_that_fsx_offers_are_accepted(size_gib: int) -> None:
    assert _settings({"storage": {"size_gib": size_gib}}).storage.size_gib == size_gib


def test_a_missing_or_unsupported_region_is_reported_once() -> None:
    assert _problems({}, None)["aws:region"].fix == "pulumi config set aws:region us-west-2"
    assert set(_problems({}, "cn-north-1")) == {"aws:region"}


def test_names_that_aws_would_reject_are_reported() -> None:
    assert "pulumi stack rename --stack my_stack my-stack" in _problems({}, stack="my_stack")["stack"].fix


#: The longest name of each type that AWS accepts; Pulumi appends a hyphen and seven digits to a logical name.
_LONGEST = {"aws:iam/role:Role": 64, "aws:eks/nodeGroup:NodeGroup": 63, "aws:s3/bucket:Bucket": 63}


def test_every_name_that_is_derived_from_the_longest_stack_name_fits() -> None:
    longest = "a" * aws._MAX_STACK_NAME
    assert _parse({}, stack=longest)
    assert "31 at most" in _problems({}, stack=f"{longest}a")["stack"].allowed
    golden = (Path(__file__).parent / "golden" / "aws.txt").read_text().splitlines()
    names = [(kind, name) for kind, name, *_ in (line.split("  ") for line in golden)]
    # pulumi-eks creates a role of its own: nodejs/eks/cluster/cluster.ts and servicerole.ts.
    names.append(("aws:iam/role:Role", "aws-cluster-eks-eksRole-role"))
    for kind, name in names:
        derived = f"{longest}{name.removeprefix('aws')}-0123456"
        assert len(derived) <= _LONGEST.get(kind, 255), f"{kind} {name}"
    assert _problems({"tags": {"owner": "me", "cost_centre": "tests", "extra": {"aws:x": "y"}}})


def test_a_kubernetes_version_that_yaml_reads_as_a_number_is_accepted() -> None:
    assert _settings({"cluster": {"kubernetes_version": 1.36}}).cluster.kubernetes_version == "1.36"
