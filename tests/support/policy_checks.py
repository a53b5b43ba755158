"""Run rules of the policy pack on resources, as the engine does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from pulumi_policy import (
    Policy,
    PolicyCustomTimeouts,
    PolicyResource,
    PolicyResourceOptions,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import unknown_checking_proxy

from infra.policy.pack import POLICIES

BY_NAME: dict[str, Policy] = {policy.name: policy for policy in POLICIES}
OPTIONS = PolicyResourceOptions(False, [], None, [], PolicyCustomTimeouts(0, 0, 0), [])
DIGEST = "registry.example/trainer@sha256:" + "0" * 64
TAGS = {"project": "p", "stack": "s", "owner": "o", "cost-centre": "c"}


def violations(rule: str, kind: str, props: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> list[str]:
    """Return the violations of a resource rule in one resource."""
    found: list[str] = []
    policy = cast(ResourceValidationPolicy, BY_NAME[rule])
    arguments = ResourceValidationArgs(
        kind, unknown_checking_proxy(dict(props)), f"urn:pulumi:s::p::{kind}::it", "it", OPTIONS, None, config
    )
    policy.validate(arguments, lambda text, urn: found.append(text))
    return found


def member(kind: str, name: str, props: Mapping[str, Any], needs: list[PolicyResource] | None = None) -> PolicyResource:
    """Return a resource in the form that a stack rule receives."""
    return PolicyResource(
        kind, dict(props), f"urn:pulumi:s::p::{kind}::{name}", name, OPTIONS, None, None, needs or [], {}
    )


def stack_violations(rule: str, members: list[PolicyResource], config: Mapping[str, Any] | None = None) -> list[str]:
    """Return the violations of a stack rule."""
    found: list[str] = []
    policy = cast(StackValidationPolicy, BY_NAME[rule])
    policy.validate(StackValidationArgs(members, config), lambda text, urn: found.append(text))
    return found


def pod(container: Mapping[str, Any] | None = None, *, namespace: str = "training", **spec: Any) -> dict[str, Any]:
    """Return a job with one container."""
    one = {"name": "c", "image": DIGEST, **(container or {})}
    return {"metadata": {"namespace": namespace}, "spec": {"template": {"spec": {"containers": [one], **spec}}}}


def document(action: str, resource: str, effect: str = "Allow", **more: Any) -> str:
    """Return an IAM policy with one statement."""
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
