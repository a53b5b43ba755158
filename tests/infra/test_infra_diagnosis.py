"""Errors of an operation: what the user sees instead of the engine's output."""

from __future__ import annotations

from typing import Any

import pytest
from provider_mocks.recording import stack_config
from pulumi.automation import CommandResult
from pulumi.automation.errors import create_command_error

from infra import clouds
from infra import stack_files as configuration
from infra.automation.diagnosis import Attempt, explain, extract_cause, unknown_stack
from infra.automation.progress import Diagnostic
from infra.config.problems import SettingsError
from infra.findings.common_causes import CLUSTER, GENERAL


def failure(stderr: str) -> Any:
    return create_command_error(CommandResult("", stderr, 255))


ATTEMPT = Attempt("up", "dev", "3 resources in the state")


def test_a_provider_error_names_resource_cause_remaining_resources_and_next_command() -> None:
    message = "1 error occurred:\n\t* creating EC2 VPC: VpcLimitExceeded: The maximum number of VPCs has been reached."
    noise = Diagnostic("update failed", "pulumi:pulumi:Stack", "s")
    found = explain(failure(""), ATTEMPT, [Diagnostic(message, "aws:ec2/vpc:Vpc", "net"), noise], [])
    first, *rest = str(found).splitlines()
    assert first == (
        "aws:ec2/vpc:Vpc net: creating EC2 VPC: VpcLimitExceeded: The maximum number of VPCs has been reached."
    )
    assert "3 resources in the state" in rest[0]
    assert "python -m infra up --stack dev" in rest[1]
    assert "python -m infra destroy --stack dev" in rest[1]
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("sdk-v2/provider2.go:572: sdk.helper_schema: creating X: no: provider=aws@7.51.1", "creating X: no"),
        ('Traceback (most recent call last):\n  File "a", line 1\nException: boom\nmore', "boom"),
        ('Program failed:\nTraceback (most recent call last):\n  File "a"\n    x\nValueError: broken', "broken"),
        ("azure: Code=\n  QuotaExceeded", "azure: Code= QuotaExceeded"),
    ],
)
def test_a_cause_is_one_line_without_trace_or_prefixes(message: str, expected: str) -> None:
    assert extract_cause(message) == expected


LOCK = (
    "error: the stack is currently locked by 1 lock(s). Either wait for the other process(es) to end or delete the "
    "lock file with `pulumi cancel`.\n  file:///s/x.json: created by ann@laptop (pid 28211) at 2026-11-21T15:24:37Z"
)
USER_MISTAKES = [
    (LOCK, ["ann@laptop (pid 28211)", "pulumi cancel --stack dev"]),
    ("error: [409] Conflict: Another update is currently in progress.", ["pulumi cancel --stack dev"]),
    ("error: get stack secrets manager: incorrect passphrase", ["wrong passphrase", "PULUMI_CONFIG_PASSPHRASE"]),
    ("error: passphrase must be set with PULUMI_CONFIG_PASSPHRASE", ["export PULUMI_CONFIG_PASSPHRASE=..."]),
    ("error: PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions", ["pulumi login --local"]),
]


@pytest.mark.parametrize(("stderr", "expected"), USER_MISTAKES)
def test_an_error_before_the_start_is_one_line_with_its_fix(stderr: str, expected: list[str]) -> None:
    found = explain(failure(stderr), Attempt("up", "dev"), [], [])
    assert "\n" not in str(found)
    assert all(text in str(found) for text in expected), found
    assert found.exit_code == 2


REJECTIONS = {
    "aws": [
        "operation error STS: GetCallerIdentity, StatusCode: 403, api error ExpiredToken: The security token included "
        "in the request is expired",
        "No valid credential sources found. Please see https://registry.terraform.io/providers/hashicorp/aws",
        "refresh cached SSO token failed, the SSO session has expired or is invalid",
    ],
    "azure": [
        "could not get token from Azure CLI: ERROR: AADSTS70043: The refresh token has expired or is invalid",
        "ERROR: Please run 'az login' to setup account.",
    ],
    "gcp": [
        'oauth2: cannot fetch token: 400 Bad Request {"error": "invalid_grant", "error_subtype": "invalid_rapt"}',
        "google: could not find default credentials. See https://cloud.google.com/docs/authentication",
    ],
    "local": ["the server has asked for the client to provide credentials"],
}


@pytest.mark.parametrize(("cloud", "message"), [(cloud, text) for cloud in REJECTIONS for text in REJECTIONS[cloud]])
def test_rejected_credentials_are_recognised_and_the_login_command_is_named(cloud: str, message: str) -> None:
    found = explain(failure(""), ATTEMPT, [Diagnostic(message, "pulumi:providers:x", "default")], [])
    assert str(found).startswith(f"{cloud} rejects the credentials")
    assert clouds.load(cloud).login in str(found)
    assert "3 resources in the state" in str(found)
    assert found.exit_code == 2


