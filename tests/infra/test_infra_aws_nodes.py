"""Nodes of an AWS stack: fabric, capacity, launch templates and autoscaling."""

from __future__ import annotations

import pytest
import yaml
from aws_stack import (
    ASSOCIATION,
    BLOCK,
    EKS,
    GROUP,
    LUSTRE,
    NODES,
    P5,
    RELEASE,
    RESERVED,
    SMALL,
    TEMPLATE,
    Run,
    addons_by_name,
    all_statements,
    gpu_nodes,
    gpu_template,
    settings_of,
    user_data_parts,
)

from infra.contract import GPU_LABEL, GPU_TAINT


@pytest.mark.parametrize(
    ("instance_type", "num_cards"), [("p4d.24xlarge", 4), ("p4de.24xlarge", 4), ("p5.48xlarge", 32)]
)
def test_every_network_card_of_a_type_has_an_efa_interface(stack: Run, instance_type: str, num_cards: int) -> None:
    interfaces = gpu_template(stack("aws", {"gpu.instance_type": instance_type}))["networkInterfaces"]
    assert [item["networkCardIndex"] for item in interfaces] == list(range(num_cards))
    assert [item["deviceIndex"] for item in interfaces] == [0] + [1] * (num_cards - 1)
    kinds = [item["interfaceType"] for item in interfaces]
    assert kinds == ["efa"] + ["efa-only"] * (num_cards - 1), "only one interface has an IP address"


def test_interfaces_are_deleted_with_their_node_and_have_no_public_address(stack: Run) -> None:
    recording = stack("aws", P5)
    interfaces = gpu_template(recording)["networkInterfaces"]
    assert {item["deleteOnTermination"] for item in interfaces} == {"true"}, (
        "an interface left behind blocks the deletion of the subnet"
    )
    assert not any("associatePublicIpAddress" in item for item in interfaces)
    subnets = recording.of_type("aws:ec2/subnet:Subnet")
    assert not any(item.inputs["mapPublicIpOnLaunch"] for item in subnets)


def test_the_template_lists_the_clusters_group_and_the_efa_group(stack: Run) -> None:
    groups = [item["securityGroups"] for item in gpu_template(stack("aws"))["networkInterfaces"]]
    expected = ["sg-aws-cluster-eks", "aws-network-efa-id"]
    assert groups == [expected] * len(groups), "with groups in the template EKS adds none, and the node never joins"
    assert "vpcSecurityGroupIds" not in gpu_template(stack("aws")), "EC2 rejects both together"


def test_the_efa_group_allows_traffic_with_itself_only(stack: Run) -> None:
    inputs = stack("aws").one(GROUP, "aws-network-efa").inputs
    everything = {"protocol": "-1", "fromPort": 0, "toPort": 0, "self": True}
    assert inputs["ingress"] == [everything]
    assert inputs["egress"] == [everything], "EFA drops packets that only a range such as 0.0.0.0/0 allows"


def test_a_pod_requests_all_cards_and_the_huge_pages_that_its_node_reserves(stack: Run) -> None:
    from infra.clouds.aws.provision import gpu_pool

    limits = gpu_pool(settings_of(P5)).resource_limits
    assert limits["vpc.amazonaws.com/efa"] == "32"
    assert limits["hugepages-2Mi"] == "5120Mi"
    assert limits["memory"], "Kubernetes rejects huge pages without memory or CPU"
    assert "vm.nr_hugepages = 5128" in user_data_parts(stack("aws", P5))["text/x-shellscript"]


def test_the_efa_plugin_tolerates_the_pools_taint_and_the_image_has_the_libraries(stack: Run) -> None:
    from infra.clouds.aws.provision import fabric

    values = stack("aws").one(RELEASE, "aws-addons-efa-device-plugin").inputs["values"]
    assert GPU_TAINT.manifest in values["tolerations"]
    found = fabric(settings_of(P5))
    assert (found.name, found.image_target, found.rdma) == ("efa", "aws", True)
    assert found.pod_security == "restricted", "EFA needs no privilege"


