"""AWS: one sentence for each promise, read off what the real program registers."""

from __future__ import annotations

import base64
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from email import message_from_bytes
from typing import Any

import pytest
import yaml
from provider_mocks.recording import PROJECT, Recording, Registration, stack_config

from infra.clouds.aws.network import subnet_layout
from infra.clouds.aws.settings import Settings
from infra.contract import GPU_LABEL, GPU_TAINT
from infra.stack import parse
from workloads.settings import SECTIONS

Run = Callable[..., Recording]

TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
GROUP = "aws:ec2/securityGroup:SecurityGroup"
NODES = "aws:eks/nodeGroup:NodeGroup"
ADDON = "aws:eks/addon:Addon"
ROLE = "aws:iam/role:Role"
EKS = "eks:index:Cluster"
LUSTRE = "aws:fsx/lustreFileSystem:LustreFileSystem"
ASSOCIATION = "aws:eks/podIdentityAssociation:PodIdentityAssociation"
RELEASE = "kubernetes:helm.sh/v3:Release"

P5 = {"gpu.instance_type": "p5.48xlarge"}
SMALL = {"gpu.instance_type": "g5.xlarge"}
RESERVED = {"gpu.capacity": "reservation", "gpu.reservation_id": "cr-0123456789abcdef0"}
BLOCK = {"gpu.capacity": "capacity_block", "gpu.reservation_id": "cr-0123456789abcdef0"}


def _template(recording: Recording) -> Mapping[str, Any]:
    return recording.one(TEMPLATE, "aws-cluster-gpu-template").inputs


def _nodes(recording: Recording) -> Mapping[str, Any]:
    return recording.one(NODES, "aws-cluster-gpu-nodes").inputs


def _user_data(recording: Recording) -> dict[str, str]:
    """The parts of a GPU node's user data by content type."""
    document = message_from_bytes(base64.b64decode(_template(recording)["userData"]))
    parts = {}
    for part in document.walk():
        if not part.is_multipart():
            payload = part.get_payload(decode=True)
            assert isinstance(payload, bytes)
            parts[part.get_content_type()] = payload.decode()
    return parts


def _settings(overrides: Mapping[str, object]) -> Settings:
    """The checked settings of the repository's own stack with these overrides."""
    settings = parse(stack_config("aws", overrides), PROJECT, "aws", SECTIONS).settings
    assert isinstance(settings, Settings)
    return settings


# The fabric


@pytest.mark.parametrize(
    ("instance_type", "num_cards"), [("p4d.24xlarge", 4), ("p4de.24xlarge", 4), ("p5.48xlarge", 32)]
)
def test_every_network_card_of_a_type_has_an_efa_interface(stack: Run, instance_type: str, num_cards: int) -> None:
    interfaces = _template(stack("aws", {"gpu.instance_type": instance_type}))["networkInterfaces"]
    assert [item["networkCardIndex"] for item in interfaces] == list(range(num_cards))
    assert [item["deviceIndex"] for item in interfaces] == [0] + [1] * (num_cards - 1)
    kinds = [item["interfaceType"] for item in interfaces]
    assert kinds == ["efa"] + ["efa-only"] * (num_cards - 1), "one IP interface; the others would each take an address"


def test_interfaces_go_with_their_node_and_have_no_public_address(stack: Run) -> None:
    recording = stack("aws", P5)
    interfaces = _template(recording)["networkInterfaces"]
    assert {item["deleteOnTermination"] for item in interfaces} == {"true"}, "what stays behind holds the subnet"
    assert not any("associatePublicIpAddress" in item for item in interfaces)
    subnets = recording.of_type("aws:ec2/subnet:Subnet")
    assert not any(item.inputs["mapPublicIpOnLaunch"] for item in subnets)


def test_the_template_lists_the_clusters_group_and_the_efa_group(stack: Run) -> None:
    groups = [item["securityGroups"] for item in _template(stack("aws"))["networkInterfaces"]]
    expected = ["sg-aws-cluster-eks", "aws-network-efa-id"]
    assert groups == [expected] * len(groups), "with groups in the template EKS adds none, and the node never joins"
    assert "vpcSecurityGroupIds" not in _template(stack("aws")), "EC2 refuses both"


