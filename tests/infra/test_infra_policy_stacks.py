"""Rules of the policy pack about whole stacks, and the facts that clouds provide."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from policy_checks import (
    AKS_POOL,
    BY_NAME,
    GKE_POOL,
    NODE_GROUP,
    OPTIONS,
    TEMPLATE,
    member,
    stack_violations,
    violations,
)
from provider_mocks.recording import Recording, Registration, stacks
from pulumi_policy import (
    PolicyResource,
    ResourceValidationPolicy,
)

from infra import clouds
from infra.policy import facts


def test_a_stack_must_use_one_region_unless_regions_are_configured() -> None:
    zonal = member("aws:ec2/subnet:Subnet", "a", {"availabilityZone": "us-west-2a"})
    same = member("aws:s3/bucket:Bucket", "b", {"region": "us-west-2"})
    other = member("aws:s3/bucket:Bucket", "c", {"region": "eu-west-1"})
    regionless = member("azure-native:privatedns:PrivateZone", "d", {"location": "Global"})
    assert stack_violations("allowed-regions", [zonal, same, regionless]) == []
    assert "c is in eu-west-1" in stack_violations("allowed-regions", [zonal, same, other])[0]
    assert stack_violations("allowed-regions", [zonal, same, other], {"regions": ["us-west-2", "eu-west-1"]}) == []
    assert len(stack_violations("allowed-regions", [zonal, same], {"regions": ["eu-west-1"]})) == 2


def test_spellings_of_a_region_are_equal() -> None:
    places = [{"location": "East US"}, {"location": "eastus"}]
    resources = [
        member("azure-native:resources:ResourceGroup", str(index), place) for index, place in enumerate(places)
    ]
    assert stack_violations("allowed-regions", resources, {"regions": ["eastus"]}) == []
    zones = [{"location": "US-CENTRAL1"}, {"zone": "us-central1-a"}]
    resources = [member("gcp:storage/bucket:Bucket", str(index), place) for index, place in enumerate(zones)]
    assert stack_violations("allowed-regions", resources, {"regions": ["us-central1"]}) == []


def nodes(count: int) -> list[PolicyResource]:
    template = member(TEMPLATE, "template", {"instanceType": "p4d.24xlarge"})
    return [template, member(NODE_GROUP, "gpu", {"scalingConfig": {"maxSize": count}}, [template])]


def test_the_cost_ceiling_counts_every_pool_at_its_maximum() -> None:
    assert stack_violations("cost-ceiling", nodes(2)) == []
    assert "9 x p4d.24xlarge" in stack_violations("cost-ceiling", nodes(9))[0]
    assert stack_violations("cost-ceiling", nodes(9), {"maxUsdPerHour": 1000}) == []
    assert stack_violations("cost-ceiling", nodes(2), {"maxUsdPerHour": 43})
    assert stack_violations("cost-ceiling", [*nodes(2), *nodes(3)]), "the ceiling applies to the sum of all pools"
    azure = member(AKS_POOL, "gpu", {"vmSize": "Standard_ND96asr_v4", "enableAutoScaling": True, "maxCount": 50})
    gcp = member(
        GKE_POOL, "g", {"nodeConfig": {"machineType": "a2-highgpu-8g"}, "autoscaling": {"totalMaxNodeCount": 50}}
    )
    assert stack_violations("cost-ceiling", [azure])
    assert stack_violations("cost-ceiling", [gcp])


def test_a_type_without_a_price_is_rejected_until_one_is_configured() -> None:
    pool = member(AKS_POOL, "gpu", {"vmSize": "Standard_New", "count": 2})
    assert "no price is known for Standard_New" in stack_violations("cost-ceiling", [pool])[0]
    assert stack_violations("cost-ceiling", [pool], {"prices": {"Standard_New": 1.0}}) == []


OWN_STACKS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in stacks()),
    ("gcp", {"gpu.instance_type": "a3-highgpu-8g"}),
    ("aws", {"network.authorized_cidrs": ["198.51.100.7/32"]}),
    ("gcp", {"job.launcher": "vertex"}),
    ("azure", {"job.launcher": "azureml"}),
]


@pytest.mark.parametrize(("name", "overrides"), OWN_STACKS, ids=[f"{name} {list(given)}" for name, given in OWN_STACKS])
def test_the_repositorys_stacks_pass_every_rule(
    name: str, overrides: dict[str, object], stack: Callable[..., Recording]
) -> None:
    recording = stack(name, overrides)
    # Two nodes of the largest type cost more than the default ceiling.
    ceiling = {"maxUsdPerHour": 250} if overrides else {}
    found = [
        f"{rule}: {item.type} {item.name}: {text}"
        for item in recording.registrations
        for rule, policy in BY_NAME.items()
        if isinstance(policy, ResourceValidationPolicy)
        for text in violations(rule, item.type, item.inputs)
    ]
    members = as_members(recording)
    found += stack_violations("allowed-regions", members)
    found += stack_violations("cost-ceiling", members, ceiling)
    assert found == []
    if name != "local":
        assert stack_violations("cost-ceiling", members, {"maxUsdPerHour": 20}), "the rule counts no pool of this cloud"


def as_members(recording: Recording) -> list[PolicyResource]:
    """Return the recorded resources with their dependencies."""

    def convert(item: Registration) -> PolicyResource:
        return PolicyResource(item.type, dict(item.inputs), item.urn, item.name, OPTIONS, None, None, [], {})

    by_urn = {item.urn: convert(item) for item in recording.registrations}
    for item in recording.registrations:
        by_urn[item.urn].dependencies.extend(by_urn[urn] for urn in item.dependencies if urn in by_urn)
    return list(by_urn.values())


FOURTH_POLICY = """
from infra.policy_facts import CloudPolicy, NodePool, require_flag

POLICY = CloudPolicy(
    types=("fourth:*",),
    encryption={"fourth:index:Disk": require_flag("encrypted", "a disk")},
    node_pools={"fourth:index:Pool": lambda props, _: [NodePool("f1.large", props["size"])]},
)
"""


@pytest.fixture
def fourth_policy(fourth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the fourth cloud a `policy.py`."""
    (Path(clouds.__path__[-1]) / fourth / "policy.py").write_text(FOURTH_POLICY)
    monkeypatch.setattr(facts, "of_clouds", facts.of_clouds.__wrapped__)


@pytest.mark.usefixtures("fourth_policy")
def test_a_new_cloud_brings_its_own_policy_facts() -> None:
    assert violations("encryption-at-rest", "fourth:index:Disk", {"encrypted": False})
    assert violations("tags-present", "fourth:index:Disk", {"encrypted": True})
    pool = member("fourth:index:Pool", "gpu", {"size": 3})
    assert (
        "3 x f1.large"
        in stack_violations("cost-ceiling", [pool], {"maxUsdPerHour": 1, "prices": {"f1.large": 10.0}})[0]
    )


def test_the_policy_pack_names_no_cloud() -> None:
    folder = Path(facts.__file__).parent
    words = re.compile(r"aws|eks|azure|aks|gcp|gke|google|amazon", re.IGNORECASE)
    found = [
        f"{path.name}: {line}"
        for path in folder.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if words.search(line)
    ]
    assert not found, "a cloud's facts belong into infra/clouds/<cloud>/policy.py"
