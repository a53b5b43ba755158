"""Rules of the policy pack about single resources."""

from __future__ import annotations

from typing import Any

import pytest
from policy_checks import (
    ACCOUNT,
    AKS,
    AKS_POOL,
    BY_NAME,
    GKE,
    GKE_POOL,
    GROUP,
    JOB,
    NSG,
    OWNER,
    READER,
    ROLE_POLICY,
    TAGS,
    TEMPLATE,
    document,
    pod,
    violations,
)
from pulumi_policy import (
    EnforcementLevel,
)
from pulumi_policy.proxy import UNKNOWN_STRING_VALUE

from infra.policy.pack import POLICIES
from infra.policy.rules.pods import OPERATORS


def inbound(source: str, access: str = "Allow") -> dict[str, Any]:
    rule = {"name": "r", "direction": "Inbound", "access": access, "sourceAddressPrefix": source}
    return {"securityRules": [rule]}


def volume(encrypted: str) -> dict[str, Any]:
    return {"blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"encrypted": encrypted}}]}


#: A container's right to lock memory.
IPC_LOCK = {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}

#: Rule, type, properties that pass, properties that do not.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("encryption-at-rest", TEMPLATE, volume("true"), volume("false")),
    ("encryption-at-rest", "aws:ebs/volume:Volume", {"encrypted": True}, {}),
    ("encryption-at-rest", "eks:index:Cluster", {"encryptionConfigKeyArn": "arn"}, {"name": "c"}),
    ("encryption-at-rest", AKS_POOL, {"enableEncryptionAtHost": True}, {"enableEncryptionAtHost": False}),
    (
        "encryption-at-rest",
        AKS,
        {"agentPoolProfiles": [{"enableEncryptionAtHost": True}]},
        {"agentPoolProfiles": [{"name": "system"}]},
    ),
    ("encryption-at-rest", GKE, {"databaseEncryption": {"state": "ENCRYPTED"}}, {}),
    (
        "encryption-at-rest",
        "kubernetes:storage.k8s.io/v1:StorageClass",
        {"provisioner": "ebs.csi.aws.com", "parameters": {"encrypted": "true"}},
        {"provisioner": "ebs.csi.aws.com"},
    ),
    (
        "nothing-public",
        GROUP,
        {"ingress": [{"cidrBlocks": ["10.0.0.0/8"]}]},
        {"ingress": [{"cidrBlocks": ["0.0.0.0/0"]}]},
    ),
    ("nothing-public", GROUP, {"egress": [{"cidrBlocks": ["0.0.0.0/0"]}]}, {"ingress": [{"ipv6CidrBlocks": ["::/0"]}]}),
    ("nothing-public", GROUP, {"ingress": [{"self": True}]}, {"ingress": [{"cidrBlocks": ["128.0.0.0/1"]}]}),
    ("nothing-public", "eks:index:Cluster", {"endpointPublicAccess": False}, {"endpointPublicAccess": True}),
    (
        "nothing-public",
        "eks:index:Cluster",
        {"endpointPublicAccess": True, "publicAccessCidrs": ["198.51.100.7/32"]},
        {"endpointPublicAccess": True, "publicAccessCidrs": ["0.0.0.0/0"]},
    ),
    ("nothing-public", "aws:ec2/subnet:Subnet", {"mapPublicIpOnLaunch": False}, {"mapPublicIpOnLaunch": True}),
    ("nothing-public", NSG, inbound("10.0.0.0/17"), inbound("*")),
    ("nothing-public", NSG, inbound("*", "Deny"), inbound("Internet")),
    ("nothing-public", AKS, {"apiServerAccessProfile": {"enablePrivateCluster": True}}, {"apiServerAccessProfile": {}}),
    ("nothing-public", AKS_POOL, {"enableNodePublicIP": False}, {"enableNodePublicIP": True}),
    ("nothing-public", ACCOUNT, {"publicNetworkAccess": "Disabled"}, {}),
    (
        "nothing-public",
        GKE,
        {"privateClusterConfig": {"enablePrivateNodes": True, "enablePrivateEndpoint": True}},
        {
            "privateClusterConfig": {"enablePrivateNodes": True},
            "masterAuthorizedNetworksConfig": {"cidrBlocks": [{"cidrBlock": "0.0.0.0/0"}]},
        },
    ),
    (
        "nothing-public",
        "gcp:compute/firewall:Firewall",
        {"direction": "INGRESS", "allows": [{}], "sourceRanges": ["10.0.0.0/16"]},
        {"direction": "INGRESS", "allows": [{}], "sourceRanges": ["0.0.0.0/0"]},
    ),
    ("nothing-public", "gcp:storage/bucket:Bucket", {"publicAccessPrevention": "enforced"}, {}),
    (
        "nothing-public",
        "kubernetes:core/v1:Service",
        {"spec": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["198.51.100.0/24"]}},
        {"spec": {"type": "LoadBalancer"}},
    ),
    (
        "no-wildcard-rights",
        ROLE_POLICY,
        {"policy": document("s3:GetObject", "arn:aws:s3:::b/*")},
        {"policy": document("s3:*", "arn:aws:s3:::b/*")},
    ),
    (
        "no-wildcard-rights",
        ROLE_POLICY,
        {"policy": document("ec2:DescribeImages", "*")},
        {"policy": document("ec2:RunInstances", "*")},
    ),
    (
        "no-wildcard-rights",
        "aws:s3/bucketPolicy:BucketPolicy",
        {"policy": document("s3:*", "arn", "Deny", Principal="*")},
        {"policy": document("s3:GetObject", "arn", Principal="*")},
    ),
    (
        "no-wildcard-rights",
        "aws:iam/rolePolicyAttachment:RolePolicyAttachment",
        {"policyArn": "arn:aws:iam::aws:policy/AmazonEKS_CNI_Policy"},
        {"policyArn": "arn:aws:iam::aws:policy/AdministratorAccess"},
    ),
    (
        "no-wildcard-rights",
        "azure-native:authorization:RoleAssignment",
        {"roleDefinitionId": READER},
        {"roleDefinitionId": OWNER},
    ),
    (
        "no-wildcard-rights",
        "azure-native:authorization:RoleDefinition",
        {"permissions": [{"actions": ["Microsoft.Compute/virtualMachines/read"]}]},
        {"permissions": [{"actions": ["*"]}]},
    ),
    (
        "no-wildcard-rights",
        "gcp:projects/iAMMember:IAMMember",
        {"role": "roles/container.nodeServiceAccount", "member": "serviceAccount:a"},
        {"role": "roles/editor", "member": "serviceAccount:a"},
    ),
    (
        "no-wildcard-rights",
        "gcp:storage/bucketIAMMember:BucketIAMMember",
        {"role": "roles/storage.objectViewer", "member": "serviceAccount:a"},
        {"role": "roles/storage.objectViewer", "member": "allUsers"},
    ),
    (
        "no-wildcard-rights",
        "kubernetes:rbac.authorization.k8s.io/v1:ClusterRole",
        {"rules": [{"verbs": ["*"], "resources": ["pods"]}]},
        {"rules": [{"verbs": ["*"], "resources": ["*"]}]},
    ),
    ("tags-present", "aws:ec2/vpc:Vpc", {"tags": TAGS}, {"tags": {"owner": "o"}}),
    ("tags-present", AKS, {"tags": TAGS}, {}),
    ("tags-present", GKE_POOL, {"nodeConfig": {"resourceLabels": TAGS}}, {"nodeConfig": {}}),
    ("tags-present", "aws:s3/bucket:Bucket", {"tags": TAGS}, {}),
    ("no-privileged-pods", JOB, pod(), pod({"securityContext": {"privileged": True}})),
    ("no-privileged-pods", JOB, pod(volumes=[{"emptyDir": {}}]), pod(volumes=[{"hostPath": {"path": "/"}}])),
    ("no-privileged-pods", JOB, pod(hostNetwork=False), pod(hostNetwork=True)),
    ("no-privileged-pods", JOB, pod(), pod({"securityContext": {"allowPrivilegeEscalation": True}})),
    (
        "no-privileged-pods",
        "kubernetes:kubeflow.org/v1:PyTorchJob",
        {
            "spec": {
                "pytorchReplicaSpecs": {"Worker": pod({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}})}
            }
        },
        {
            "spec": {
                "pytorchReplicaSpecs": {"Worker": pod({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}})}
            }
        },
    ),
    (
        "no-privileged-pods",
        JOB,
        pod({"securityContext": IPC_LOCK}, securityContext={"runAsUser": 0}),
        pod({"securityContext": IPC_LOCK}, securityContext={"runAsUser": 10001}),
    ),
    ("no-privileged-pods", JOB, pod(securityContext={"runAsUser": 10001}), pod(securityContext={"runAsUser": 0})),
    ("images-by-digest", JOB, pod(), pod({"image": "registry.example/trainer:latest"})),
    ("images-by-digest", JOB, pod(), pod(initContainers=[{"name": "first", "image": "busybox"}])),
]