@pytest.mark.parametrize("region", ["us-gov-west-1", "us-gov-east-1"])
def test_govcloud_nodes_pull_the_efa_plugin_from_a_registry_of_their_partition(stack: Run, region: str) -> None:
    overrides = {"aws:region": region, "gpu.zone": None}
    image = stack("aws", overrides).one(RELEASE, "aws-addons-efa-device-plugin").inputs["values"]["image"]["repository"]
    assert image.endswith(f".dkr.ecr.{region}.amazonaws.com/eks/aws-efa-k8s-device-plugin")


def test_a_type_without_efa_has_no_efa_resources(stack: Run) -> None:
    from infra.clouds.aws.provision import fabric, gpu_pool

    recording = stack("aws", SMALL)
    assert "networkInterfaces" not in gpu_template(recording)
    assert not [item for item in recording.of_type(GROUP) if "efa" in item.name]
    assert not [item for item in recording.of_type(RELEASE) if "efa" in item.name]
    assert recording.of_type("aws:ec2/placementGroup:PlacementGroup") == []
    assert "text/x-shellscript" not in user_data_parts(recording), "huge pages are for libfabric only"
    settings = settings_of(SMALL)
    assert gpu_pool(settings).resource_limits == {"nvidia.com/gpu": "1"}
    assert fabric(settings).chart is None


@pytest.mark.parametrize("capacity", [{}, {"gpu.capacity": "spot"}])
def test_gpu_nodes_start_in_a_placement_group(stack: Run, capacity: dict[str, str]) -> None:
    recording = stack("aws", capacity)
    assert recording.one("aws:ec2/placementGroup:PlacementGroup").inputs["strategy"] == "cluster"
    assert gpu_template(recording)["placement"]["groupName"] == "aws-network-gpu"


@pytest.mark.parametrize("capacity", [RESERVED, BLOCK])
def test_a_reservation_excludes_a_placement_group(stack: Run, capacity: dict[str, str]) -> None:
    recording = stack("aws", capacity)
    assert recording.of_type("aws:ec2/placementGroup:PlacementGroup") == []
    assert "placement" not in gpu_template(recording), (
        "EC2 finds no capacity in a group that the reservation is not part of"
    )
    target = gpu_template(recording)["capacityReservationSpecification"]["capacityReservationTarget"]
    assert target == {"capacityReservationId": "cr-0123456789abcdef0"}


@pytest.mark.parametrize(
    ("capacity", "kind", "market"),
    [
        ({}, "ON_DEMAND", None),
        ({"gpu.capacity": "spot"}, "SPOT", None),
        (RESERVED, "ON_DEMAND", None),
        (BLOCK, "CAPACITY_BLOCK", {"marketType": "capacity-block"}),
    ],
)
def test_nodes_use_the_configured_capacity_type(
    stack: Run, capacity: dict[str, str], kind: str, market: object
) -> None:
    recording = stack("aws", capacity)
    assert gpu_nodes(recording)["capacityType"] == kind
    assert gpu_template(recording).get("instanceMarketOptions") == market


def test_only_the_template_names_the_instance_type(stack: Run) -> None:
    recording = stack("aws", BLOCK)
    assert gpu_template(recording)["instanceType"] == "p4d.24xlarge"
    assert "instanceTypes" not in gpu_nodes(recording), "EKS rejects a type in both places"
    assert "imageId" not in gpu_template(recording), "EKS selects the image by its kind"


def test_gpu_nodes_file_system_and_nat_gateway_are_in_the_chosen_zone(stack: Run) -> None:
    recording = stack("aws", {"gpu.zone": "us-west-2b"})
    assert gpu_nodes(recording)["subnetIds"] == ["aws-network-private-us-west-2b-id"]
    assert recording.one(LUSTRE).inputs["subnetIds"] == "aws-network-private-us-west-2b-id"
    assert recording.one("aws:ec2/natGateway:NatGateway").inputs["subnetId"] == "aws-network-public-us-west-2b-id"


@pytest.mark.parametrize("name", ["aws-cluster-gpu-template", "aws-cluster-system-template"])
def test_nodes_have_an_encrypted_disk_imdsv2_and_tags(stack: Run, name: str) -> None:
    inputs = stack("aws").one(TEMPLATE, name).inputs
    assert inputs["blockDeviceMappings"][0]["ebs"]["encrypted"] == "true"
    assert inputs["metadataOptions"]["httpTokens"] == "required"
    tagged = {item["resourceType"]: item["tags"]["owner"] for item in inputs["tagSpecifications"]}
    assert tagged == dict.fromkeys(("instance", "volume", "network-interface"), "ml-platform")