def test_this_file_tests_messages_of_every_cloud() -> None:
    assert set(REJECTIONS) == set(clouds.available())


def test_invalid_settings_are_reported_with_the_programs_own_message() -> None:
    message = str(SettingsError("dev", list(_settings_problems())))
    found = explain(failure(""), ATTEMPT, [Diagnostic(message, "pulumi:pulumi:Stack", "s")], [])
    assert str(found) == message
    assert found.exit_code == 2


def _settings_problems() -> Any:
    try:
        configuration.Configuration("torchrec-cloud", "gcp", stack_config("gcp", {"gpu.nodes.max": 0})).parse()
    except SettingsError as error:
        return error.problems
    raise AssertionError("a pool of at most 0 and at first 2 nodes was accepted")


def test_a_policy_violation_names_resource_and_rule() -> None:
    found = explain(failure(""), ATTEMPT, [], [Diagnostic("images-by-digest: runs x", "kubernetes:batch/v1:Job", "j")])
    assert "kubernetes:batch/v1:Job j: images-by-digest: runs x" in str(found)
    assert "--policy-config" in str(found)


def test_an_unknown_stack_error_lists_the_existing_stacks() -> None:
    error = str(unknown_stack("dev", ["aws", "gcp"], ["aws", "local"]))
    assert "'dev'" in error
    assert "aws, gcp" in error
    assert "python -m infra up --stack local" in str(unknown_stack("local", [], ["aws", "local"]))


def test_a_resource_whose_creation_failed_in_the_cloud_must_be_replaced() -> None:
    urn = "urn:pulumi:dev::torchrec-cloud::aws:eks/nodeGroup:NodeGroup::gpu"
    message = "waiting for EKS Node Group (c:gpu) create: unexpected state 'CREATE_FAILED'"
    error = Diagnostic(message, "aws:eks/nodeGroup:NodeGroup", "gpu", urn)
    found = explain(failure(""), ATTEMPT, [error, error], [])
    assert f"then: python -m infra up --stack dev --replace '{urn}'   (or delete" in str(found)


@pytest.mark.parametrize("verb", ["refresh", "destroy"])
def test_only_up_is_asked_to_replace_a_resource(verb: str) -> None:
    urn = "urn:pulumi:dev::torchrec-cloud::aws:eks/nodeGroup:NodeGroup::gpu"
    error = Diagnostic("unexpected state 'CREATE_FAILED'", "aws:eks/nodeGroup:NodeGroup", "gpu", urn)
    found = explain(failure(""), Attempt(verb, "dev"), [error], [])
    assert str(found).endswith(f"then: python -m infra {verb} --stack dev"), "the other verbs have no --replace"