def test_the_efa_groups_way_in_and_way_out_are_itself(stack: Run) -> None:
    inputs = stack("aws").one(GROUP, "aws-network-efa").inputs
    everything = {"protocol": "-1", "fromPort": 0, "toPort": 0, "self": True}
    assert inputs["ingress"] == [everything]
    assert inputs["egress"] == [everything], "a range such as 0.0.0.0/0 does not let EFA's packets out"


def test_a_pod_takes_all_cards_and_the_huge_pages_that_its_node_sets_aside(stack: Run) -> None:
    from infra.clouds.aws.provision import gpu_pool

    limits = gpu_pool(_settings(P5)).resource_limits
    assert limits["vpc.amazonaws.com/efa"] == "32"
    assert limits["hugepages-2Mi"] == "5120Mi"
    assert limits["memory"], "Kubernetes refuses huge pages without memory or CPU"
    assert "vm.nr_hugepages = 5128" in _user_data(stack("aws", P5))["text/x-shellscript"]


def test_the_efa_plugin_runs_on_the_tainted_pool_and_the_image_carries_the_libraries(stack: Run) -> None:
    from infra.clouds.aws.provision import fabric

    values = stack("aws").one(RELEASE, "aws-addons-efa-device-plugin").inputs["values"]
    assert GPU_TAINT.manifest in values["tolerations"]
    found = fabric(_settings(P5))
    assert (found.name, found.image_target) == ("efa", "aws")
    assert found.pod_security == "restricted", "EFA needs no privilege"


def test_a_type_without_efa_gets_nothing_of_it(stack: Run) -> None:
    from infra.clouds.aws.provision import fabric, gpu_pool

    recording = stack("aws", SMALL)
    assert "networkInterfaces" not in _template(recording)
    assert not [item for item in recording.of_type(GROUP) if "efa" in item.name]
    assert not [item for item in recording.of_type(RELEASE) if "efa" in item.name]
    assert recording.of_type("aws:ec2/placementGroup:PlacementGroup") == []
    assert "text/x-shellscript" not in _user_data(recording), "huge pages are for libfabric only"
    settings = _settings(SMALL)
    assert gpu_pool(settings).resource_limits == {"nvidia.com/gpu": "1"}
    assert fabric(settings).chart is None


# Capacity


@pytest.mark.parametrize("capacity", [{}, {"gpu.capacity": "spot"}])
def test_gpu_nodes_are_packed_into_a_placement_group(stack: Run, capacity: dict[str, str]) -> None:
    recording = stack("aws", capacity)
    assert recording.one("aws:ec2/placementGroup:PlacementGroup").inputs["strategy"] == "cluster"
    assert _template(recording)["placement"]["groupName"] == "aws-network-gpu"


@pytest.mark.parametrize("capacity", [RESERVED, BLOCK])
def test_there_is_no_placement_group_beside_a_reservation(stack: Run, capacity: dict[str, str]) -> None:
    recording = stack("aws", capacity)
    assert recording.of_type("aws:ec2/placementGroup:PlacementGroup") == []
    assert "placement" not in _template(recording), "EC2 finds no capacity in a group where nothing was reserved"
    target = _template(recording)["capacityReservationSpecification"]["capacityReservationTarget"]
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
def test_capacity_is_bought_as_asked(stack: Run, capacity: dict[str, str], kind: str, market: object) -> None:
    recording = stack("aws", capacity)
    assert _nodes(recording)["capacityType"] == kind
    assert _template(recording).get("instanceMarketOptions") == market


def test_the_type_stands_in_the_template_and_nowhere_else(stack: Run) -> None:
    recording = stack("aws", BLOCK)
    assert _template(recording)["instanceType"] == "p4d.24xlarge"
    assert "instanceTypes" not in _nodes(recording), "EKS refuses a type in both places"
    assert "imageId" not in _template(recording), "EKS picks the image by its kind"


