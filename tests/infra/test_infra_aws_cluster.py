"""The EKS cluster of an AWS stack: control plane, add-ons, tags and registry."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from fnmatch import fnmatchcase

import pytest
from aws_stack import ADDON, EKS, RELEASE, Run, addons_by_name, settings_of
from provider_mocks.recording import PROJECT

from infra.clouds.aws import live, naming
from infra.clouds.aws.doctor.clients import open_clients
from infra.clouds.aws.orphans.owner import Owner


def test_the_control_plane_is_private_until_ranges_are_authorised(stack: Run) -> None:
    closed = stack("aws").one(EKS).inputs
    assert (closed["endpointPrivateAccess"], closed["endpointPublicAccess"]) == (True, False)
    assert "publicAccessCidrs" not in closed, "pulumi-eks rejects even an empty list with a private endpoint"
    opened = stack("aws", {"network.authorized_cidrs": ["198.51.100.0/24"]}).one(EKS).inputs
    assert opened["endpointPublicAccess"] is True
    assert opened["publicAccessCidrs"] == ["198.51.100.0/24"]


def test_the_control_plane_has_api_authentication_encrypted_secrets_and_all_logs(stack: Run) -> None:
    recording = stack("aws")
    inputs = recording.one(EKS).inputs
    assert inputs["authenticationMode"] == "API"
    assert inputs["encryptionConfigKeyArn"].startswith("arn:aws:kms:")
    assert set(inputs["enabledClusterLogTypes"]) == {"api", "audit", "authenticator", "controllerManager", "scheduler"}
    assert recording.one("aws:kms/key:Key").inputs["enableKeyRotation"] is True


def test_pulumi_eks_creates_no_nodes_groups_or_addons(stack: Run) -> None:
    inputs = stack("aws").one(EKS).inputs
    assert inputs["skipDefaultNodeGroup"] is True
    assert inputs["skipDefaultSecurityGroups"] is True
    assert inputs["bootstrapSelfManagedAddons"] is False
    assert inputs["useDefaultVpcCni"] is True, "false makes pulumi-eks install a second one"
    assert inputs["corednsAddonOptions"]["enabled"] is inputs["kubeProxyAddonOptions"]["enabled"] is False


ENTRY, RIGHT = "aws:eks/accessEntry:AccessEntry", "aws:eks/accessPolicyAssociation:AccessPolicyAssociation"
OPS, ANN = "arn:aws:iam::123456789012:role/team/ops", "arn:aws:iam::123456789012:user/ann"


def test_further_administrators_keep_their_rights_until_the_last_object_is_deleted(stack: Run) -> None:
    recording = stack("aws", {"cluster.admin_role_arns": [OPS, ANN]})
    entries, rights = recording.of_type(ENTRY), recording.of_type(RIGHT)
    assert sorted(item.inputs["principalArn"] for item in entries) == [OPS, ANN]
    assert sorted(item.inputs["principalArn"] for item in rights) == [OPS, ANN]
    assert {item.inputs["policyArn"].rpartition("/")[2] for item in rights} == {"AmazonEKSClusterAdminPolicy"}
    provider = recording.one("pulumi:providers:kubernetes")
    assert all(recording.needs(provider, item) for item in (*entries, *rights)), "`destroy` would end in Unauthorized"


def test_one_administrator_less_replaces_no_entry_of_another(stack: Run) -> None:
    both = stack("aws", {"cluster.admin_role_arns": [OPS, ANN]}).of_type(ENTRY)
    (left,) = stack("aws", {"cluster.admin_role_arns": [ANN]}).of_type(ENTRY)
    assert {item.name: item.inputs["principalArn"] for item in both}[left.name] == ANN


def test_the_creator_of_the_cluster_is_no_further_administrator(stack: Run) -> None:
    creator = "arn:aws:iam::123456789012:user/someone"
    recording = stack("aws", {"cluster.admin_role_arns": [OPS, creator]}, fails=True)
    assert f"got cluster.admin_role_arns[1] {creator}" in str(recording.error)
    assert "pulumi config rm --path 'cluster.admin_role_arns[1]'" in str(recording.error)
    assert not recording.of_type(EKS)


@pytest.mark.parametrize(
    ("caller", "principal", "expected"),
    [
        ("arn:aws:sts::123456789012:assumed-role/ops/ann", OPS, True),
        ("arn:aws:sts::123456789012:assumed-role/ops/ann", "arn:aws:iam::123456789012:role/ops", True),
        ("arn:aws:sts::123456789012:assumed-role/ops-2/ops", OPS, False),
        ("arn:aws:sts::210987654321:assumed-role/ops/ann", OPS, False),
        ("arn:aws:sts::123456789012:assumed-role/ann/ann", ANN, False),
        (ANN, ANN, True),
    ],
)
def test_a_session_belongs_to_its_role(caller: str, principal: str, expected: bool) -> None:
    assert live._is_session_of(caller, principal) is expected


def test_the_kubeconfig_is_secret_and_contains_no_token(stack: Run) -> None:
    recording = stack("aws")
    assert "kubeconfig" in recording.secret_exports
    (user,) = json.loads(recording.exports["kubeconfig"])["users"]
    assert set(user["user"]) == {"exec"}, "credentials are fetched when needed and never stored"


def test_the_stack_creates_every_log_group_with_a_retention(stack: Run) -> None:
    recording = stack("aws", {"monitoring.log_retention_days": 7})
    groups = {item.inputs["name"]: item for item in recording.of_type("aws:cloudwatch/logGroup:LogGroup")}
    (cluster,) = {item.inputs["name"] for item in recording.of_type(EKS)}
    assert re.fullmatch(r"torchrec-cloud-aws-[0-9a-f]{7}", cluster), "EKS creates the group of a deleted cluster again"
    assert set(groups) == {
        f"/aws/eks/{cluster}/cluster",
        *(f"/aws/containerinsights/{cluster}/{kind}" for kind in ("application", "dataplane", "host", "performance")),
    }, "a group that AWS creates never expires and is billed after destroy"
    assert {item.inputs["retentionInDays"] for item in groups.values()} == {7}
    writer = recording.one(ADDON, "aws-monitoring-cloudwatch")
    assert all(recording.needs(writer, item) for name, item in groups.items() if "containerinsights" in name)
    assert recording.needs(recording.one(EKS), groups[f"/aws/eks/{cluster}/cluster"])


@pytest.mark.parametrize("project", ["torchrec-cloud", "a" * 100])
def test_the_search_for_leftovers_knows_the_name_that_a_new_cluster_gets(stack: Run, project: str) -> None:
    (name,) = {item.inputs["name"] for item in stack("aws").of_type(EKS)}
    if project != PROJECT:
        name = naming.with_key(naming.base_name(project, "aws"), "0a1b2c3d-12ab-34cd-56ef-1234567890ab")
    owner = Owner(open_clients("us-west-2"), settings_of({}).model_copy(update={"project": project}))
    assert len(name) <= 100, "EKS allows no longer name"
    assert owner.is_cluster(name), "`destroy` would report that nothing is left"
    assert any(fnmatchcase(name, pattern) for pattern in owner.cluster_patterns)
    assert not owner.is_cluster(f"{name}-training")


def test_all_addons_are_installed_and_those_that_call_aws_have_an_identity(stack: Run) -> None:
    found = {
        name: [item["serviceAccount"] for item in addon.inputs.get("podIdentityAssociations", [])]
        for name, addon in addons_by_name(stack("aws")).items()
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


def test_the_network_addon_enforces_network_policies(stack: Run) -> None:
    values = json.loads(addons_by_name(stack("aws"))["vpc-cni"].inputs["configurationValues"])
    assert values == {"enableNetworkPolicy": "true"}, "by default EKS stores NetworkPolicies and enforces none"


def test_cloudwatch_is_optional(stack: Run) -> None:
    recording = stack("aws", {"monitoring.cloudwatch": False})
    assert "amazon-cloudwatch-observability" not in addons_by_name(recording)
    assert not [item for item in recording.of_type("aws:cloudwatch/logGroup:LogGroup") if "monitoring" in item.name]


@pytest.mark.parametrize(("prometheus", "cloudwatch_measures_gpus"), [(True, False), (False, True)])
def test_exactly_one_exporter_measures_the_gpus(stack: Run, prometheus: bool, cloudwatch_measures_gpus: bool) -> None:
    recording = stack("aws", {"addons.monitoring": prometheus})
    values = json.loads(addons_by_name(recording)["amazon-cloudwatch-observability"].inputs["configurationValues"])
    kubernetes = values["agent"]["config"]["logs"]["metrics_collected"]["kubernetes"]
    assert kubernetes["accelerated_compute_metrics"] is cloudwatch_measures_gpus
    assert bool([item for item in recording.of_type(RELEASE) if "dcgm" in item.name]) is prometheus


def test_every_taggable_resource_is_tagged(stack: Run) -> None:
    expected = {"project": PROJECT, "stack": "aws", "owner": "ml-platform", "cost-centre": "recommendation"}
    taggable = [item for item in stack("aws").registrations if item.custom and _takes_tags(item.type)]
    assert len(taggable) > 30
    untagged = {item.name for item in taggable if not expected.items() <= (item.inputs.get("tags") or {}).items()}
    assert not untagged, "its costs could not be assigned to an owner"


def _takes_tags(token: str) -> bool:
    """Return whether the SDK's class of an AWS type has an argument `tags`."""
    package, module, kind = token.split(":")
    if package != "aws":
        return False
    resource = getattr(importlib.import_module(f"pulumi_aws.{module.partition('/')[0]}"), kind)
    return "tags" in inspect.signature(resource._internal_init).parameters


def test_a_stopped_push_can_be_repeated_images_are_scanned_and_destroy_deletes_them(stack: Run) -> None:
    recording = stack("aws")
    inputs = recording.one("aws:ecr/repository:Repository").inputs
    assert inputs["imageTagMutability"] == "MUTABLE"
    assert inputs["imageScanningConfiguration"]["scanOnPush"] is True
    assert inputs["forceDelete"] is True
    assert recording.exports["registry"].endswith(".dkr.ecr.us-west-2.amazonaws.com/aws-registry-trainer")
    assert any("aws ecr get-login-password" in line for line in recording.exports["next_steps"])