#: Real errors of the clouds, by the row of the issue "First contact": the cloud, the message, the cause that
#: explains it.
#: Rows without an error here fail without one (A3, A6, Z6, G4, G6), or are refused before any resource (A8, A9's
#: names).
KNOWN = {
    "A1": (  # https://github.com/hashicorp/terraform-provider-aws/issues/15183
        "aws",
        "waiting for EKS Node Group (c:g) create: unexpected state 'CREATE_FAILED' ... "
        "last error: "
        "eks-g-1: AsgInstanceLaunchFailures: Could not launch On-Demand Instances. InsufficientInstanceCapacity - We "
        "currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested (us-west-2a).",
        "aws-capacity",
    ),
    "A1 quota": (
        "aws",
        "Could not launch On-Demand Instances. VcpuLimitExceeded - You have requested more vCPU capacity than your "
        "current vCPU limit of 0 allows for the instance bucket that the specified instance type belongs to.",
        "aws-quota",
    ),
    "A2": (  # pulumi-kubernetes, provider.go
        "aws",
        "configured Kubernetes cluster is unreachable: unable to load schema information from the API server: Get "
        '"https://ABC.gr7.us-west-2.eks.amazonaws.com/openapi/v2": dial tcp 10.0.12.7:443: i/o timeout',
        "api-unreachable",
    ),
    "A4": (  # https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-tag-mutability.html
        "aws",
        "tag invalid: The image tag '1a2b' already exists in the 'aws-registry-trainer' repository and cannot be "
        "overwritten because the repository is immutable.",
        "image-immutable",
    ),
    "A5": (  # https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2486
        "aws",
        "creating CloudWatch Logs Log Group (/aws/eks/c/cluster): operation error CloudWatch Logs: "
        "CreateLogGroup, https "
        "response error StatusCode: 400, ResourceAlreadyExistsException: The specified log group already exists",
        "aws-log-group",
    ),
    "creator": (  # https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2968
        "aws",
        "creating EKS Access Entry (c:arn:aws:iam::123456789012:role/ops): operation error EKS: CreateAccessEntry, "
        "https response error StatusCode: 409, ResourceInUseException: The specified access entry resource is "
        "already in use on this cluster.",
        "aws-creator",
    ),
    "A7": (  # https://docs.aws.amazon.com/eks/latest/userguide/managed-node-update-behavior.html
        "aws",
        "waiting for EKS Node Group version update: PodEvictionFailure: Reached max retries while trying to evict pods "
        "from nodes in node group g",
        "aws-drain",
    ),
    "A9": (
        "aws",
        "operation error EKS: CreateCluster, UnsupportedAvailabilityZoneException: Cannot create cluster 'c' because "
        "us-east-1e, the targeted availability zone, does not currently have sufficient capacity to support "
        "the cluster",
        "aws-eks-zone",
    ),
    "A10, Z4, G2": ("aws", "RDMA cannot register memory: RLIMIT_MEMLOCK is 65536 bytes", "locked-memory"),
    "Z1": (  # https://learn.microsoft.com/troubleshoot/azure/azure-kubernetes/error-code-k8sapiserverconnfailvmext
        "azure",
        'Code="VMExtensionProvisioningError" Message="VMExtensionError_K8SAPIServerConnFail: ... exit status=51"',
        "azure-nodes-blocked",
    ),
    "Z2": (  # https://learn.microsoft.com/azure/aks/manage-azure-rbac
        "azure",
        'namespaces is forbidden: User "1-2" cannot create resource "namespaces" in API group "" at the cluster scope: '
        "User does not have access to the resource in Azure. Update role assignment to allow access.",
        "azure-forbidden",
    ),
    "Z3": (
        "azure",
        "failed to push azure1a2b.azurecr.io/trainer:1: unexpected status from POST request to "
        "https://azure1a2b.azurecr.io/v2/trainer/blobs/uploads/: 401 Unauthorized",
        "image-push",
    ),
    "Z5": ("azure", "Helm release gpu-operator failed: timed out waiting for the condition", "operator"),
    "Z7": (  # https://github.com/Azure/bicep-registry-modules/issues/6001
        "azure",
        'Code="StorageAccountOperationInProgress" Message="An operation is currently performing on this '
        "storage account "
        'that requires exclusive access."',
        "azure-busy",
    ),
    "Z8": ("azure", 'Code="UpgradeFailed" Message="Drain node aks-gpu-1 failed: PodDrainFailure"', "azure-drain"),
    "Z9": (  # https://github.com/Azure/azure-sdk-for-go/issues/6485
        "azure",
        'Code="CannotDeleteResource" Message="Can not delete resource before nested resources are deleted."',
        "azure-busy",
    ),
    "Z10": (
        "azure",
        'Get "https://azure-1.privatelink.eastus.azmk8s.io:443/openapi/v2": dial tcp: lookup '
        "azure-1.privatelink.eastus.azmk8s.io: no such host",
        "azure-private",
    ),
    "roles": (
        "azure",
        "The client 'ann' with object id '1' does not have authorization to perform action "
        "'Microsoft.Authorization/roleAssignments/write' over scope '/subscriptions/1'",
        "azure-roles",
    ),
    "G3": ("gcp", "libcuda.so.1: cannot open shared object file: No such file or directory", "gcp-driver"),
    "G6": (
        "gcp",
        "Error waiting for creating GKE NodePool: All cluster resources were brought up, but: only 0 nodes "
        "out of 2 have "
        "registered; GCE_STOCKOUT",
        "gcp-capacity",
    ),
}


@pytest.mark.parametrize(("cloud", "message", "key"), KNOWN.values(), ids=KNOWN.keys())
def test_a_known_error_is_explained_with_its_fix(cloud: str, message: str, key: str) -> None:
    doctor = clouds.load(cloud).doctor
    assert doctor
    causes = (*doctor.CAUSES, *GENERAL, *CLUSTER)
    (expected,) = (cause for cause in causes if cause.key == key)
    shown = explain(failure(""), Attempt("up", "dev", "", causes), [Diagnostic(message, "x:y:Z", "it")], [])
    first, second, *_ = str(shown).splitlines()
    assert first.startswith("x:y:Z it: ")
    assert second == f"    why: {expected.reason}. Fix: {expected.generic_fix.replace('<stack>', 'dev')}"


def test_one_cause_of_several_resources_is_explained_once() -> None:
    errors = [Diagnostic("InsufficientInstanceCapacity", "aws:eks:NodeGroup", name) for name in "ab"]
    doctor = clouds.load("aws").doctor
    assert doctor
    shown = str(explain(failure(""), Attempt("up", "dev", "", doctor.CAUSES), errors, []))
    assert shown.count("why: no such machine is free") == 1


def test_an_unknown_error_has_no_explanation() -> None:
    shown = explain(failure(""), Attempt("up", "dev"), [Diagnostic("something new", "x:y:Z", "it")], [])
    assert "why:" not in str(shown)
