"""The size of the GPU node group, which the cluster-autoscaler owns after the first `up`."""

from __future__ import annotations

import pulumi
import pytest
from aws_stack import BLOCK, NODES, RESERVED, Run, gpu_nodes

from infra.clouds.aws import nodes
from infra.clouds.aws.live import Scaling, plan_scaling


@pytest.mark.parametrize(
    ("overrides", "num_nodes"),
    [({}, 0), ({"gpu.nodes.min": 1}, 1), ({"gpu.capacity": "spot"}, 0), (RESERVED, 2), (BLOCK, 2)],
)
def test_up_starts_the_nodes_that_are_paid_for_anyway(stack: Run, overrides: dict[str, object], num_nodes: int) -> None:
    assert gpu_nodes(stack("aws", overrides))["scalingConfig"]["desiredSize"] == num_nodes


def test_the_first_up_ignores_later_changes_of_the_number_of_nodes(stack: Run) -> None:
    group = stack("aws").one(NODES, "aws-cluster-gpu-nodes")
    assert group.ignored == ("scalingConfig.desiredSize",)


@pytest.mark.parametrize(
    ("bounds", "live", "expected"),
    [
        ((0, 4), None, (Scaling(0, 0, 4), True)),
        ((0, 4), Scaling(0, 3, 4), (Scaling(0, 0, 4), True)),
        ((0, 6), Scaling(0, 3, 4), (Scaling(0, 3, 6), False)),
        ((1, 4), Scaling(0, 0, 4), (Scaling(1, 1, 4), False)),
        ((0, 3), Scaling(0, 3, 4), (Scaling(0, 3, 3), False)),
    ],
)
def test_a_changed_bound_is_sent_with_the_running_number_of_nodes(
    bounds: tuple[int, int], live: Scaling | None, expected: tuple[Scaling, bool]
) -> None:
    assert plan_scaling(bounds, start=0, live=live, stack="aws") == expected


def test_a_maximum_below_the_running_number_of_nodes_is_refused() -> None:
    with pytest.raises(pulumi.RunError, match=r"got 2; allowed: 3 or more\. Fix: pulumi config set --path gpu.nodes"):
        plan_scaling((0, 2), start=0, live=Scaling(0, 3, 4), stack="aws")


@pytest.mark.parametrize(("region", "letter"), [("us-east-1", "e"), ("us-west-1", "c"), ("ca-central-1", "d")])
def test_a_zone_that_eks_does_not_support_is_refused_before_any_resource(stack: Run, region: str, letter: str) -> None:
    overrides = {"aws:region": region, "network.zones": [f"{region}a", f"{region}{letter}"]}
    recording = stack("aws", overrides, fails=True)
    assert f"got {region}{letter}" in str(recording.error)
    assert "pulumi config set --path 'network.zones[1]' <zone>" in str(recording.error)
    assert not [item for item in recording.registrations if item.custom]


def test_a_group_whose_creation_failed_is_an_error_with_the_command_that_replaces_it() -> None:
    urn = "urn:pulumi:aws::torchrec-cloud::aws:eks/nodeGroup:NodeGroup::aws-cluster-gpu-nodes"
    assert nodes._require_usable("aws", urn, "ACTIVE", "eks-gpu") == "eks-gpu"
    with pytest.raises(pulumi.RunError, match=rf"python -m infra up --stack aws --replace '{urn}'"):
        nodes._require_usable("aws", urn, "CREATE_FAILED", "")