@pytest.mark.parametrize(
    ("rule", "kind", "valid", "invalid"), CASES, ids=[f"{rule} {kind}" for rule, kind, _, _ in CASES]
)
def test_a_rule_accepts_valid_and_rejects_invalid_properties(
    rule: str, kind: str, valid: dict[str, Any], invalid: dict[str, Any]
) -> None:
    assert violations(rule, kind, valid) == []
    assert len(violations(rule, kind, invalid)) >= 1


def test_a_component_without_visible_properties_is_checked_through_its_children() -> None:
    # The engine gets no property of `eks:index:Cluster`, but all of the cluster inside it.
    for rule in ("encryption-at-rest", "nothing-public", "tags-present"):
        assert violations(rule, "eks:index:Cluster", {}) == []
        assert violations(rule, "aws:eks/cluster:Cluster", {}) != []
    child = {
        "vpcConfig": {"endpointPublicAccess": False},
        "encryptionConfig": {"resources": ["secrets"]},
        "tags": TAGS,
    }
    for rule in ("encryption-at-rest", "nothing-public", "tags-present"):
        assert violations(rule, "aws:eks/cluster:Cluster", child) == []


def test_every_rule_is_mandatory_and_has_a_case() -> None:
    assert all(policy.enforcement_level is EnforcementLevel.MANDATORY for policy in POLICIES)
    assert {rule for rule, *_ in CASES} | {"allowed-regions", "cost-ceiling"} == set(BY_NAME)


