"""The policy pack: each rule lets the right thing pass and refuses the wrong one, and our own stacks pass them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from provider_mocks.recording import Recording, Registration, stacks
from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyCustomTimeouts,
    PolicyResource,
    PolicyResourceOptions,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UNKNOWN_STRING_VALUE, unknown_checking_proxy

from infra.policy.pack import POLICIES
from infra.policy.rules.pods import OPERATORS

BY_NAME: dict[str, Policy] = {policy.name: policy for policy in POLICIES}
OPTIONS = PolicyResourceOptions(False, [], None, [], PolicyCustomTimeouts(0, 0, 0), [])
DIGEST = "registry.example/trainer@sha256:" + "0" * 64
TAGS = {"project": "p", "stack": "s", "owner": "o", "cost-centre": "c"}


def refusals(rule: str, kind: str, props: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> list[str]:
    """What a rule about single resources says of one."""
    found: list[str] = []
    policy = cast(ResourceValidationPolicy, BY_NAME[rule])
    arguments = ResourceValidationArgs(
        kind, unknown_checking_proxy(dict(props)), f"urn:pulumi:s::p::{kind}::it", "it", OPTIONS, None, config
    )
    policy.validate(arguments, lambda text, urn: found.append(text))
    return found


def member(kind: str, name: str, props: Mapping[str, Any], needs: list[PolicyResource] | None = None) -> PolicyResource:
    """A resource as a rule about stacks sees it."""
    return PolicyResource(
        kind, dict(props), f"urn:pulumi:s::p::{kind}::{name}", name, OPTIONS, None, None, needs or [], {}
    )


def stack_refusals(rule: str, members: list[PolicyResource], config: Mapping[str, Any] | None = None) -> list[str]:
    """What a rule about stacks says."""
    found: list[str] = []
    policy = cast(StackValidationPolicy, BY_NAME[rule])
    policy.validate(StackValidationArgs(members, config), lambda text, urn: found.append(text))
    return found


def pod(container: Mapping[str, Any] | None = None, *, namespace: str = "training", **spec: Any) -> dict[str, Any]:
    one = {"name": "c", "image": DIGEST, **(container or {})}
    return {"metadata": {"namespace": namespace}, "spec": {"template": {"spec": {"containers": [one], **spec}}}}


def document(action: str, resource: str, effect: str = "Allow", **more: Any) -> str:
    return json.dumps({"Statement": [{"Effect": effect, "Action": [action], "Resource": [resource], **more}]})


TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
GROUP = "aws:ec2/securityGroup:SecurityGroup"
AKS, AKS_POOL = "azure-native:containerservice:ManagedCluster", "azure-native:containerservice:AgentPool"
GKE, GKE_POOL = "gcp:container/cluster:Cluster", "gcp:container/nodePool:NodePool"
NODE_GROUP = "aws:eks/nodeGroup:NodeGroup"
JOB = "kubernetes:batch/v1:Job"
ROLE_POLICY = "aws:iam/rolePolicy:RolePolicy"
ACCOUNT = "azure-native:storage:StorageAccount"
NSG = "azure-native:network:NetworkSecurityGroup"
OWNER = "/providers/Microsoft.Authorization/roleDefinitions/8e3af657-a8ff-443c-a75c-2fe8c4bcb635"
READER = "/providers/Microsoft.Authorization/roleDefinitions/acdd72a7-3385-48ef-bd42-f606fba81ae7"


def inbound(source: str, access: str = "Allow") -> dict[str, Any]:
    rule = {"name": "r", "direction": "Inbound", "access": access, "sourceAddressPrefix": source}
    return {"securityRules": [rule]}


def volume(encrypted: str) -> dict[str, Any]:
    return {"blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"encrypted": encrypted}}]}


#: Rule, type, what passes, what does not.
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
    ("images-by-digest", JOB, pod(), pod({"image": "registry.example/trainer:latest"})),
    ("images-by-digest", JOB, pod(), pod(initContainers=[{"name": "first", "image": "busybox"}])),
]


@pytest.mark.parametrize(
    ("rule", "kind", "right", "wrong"), CASES, ids=[f"{rule} {kind}" for rule, kind, _, _ in CASES]
)
def test_a_rule_passes_what_is_right_and_refuses_what_is_wrong(
    rule: str, kind: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert refusals(rule, kind, right) == []
    assert len(refusals(rule, kind, wrong)) >= 1, "the promise of this rule is broken, and nobody says so"


def test_a_providers_component_is_judged_by_its_children() -> None:
    """The engine is shown no property of `eks:index:Cluster`, and all of those of the cluster inside it."""
    for rule in ("encryption-at-rest", "nothing-public", "tags-present"):
        assert refusals(rule, "eks:index:Cluster", {}) == []
        assert refusals(rule, "aws:eks/cluster:Cluster", {}) != []
    inside = {
        "vpcConfig": {"endpointPublicAccess": False},
        "encryptionConfig": {"resources": ["secrets"]},
        "tags": TAGS,
    }
    for rule in ("encryption-at-rest", "nothing-public", "tags-present"):
        assert refusals(rule, "aws:eks/cluster:Cluster", inside) == []


def test_every_rule_is_mandatory_and_has_a_case_of_its_own() -> None:
    assert all(policy.enforcement_level is EnforcementLevel.MANDATORY for policy in POLICIES)
    assert {rule for rule, *_ in CASES} | {"allowed-regions", "cost-ceiling"} == set(BY_NAME)


def test_what_is_not_known_before_the_update_does_not_stop_the_preview() -> None:
    assert refusals("encryption-at-rest", "eks:index:Cluster", {"encryptionConfigKeyArn": UNKNOWN_STRING_VALUE}) == []
    assert refusals("no-wildcard-rights", ROLE_POLICY, {"policy": UNKNOWN_STRING_VALUE}) == []
    assert refusals("images-by-digest", JOB, pod({"image": UNKNOWN_STRING_VALUE})) == []
    beside = pod({"image": UNKNOWN_STRING_VALUE, "securityContext": {"privileged": True}})
    assert refusals("no-privileged-pods", JOB, beside), "one unknown value must not hide what is known beside it"


def test_operators_may_manage_nodes_in_their_own_namespaces() -> None:
    assert {"kube-system", "gpu-operator", "kubeflow"} <= set(OPERATORS)
    wrong = pod({"image": "operator:v1", "securityContext": {"privileged": True}}, namespace="gpu-operator")
    assert refusals("no-privileged-pods", JOB, wrong) == []
    assert refusals("images-by-digest", JOB, wrong) == []


@pytest.mark.parametrize(
    ("rule", "kind", "wrong", "config"),
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
def test_every_option_of_a_rule_is_read(rule: str, kind: str, wrong: dict[str, Any], config: dict[str, Any]) -> None:
    schema = BY_NAME[rule].config_schema
    assert schema
    assert set(config) <= set(schema.properties), "an option that the pack does not declare is refused by the engine"
    assert refusals(rule, kind, wrong)
    assert refusals(rule, kind, wrong, config) == []


def test_a_stack_keeps_to_one_region_unless_regions_are_named() -> None:
    here = member("aws:ec2/subnet:Subnet", "a", {"availabilityZone": "us-west-2a"})
    also = member("aws:s3/bucket:Bucket", "b", {"region": "us-west-2"})
    away = member("aws:s3/bucket:Bucket", "c", {"region": "eu-west-1"})
    nowhere = member("azure-native:privatedns:PrivateZone", "d", {"location": "Global"})
    assert stack_refusals("allowed-regions", [here, also, nowhere]) == []
    assert "c is in eu-west-1" in stack_refusals("allowed-regions", [here, also, away])[0]
    assert stack_refusals("allowed-regions", [here, also, away], {"regions": ["us-west-2", "eu-west-1"]}) == []
    assert len(stack_refusals("allowed-regions", [here, also], {"regions": ["eu-west-1"]})) == 2


def test_spellings_of_a_region_are_one_region() -> None:
    places = [{"location": "East US"}, {"location": "eastus"}]
    resources = [
        member("azure-native:resources:ResourceGroup", str(index), place) for index, place in enumerate(places)
    ]
    assert stack_refusals("allowed-regions", resources, {"regions": ["eastus"]}) == []
    zones = [{"location": "US-CENTRAL1"}, {"zone": "us-central1-a"}]
    resources = [member("gcp:storage/bucket:Bucket", str(index), place) for index, place in enumerate(zones)]
    assert stack_refusals("allowed-regions", resources, {"regions": ["us-central1"]}) == []


def nodes(count: int) -> list[PolicyResource]:
    template = member(TEMPLATE, "template", {"instanceType": "p4d.24xlarge"})
    return [template, member(NODE_GROUP, "gpu", {"scalingConfig": {"maxSize": count}}, [template])]


def test_the_ceiling_counts_every_pool_at_its_maximum() -> None:
    assert stack_refusals("cost-ceiling", nodes(2)) == []
    assert "9 x p4d.24xlarge" in stack_refusals("cost-ceiling", nodes(9))[0]
    assert stack_refusals("cost-ceiling", nodes(9), {"maxUsdPerHour": 1000}) == []
    assert stack_refusals("cost-ceiling", nodes(2), {"maxUsdPerHour": 43})
    assert stack_refusals("cost-ceiling", [*nodes(2), *nodes(3)]), "pools that are cheap alone are dear together"
    azure = member(AKS_POOL, "gpu", {"vmSize": "Standard_ND96asr_v4", "enableAutoScaling": True, "maxCount": 50})
    gcp = member(
        GKE_POOL, "g", {"nodeConfig": {"machineType": "a2-highgpu-8g"}, "autoscaling": {"totalMaxNodeCount": 50}}
    )
    assert stack_refusals("cost-ceiling", [azure])
    assert stack_refusals("cost-ceiling", [gcp])


def test_a_type_without_a_price_is_refused_until_it_is_given() -> None:
    pool = member(AKS_POOL, "gpu", {"vmSize": "Standard_New", "count": 2})
    assert "no price is known for Standard_New" in stack_refusals("cost-ceiling", [pool])[0]
    assert stack_refusals("cost-ceiling", [pool], {"prices": {"Standard_New": 1.0}}) == []


OWN: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in stacks()),
    ("gcp", {"gpu.instance_type": "a3-highgpu-8g"}),
    ("aws", {"network.authorized_cidrs": ["198.51.100.7/32"]}),
    ("gcp", {"job.launcher": "vertex"}),
    ("azure", {"job.launcher": "azureml"}),
]


@pytest.mark.parametrize(("name", "overrides"), OWN, ids=[f"{name} {list(given)}" for name, given in OWN])
def test_our_own_stacks_pass_every_rule(
    name: str, overrides: dict[str, object], stack: Callable[..., Recording]
) -> None:
    recording = stack(name, overrides)
    # Two nodes of the largest type cost more than the default ceiling, which is what it is for.
    ceiling = {"maxUsdPerHour": 250} if overrides else {}
    found = [
        f"{rule}: {item.type} {item.name}: {text}"
        for item in recording.registrations
        for rule, policy in BY_NAME.items()
        if isinstance(policy, ResourceValidationPolicy)
        for text in refusals(rule, item.type, item.inputs)
    ]
    members = as_members(recording)
    found += stack_refusals("allowed-regions", members)
    found += stack_refusals("cost-ceiling", members, ceiling)
    assert found == []
    if name != "local":
        assert stack_refusals("cost-ceiling", members, {"maxUsdPerHour": 20}), "no pool of this cloud is counted"


def as_members(recording: Recording) -> list[PolicyResource]:
    """The recorded resources, each with those that it depends on."""

    def convert(item: Registration) -> PolicyResource:
        return PolicyResource(item.type, dict(item.inputs), item.urn, item.name, OPTIONS, None, None, [], {})

    by_urn = {item.urn: convert(item) for item in recording.registrations}
    for item in recording.registrations:
        by_urn[item.urn].dependencies.extend(by_urn[urn] for urn in item.dependencies if urn in by_urn)
    return list(by_urn.values())