def test_all_gpu_nodes_are_in_the_one_zone_that_was_chosen(stack: Run) -> None:
    recording = stack("aws", {"gpu.zone": "us-west-2b"})
    assert _nodes(recording)["subnetIds"] == ["aws-network-private-us-west-2b-id"]
    assert recording.one(LUSTRE).inputs["subnetIds"] == "aws-network-private-us-west-2b-id"
    assert recording.one("aws:ec2/natGateway:NatGateway").inputs["subnetId"] == "aws-network-public-us-west-2b-id"


# Nodes


@pytest.mark.parametrize("name", ["aws-cluster-gpu-template", "aws-cluster-system-template"])
def test_nodes_have_an_encrypted_disk_imdsv2_and_tags_on_all_their_parts(stack: Run, name: str) -> None:
    inputs = stack("aws").one(TEMPLATE, name).inputs
    assert inputs["blockDeviceMappings"][0]["ebs"]["encrypted"] == "true"
    assert inputs["metadataOptions"]["httpTokens"] == "required"
    tagged = {item["resourceType"]: item["tags"]["owner"] for item in inputs["tagSpecifications"]}
    assert tagged == dict.fromkeys(("instance", "volume", "network-interface"), "ml-platform")


def test_local_disks_become_one(stack: Run) -> None:
    config = yaml.safe_load(_user_data(stack("aws"))["application/node.eks.aws"])
    assert config["kind"] == "NodeConfig"
    assert config["spec"]["instance"]["localStorage"]["strategy"] == "RAID0"


def test_user_data_does_not_change_between_two_runs() -> None:
    from infra.clouds.aws.nodes import user_data

    assert user_data(5128) == user_data(5128), "a random boundary would replace every node at every `pulumi up`"


def test_the_gpu_image_the_label_and_the_taint_are_those_that_charts_expect(stack: Run) -> None:
    inputs = _nodes(stack("aws"))
    assert inputs["amiType"] == "AL2023_x86_64_NVIDIA"
    assert set(GPU_LABEL.items()) <= set(inputs["labels"].items())
    assert inputs["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}]


def test_broken_nodes_are_repaired_and_the_agent_that_finds_them_is_there(stack: Run) -> None:
    recording = stack("aws")
    assert all(item.inputs["nodeRepairConfig"]["enabled"] for item in recording.of_type(NODES))
    assert "eks-node-monitoring-agent" in _addons(recording)


def test_two_system_nodes_or_more_are_spread_over_all_zones(stack: Run) -> None:
    inputs = stack("aws").one(NODES, "aws-cluster-system-nodes").inputs
    assert inputs["scalingConfig"]["minSize"] == 2
    assert len(inputs["subnetIds"]) == 2
    assert "taints" not in inputs, "everything that does not train runs here"


# Autoscaling


def test_the_autoscaler_knows_what_a_node_would_offer_while_there_is_none(stack: Run) -> None:
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
    }, "with min 0 a pod that asks for EFA would never make it add a node"


def test_the_autoscaler_judges_a_node_by_its_gpus(stack: Run) -> None:
    labels = _nodes(stack("aws"))["labels"]
    assert labels["k8s.amazonaws.com/accelerator"] == "nvidia-a100-40gb", (
        "without the label it counts CPUs, which idle in training, and takes the node away"
    )


def test_the_autoscaler_runs_under_the_account_that_has_its_rights(stack: Run) -> None:
    recording = stack("aws")
    values = recording.one(RELEASE, "aws-addons-cluster-autoscaler").inputs["values"]
    identity = recording.one(ASSOCIATION, "aws-cluster-autoscaler-identity").inputs
    assert values["rbac"]["serviceAccount"]["name"] == identity["serviceAccount"]
    assert values["autoDiscovery"]["clusterName"] == recording.exports["cluster_name"]