def test_a_value_that_a_preview_does_not_know_is_no_violation() -> None:
    assert violations("encryption-at-rest", "eks:index:Cluster", {"encryptionConfigKeyArn": UNKNOWN_STRING_VALUE}) == []
    assert violations("no-wildcard-rights", ROLE_POLICY, {"policy": UNKNOWN_STRING_VALUE}) == []
    assert violations("images-by-digest", JOB, pod({"image": UNKNOWN_STRING_VALUE})) == []
    partly_known = pod({"image": UNKNOWN_STRING_VALUE, "securityContext": {"privileged": True}})
    assert violations("no-privileged-pods", JOB, partly_known), "an unknown value must not hide a known one"


def test_operators_are_exempt_in_their_own_namespaces() -> None:
    assert {"kube-system", "gpu-operator", "kubeflow"} <= set(OPERATORS)
    privileged = pod({"image": "operator:v1", "securityContext": {"privileged": True}}, namespace="gpu-operator")
    assert violations("no-privileged-pods", JOB, privileged) == []
    assert violations("images-by-digest", JOB, privileged) == []


@pytest.mark.parametrize(
    ("rule", "kind", "invalid", "config"),
    [
        ("nothing-public", "gcp:storage/bucket:Bucket", {}, {"exceptions": ["i*"]}),
        ("no-wildcard-rights", "gcp:projects/iAMMember:IAMMember", {"role": "roles/owner"}, {"exceptions": ["it"]}),
        ("tags-present", "aws:ec2/vpc:Vpc", {"tags": {"team": "x"}}, {"required": ["team"]}),
        ("tags-present", "aws:new/thing:Thing", {}, {"untaggable": ["aws:new/*"]}),
        ("tags-present", "aws:new/thing:Thing", {}, {"exceptions": ["it"]}),
        ("no-privileged-pods", JOB, pod(hostNetwork=True), {"namespaces": ["training"]}),
        (
            "no-privileged-pods",
            JOB,
            pod(volumes=[{"hostPath": {"path": "/mnt/x"}}]),
            {"hostPaths": ["/mnt/*"], "fabricImages": ["registry.example/*"]},
        ),
        (
            "no-privileged-pods",
            JOB,
            pod({"securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}),
            {"fabricImages": ["registry.example/*"]},
        ),
        (
            "no-privileged-pods",
            JOB,
            pod({"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}),
            {"capabilities": ["SYS_PTRACE"]},
        ),
        ("images-by-digest", JOB, pod({"image": "mine:dev"}), {"exceptions": ["mine:*"]}),
        ("images-by-digest", JOB, pod({"image": "mine:dev"}), {"namespaces": ["training"]}),
    ],
)
def test_each_option_of_a_rule_can_allow_a_violation(
    rule: str, kind: str, invalid: dict[str, Any], config: dict[str, Any]
) -> None:
    schema = BY_NAME[rule].config_schema
    assert schema
    assert set(config) <= set(schema.properties), "the engine rejects an option that the pack does not declare"
    assert violations(rule, kind, invalid)
    assert violations(rule, kind, invalid, config) == []