def test_local_disks_form_one_raid_0(stack: Run) -> None:
    config = yaml.safe_load(user_data_parts(stack("aws"))["application/node.eks.aws"])
    assert config["kind"] == "NodeConfig"
    assert config["spec"]["instance"]["localStorage"]["strategy"] == "RAID0"


def test_user_data_does_not_change_between_two_runs() -> None:
    from infra.clouds.aws.nodes import user_data

    assert user_data(5128) == user_data(5128), "a random boundary would replace every node at every `pulumi up`"


def test_gpu_nodes_have_the_image_label_and_taint_that_charts_expect(stack: Run) -> None:
    inputs = gpu_nodes(stack("aws"))
    assert inputs["amiType"] == "AL2023_x86_64_NVIDIA"
    assert set(GPU_LABEL.items()) <= set(inputs["labels"].items())
    assert inputs["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}]


def test_node_repair_is_on_and_the_monitoring_agent_is_installed(stack: Run) -> None:
    recording = stack("aws")
    assert all(item.inputs["nodeRepairConfig"]["enabled"] for item in recording.of_type(NODES))
    assert "eks-node-monitoring-agent" in addons_by_name(recording)


def test_two_system_nodes_or_more_are_spread_over_all_zones(stack: Run) -> None:
    inputs = stack("aws").one(NODES, "aws-cluster-system-nodes").inputs
    assert inputs["scalingConfig"]["minSize"] == 2
    assert len(inputs["subnetIds"]) == 2
    assert "taints" not in inputs, "everything except training runs here"


def test_tags_describe_a_gpu_node_to_the_autoscaler_while_the_group_is_empty(stack: Run) -> None:
    tags = stack("aws", P5).of_type("aws:autoscaling/tag:Tag")
    assert {item.inputs["autoscalingGroupName"] for item in tags} == {"eks-aws-cluster-gpu-nodes-0"}
    found = {item.inputs["tag"]["key"].partition("node-template/")[2]: item.inputs["tag"]["value"] for item in tags}
    assert found == {
        "label/nvidia.com/gpu.present": "true",
        "label/k8s.amazonaws.com/accelerator": "nvidia-h100-80gb",
        "taint/nvidia.com/gpu": "present:NoSchedule",
        "resources/nvidia.com/gpu": "8",
        "resources/vpc.amazonaws.com/efa": "32",
        "resources/hugepages-2Mi": "10256Mi",
    }, "without them a pod that requests EFA would not make an empty group grow"


def test_gpu_nodes_have_the_accelerator_label(stack: Run) -> None:
    labels = gpu_nodes(stack("aws"))["labels"]
    assert labels["k8s.amazonaws.com/accelerator"] == "nvidia-a100-40gb", (
        "without the label the autoscaler removes a training node because its CPUs are idle"
    )


def test_the_autoscaler_uses_the_service_account_with_its_rights(stack: Run) -> None:
    recording = stack("aws")
    values = recording.one(RELEASE, "aws-addons-cluster-autoscaler").inputs["values"]
    identity = recording.one(ASSOCIATION, "aws-cluster-autoscaler-identity").inputs
    assert values["rbac"]["serviceAccount"]["name"] == identity["serviceAccount"]
    assert values["autoDiscovery"]["clusterName"] == recording.exports["cluster_name"]


def test_the_autoscaler_can_resize_groups_of_its_own_cluster_only(stack: Run) -> None:
    recording = stack("aws")
    statements = [item for item in all_statements(recording) if "autoscaling:SetDesiredCapacity" in item["Action"]]
    assert len(statements) == 1
    (cluster,) = {item.inputs["name"] for item in recording.of_type(EKS)}
    owned = f"aws:ResourceTag/k8s.io/cluster-autoscaler/{cluster}"
    assert statements[0]["Condition"] == {"StringEquals": {owned: "owned"}}