def test_the_autoscaler_resizes_groups_of_its_own_cluster_only(stack: Run) -> None:
    statements = [item for item in _statements(stack("aws")) if "autoscaling:SetDesiredCapacity" in item["Action"]]
    assert len(statements) == 1
    owned = "aws:ResourceTag/k8s.io/cluster-autoscaler/torchrec-cloud-aws"
    assert statements[0]["Condition"] == {"StringEquals": {owned: "owned"}}


# The control plane


def test_the_control_plane_is_private_until_ranges_are_authorised(stack: Run) -> None:
    closed = stack("aws").one(EKS).inputs
    assert (closed["endpointPrivateAccess"], closed["endpointPublicAccess"]) == (True, False)
    assert "publicAccessCidrs" not in closed, "pulumi-eks refuses even an empty list beside a private endpoint"
    opened = stack("aws", {"network.authorized_cidrs": ["198.51.100.0/24"]}).one(EKS).inputs
    assert opened["endpointPublicAccess"] is True
    assert opened["publicAccessCidrs"] == ["198.51.100.0/24"]


def test_access_secrets_and_logs_of_the_control_plane_are_as_promised(stack: Run) -> None:
    recording = stack("aws")
    inputs = recording.one(EKS).inputs
    assert inputs["authenticationMode"] == "API"
    assert inputs["encryptionConfigKeyArn"].startswith("arn:aws:kms:")
    assert set(inputs["enabledClusterLogTypes"]) == {"api", "audit", "authenticator", "controllerManager", "scheduler"}
    assert recording.one("aws:kms/key:Key").inputs["enableKeyRotation"] is True


def test_pulumi_eks_makes_no_nodes_groups_or_addons_of_its_own(stack: Run) -> None:
    inputs = stack("aws").one(EKS).inputs
    assert inputs["skipDefaultNodeGroup"] is True
    assert inputs["skipDefaultSecurityGroups"] is True
    assert inputs["bootstrapSelfManagedAddons"] is False
    assert inputs["useDefaultVpcCni"] is True, "false makes pulumi-eks install a second one"
    assert inputs["corednsAddonOptions"]["enabled"] is inputs["kubeProxyAddonOptions"]["enabled"] is False


def test_further_administrators_are_access_entries(stack: Run) -> None:
    arn = "arn:aws:iam::123456789012:role/ops"
    (entry,) = stack("aws", {"cluster.admin_role_arns": [arn]}).one(EKS).inputs["accessEntries"].values()
    assert entry["principalArn"] == arn


def test_the_kubeconfig_is_secret_and_holds_no_token(stack: Run) -> None:
    recording = stack("aws")
    assert "kubeconfig" in recording.secret_exports
    (user,) = json.loads(recording.exports["kubeconfig"])["users"]
    assert set(user["user"]) == {"exec"}, "credentials are fetched for minutes, never stored"


def test_no_log_outlives_its_retention_and_the_stack(stack: Run) -> None:
    recording = stack("aws", {"monitoring.log_retention_days": 7})
    groups = {item.inputs["name"]: item for item in recording.of_type("aws:cloudwatch/logGroup:LogGroup")}
    assert set(groups) == {
        "/aws/eks/torchrec-cloud-aws/cluster",
        *(
            f"/aws/containerinsights/torchrec-cloud-aws/{kind}"
            for kind in ("application", "dataplane", "host", "performance")
        ),
    }, "a group that AWS makes itself is kept for ever and billed after destroy"
    assert {item.inputs["retentionInDays"] for item in groups.values()} == {7}
    writer = recording.one(ADDON, "aws-monitoring-cloudwatch")
    assert all(recording.needs(writer, item) for name, item in groups.items() if "containerinsights" in name)
    assert recording.needs(recording.one(EKS), groups["/aws/eks/torchrec-cloud-aws/cluster"])


# Add-ons


def _addons(recording: Recording) -> dict[str, Registration]:
    return {item.inputs["addonName"]: item for item in recording.of_type(ADDON)}


def test_all_addons_are_there_and_those_that_call_aws_have_an_identity(stack: Run) -> None:
    found = {
        name: [item["serviceAccount"] for item in addon.inputs.get("podIdentityAssociations", [])]
        for name, addon in _addons(stack("aws")).items()
    }
    assert found == {
        "vpc-cni": ["aws-node"],
        "kube-proxy": [],
        "eks-pod-identity-agent": [],
        "coredns": [],
        "aws-ebs-csi-driver": ["ebs-csi-controller-sa"],
        "aws-fsx-csi-driver": [],
        "eks-node-monitoring-agent": [],
        "metrics-server": [],
        "amazon-cloudwatch-observability": ["cloudwatch-agent"],
    }


def test_cloudwatch_can_be_left_out(stack: Run) -> None:
    recording = stack("aws", {"monitoring.cloudwatch": False})
    assert "amazon-cloudwatch-observability" not in _addons(recording)
    assert not [item for item in recording.of_type("aws:cloudwatch/logGroup:LogGroup") if "monitoring" in item.name]


@pytest.mark.parametrize(("prometheus", "cloudwatch_measures_gpus"), [(True, False), (False, True)])
def test_exactly_one_exporter_measures_the_gpus(stack: Run, prometheus: bool, cloudwatch_measures_gpus: bool) -> None:
    recording = stack("aws", {"addons.monitoring": prometheus})
    values = json.loads(_addons(recording)["amazon-cloudwatch-observability"].inputs["configurationValues"])
    kubernetes = values["agent"]["config"]["logs"]["metrics_collected"]["kubernetes"]
    assert kubernetes["accelerated_compute_metrics"] is cloudwatch_measures_gpus
    assert bool([item for item in recording.of_type(RELEASE) if "dcgm" in item.name]) is prometheus


# The network


def test_subnets_never_move(stack: Run) -> None:
    layout = subnet_layout("10.0.0.0/16", ["a", "b", "c"])
    assert {zone: (ranges.private, ranges.public) for zone, ranges in layout.items()} == {
        "a": ("10.0.0.0/19", "10.0.224.0/22"),
        "b": ("10.0.32.0/19", "10.0.228.0/22"),
        "c": ("10.0.64.0/19", "10.0.232.0/22"),
    }, "a range that moves replaces every node and the file system in it"
    assert subnet_layout("10.0.0.0/16", ["a", "b"]) == {key: layout[key] for key in ("a", "b")}
    found = {item.inputs["cidrBlock"] for item in stack("aws").of_type("aws:ec2/subnet:Subnet")}
    assert found == {"10.0.0.0/19", "10.0.32.0/19", "10.0.224.0/22", "10.0.228.0/22"}


def test_nodes_reach_the_internet_through_nat_and_aws_through_endpoints(stack: Run) -> None:
    recording = stack("aws")
    route = recording.one("aws:ec2/route:Route", "aws-network-way-out").inputs
    assert route["natGatewayId"] == "aws-network-nat-id"
    endpoints = {
        item.inputs["serviceName"]: item.inputs for item in recording.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")
    }
    kinds = {name.removeprefix("com.amazonaws.us-west-2."): item["vpcEndpointType"] for name, item in endpoints.items()}
    assert kinds == {"s3": "Gateway", "ecr.api": "Interface", "ecr.dkr": "Interface"}
    assert endpoints["com.amazonaws.us-west-2.s3"]["routeTableIds"] == ["aws-network-private-id"]
    assert endpoints["com.amazonaws.us-west-2.ecr.dkr"]["privateDnsEnabled"] is True


def test_no_security_group_lets_the_internet_in(stack: Run) -> None:
    for group in stack("aws").of_type(GROUP):
        ranges = [cidr for rule in group.inputs["ingress"] for cidr in rule.get("cidrBlocks", [])]
        assert set(ranges) <= {"10.0.0.0/16"}, group.name


# Storage


def test_the_bucket_is_private_encrypted_versioned_and_tls_only(stack: Run) -> None:
    recording = stack("aws")
    blocked = recording.one("aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock").inputs
    keys = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    assert all(blocked[key] is True for key in keys)
    versioning = recording.one("aws:s3/bucketVersioning:BucketVersioning").inputs
    assert versioning["versioningConfiguration"]["status"] == "Enabled"
    (statement,) = _document(recording.one("aws:s3/bucketPolicy:BucketPolicy").inputs["policy"])
    assert statement["Effect"] == "Deny"
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert len(statement["Resource"]) == 2, "the bucket and what is in it"


def test_kept_checkpoints_do_not_need_a_key_that_destroy_deletes(stack: Run) -> None:
    name = "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
    (rule,) = stack("aws").one(name).inputs["rules"]
    assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}


@pytest.mark.parametrize(("on_destroy", "kept"), [("keep", True), ("delete", False)])
def test_the_bucket_is_kept_with_its_protections_or_deleted_with_its_content(
    stack: Run, on_destroy: str, kept: bool
) -> None:
    recording = stack("aws", {"storage.on_destroy": on_destroy})
    parts = [item for item in recording.registrations if item.type.startswith("aws:s3/")]
    assert len(parts) == 8
    assert {item.retained for item in parts} == {kept}, "a kept bucket must not lose its policy or become public"
    assert recording.one("aws:s3/bucket:Bucket").inputs["forceDestroy"] is not kept
    others = [item for item in recording.registrations if item not in parts and item.retained]
    assert not others, "what is retained beside the bucket would be billed for ever"


def test_old_versions_and_unfinished_uploads_are_dropped(stack: Run) -> None:
    (rule,) = _lifecycle(stack("aws"))
    assert rule["noncurrentVersionExpiration"]["noncurrentDays"] == 30
    assert rule["abortIncompleteMultipartUpload"]["daysAfterInitiation"] == 7


def test_old_checkpoints_expire_when_asked_and_datasets_never(stack: Run) -> None:
    rules = _lifecycle(stack("aws", {"storage.expire_checkpoints_after_days": 90}))
    expiring = [rule for rule in rules if "expiration" in rule]
    assert [(rule["filter"]["prefix"], rule["expiration"]["days"]) for rule in expiring] == [("checkpoints/", 90)]


def _lifecycle(recording: Recording) -> list[dict[str, Any]]:
    name = "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
    return list(recording.one(name).inputs["rules"])


def test_the_file_system_is_persistent_lustre_of_the_size_and_throughput_asked_for(stack: Run) -> None:
    wanted = {"storage.size_gib": 4800, "storage.throughput_mb_per_second_per_tib": 500}
    inputs = stack("aws", wanted).one(LUSTRE).inputs
    assert inputs["deploymentType"] == "PERSISTENT_2"
    assert (inputs["storageCapacity"], inputs["perUnitStorageThroughput"]) == (4800, 500)
    assert inputs["kmsKeyId"].startswith("arn:aws:kms:")
    assert inputs["skipFinalBackup"] is True, "a backup would outlive the stack and be billed"


def test_datasets_of_the_bucket_are_files_and_deleting_a_file_keeps_the_object(stack: Run) -> None:
    inputs = stack("aws").one("aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation").inputs
    assert inputs["dataRepositoryPath"] == "s3://aws-storage-bucket-0a1b2c3/datasets/"
    assert inputs["s3"]["autoImportPolicy"]["events"] == ["NEW", "CHANGED", "DELETED"]
    assert "DELETED" not in inputs["s3"]["autoExportPolicy"]["events"], "the file system is a cache of the bucket"


def test_lustres_ports_are_open_to_nodes_and_its_own_servers_only(stack: Run) -> None:
    inputs = stack("aws").one(GROUP, "aws-storage-lustre-clients").inputs
    for rules in (inputs["ingress"], inputs["egress"]):
        assert [(rule["fromPort"], rule["toPort"]) for rule in rules] == [(988, 988), (1018, 1023)]
        assert all(rule["securityGroups"] == ["sg-aws-cluster-eks"] and rule["self"] for rule in rules)


def test_the_volume_names_the_file_system_as_its_driver_wants(stack: Run) -> None:
    spec = stack("aws").one("kubernetes:core/v1:PersistentVolume").inputs["spec"]
    assert spec["csi"]["driver"] == "fsx.csi.aws.com"
    assert spec["csi"]["volumeHandle"] == "aws-storage-lustre-id"
    assert spec["csi"]["volumeAttributes"]["mountname"] == "abcdefgh"
    assert spec["mountOptions"] == ["flock"]


# Rights


def _document(policy: str) -> list[dict[str, Any]]:
    return list(json.loads(policy)["Statement"])


def _statements(recording: Recording) -> Iterator[dict[str, Any]]:
    """Every statement of every policy that the program writes, trust policies included."""
    for item in recording.registrations:
        for key in ("policy", "assumeRolePolicy"):
            if item.type.startswith(("aws:iam/", "aws:s3/", "aws:kms/")) and key in item.inputs:
                yield from _document(item.inputs[key])


def test_no_policy_allows_a_wildcard_of_actions_or_any_action_on_everything_but_looking(stack: Run) -> None:
    allowed = [item for item in _statements(stack("aws")) if item["Effect"] == "Allow"]
    assert len(allowed) >= 10
    for item in allowed:
        assert not [action for action in item["Action"] if "*" in action], item
        if "*" in item.get("Resource", []):
            changes = [
                action for action in item["Action"] if not action.partition(":")[2].startswith(("Describe", "Get"))
            ]
            assert not changes, item


def test_no_role_gets_a_policy_of_aws_that_is_for_administrators(stack: Run) -> None:
    attached = stack("aws").of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    names = {item.inputs["policyArn"].rpartition("/")[2] for item in attached}
    assert names == {
        "AmazonEKSWorkerNodePolicy",
        "AmazonEC2ContainerRegistryPullOnly",
        "AmazonEKS_CNI_Policy",
        "AmazonEBSCSIDriverPolicy",
        "CloudWatchAgentServerPolicy",
    }


def test_the_trainer_writes_checkpoints_reads_datasets_and_nothing_else(stack: Run) -> None:
    recording = stack("aws")
    statements = _document(
        recording.one("aws:iam/rolePolicy:RolePolicy", "aws-storage-trainer-policy").inputs["policy"]
    )
    bucket = "arn:aws:s3:::aws-storage-bucket-0a1b2c3"
    by_resource = {item["Resource"][0]: set(item["Action"]) for item in statements}
    assert set(by_resource) == {bucket, f"{bucket}/checkpoints/*", f"{bucket}/datasets/*"}
    assert by_resource[f"{bucket}/datasets/*"] == {"s3:GetObject"}
    assert "s3:DeleteObject" in by_resource[f"{bucket}/checkpoints/*"], "keep-last-N deletes"


def test_the_trainers_service_account_has_its_role_through_pod_identity(stack: Run) -> None:
    recording = stack("aws", {"namespace": "ranking"})
    inputs = recording.one(ASSOCIATION, "aws-storage-trainer-identity").inputs
    assert (inputs["namespace"], inputs["serviceAccount"]) == ("ranking", "trainer")
    (trust,) = _document(recording.one(ROLE, "aws-storage-trainer-role").inputs["assumeRolePolicy"])
    assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert trust["Action"] == ["sts:AssumeRole", "sts:TagSession"], "Pod Identity tags its sessions"


def test_rights_are_spelled_for_the_partition_of_the_region(stack: Run) -> None:
    recording = stack("aws", {"aws:region": "us-gov-west-1"})
    arns = [item.inputs["policyArn"] for item in recording.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")]
    assert arns
    assert all(arn.startswith("arn:aws-us-gov:iam::aws:policy/") for arn in arns)


# Tags and the registry


def test_every_resource_that_takes_tags_is_tagged(stack: Run) -> None:
    expected = {"project": PROJECT, "stack": "aws", "owner": "ml-platform", "cost-centre": "recommendation"}
    taggable = [item for item in stack("aws").registrations if item.custom and _takes_tags(item.type)]
    assert len(taggable) > 30
    untagged = {item.name for item in taggable if not expected.items() <= (item.inputs.get("tags") or {}).items()}
    assert not untagged, "nobody would know whose bill it is"


def _takes_tags(token: str) -> bool:
    """Whether the SDK's class of an AWS type has an argument `tags`."""
    package, module, kind = token.split(":")
    if package != "aws":
        return False
    resource = getattr(importlib.import_module(f"pulumi_aws.{module.partition('/')[0]}"), kind)
    return "tags" in inspect.signature(resource._internal_init).parameters


def test_images_cannot_be_moved_are_scanned_and_do_not_stop_destroy(stack: Run) -> None:
    recording = stack("aws")
    inputs = recording.one("aws:ecr/repository:Repository").inputs
    assert inputs["imageTagMutability"] == "IMMUTABLE"
    assert inputs["imageScanningConfiguration"]["scanOnPush"] is True
    assert inputs["forceDelete"] is True
    assert recording.exports["registry"].endswith(".dkr.ecr.us-west-2.amazonaws.com/aws-registry-trainer")
    assert any("aws ecr get-login-password" in line for line in recording.exports["next_steps"])


# The order of destroy


def test_network_addons_and_their_rights_outlive_the_last_node(stack: Run) -> None:
    recording = stack("aws")
    rights = recording.one("aws:iam/rolePolicyAttachment:RolePolicyAttachment", "aws-cluster-cni-AmazonEKS_CNI_Policy")
    for nodes in recording.of_type(NODES):
        for name in ("vpc-cni", "kube-proxy", "eks-pod-identity-agent"):
            assert recording.needs(nodes, _addons(recording)[name]), "an interface left behind holds the subnet"
        assert recording.needs(nodes, rights)


def test_the_way_out_outlives_the_last_node(stack: Run) -> None:
    recording = stack("aws")
    for nodes in recording.of_type(NODES):
        for kind in ("natGateway:NatGateway", "route:Route", "vpcEndpoint:VpcEndpoint"):
            for item in recording.of_type(f"aws:ec2/{kind}"):
                assert recording.needs(nodes, item), f"nodes without {item.name} neither join nor say goodbye"


def test_the_file_system_goes_before_its_network_and_the_cluster(stack: Run) -> None:
    recording = stack("aws")
    file_system = recording.one(LUSTRE)
    assert recording.needs(file_system, recording.one("aws:ec2/subnet:Subnet", "aws-network-private-us-west-2a"))
    assert recording.needs(file_system, recording.one(GROUP, "aws-storage-lustre-clients"))
    assert recording.needs(recording.one(GROUP, "aws-storage-lustre-clients"), recording.one(EKS)), (
        "EKS cannot delete its own group while a rule of ours names it"
    )
    link = recording.one("aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation")
    assert recording.needs(link, recording.one("aws:s3/bucket:Bucket"))


def test_operators_go_before_the_nodes_they_run_on(stack: Run) -> None:
    recording = stack("aws")
    for release in recording.of_type(RELEASE):
        assert recording.needs(release, recording.one(NODES, "aws-cluster-system-nodes")), release.name
        assert recording.needs(release, _addons(recording)["coredns"]), release.name
    scaler = recording.one(RELEASE, "aws-addons-cluster-autoscaler")
    assert recording.needs(scaler, recording.one(ASSOCIATION, "aws-cluster-autoscaler-identity"))


def test_public_addresses_go_before_the_internet_gateway(stack: Run) -> None:
    recording = stack("aws")
    gateway = recording.one("aws:ec2/internetGateway:InternetGateway")
    for token in ("aws:ec2/eip:Eip", "aws:ec2/natGateway:NatGateway"):
        assert recording.needs(recording.one(token), gateway), "AWS does not detach a gateway in use"


# Mistakes


def test_all_mistakes_of_a_stack_come_at_once_and_before_any_resource(stack: Run) -> None:
    wrong = {
        "gpu.zone": "eu-west-1a",
        "storage.size_gib": 3600,
        "network.services_cidr": "10.0.0.0/16",
        "colour": "red",
    }
    recording = stack("aws", wrong, fails=True)
    assert all(key in str(recording.error) for key in wrong)
    assert recording.registrations == []
