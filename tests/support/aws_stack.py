"""Shared helpers of the AWS tests: resource types, settings and views of a recorded stack."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from email import message_from_bytes
from typing import Any

from provider_mocks.recording import PROJECT, Recording, Registration, stack_config

from infra.clouds.aws.settings import Settings
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


def gpu_template(recording: Recording) -> Mapping[str, Any]:
    """Return the inputs of the GPU nodes' launch template."""
    return recording.one(TEMPLATE, "aws-cluster-gpu-template").inputs


def gpu_nodes(recording: Recording) -> Mapping[str, Any]:
    """Return the inputs of the GPU node group."""
    return recording.one(NODES, "aws-cluster-gpu-nodes").inputs


def user_data_parts(recording: Recording) -> dict[str, str]:
    """Return the parts of a GPU node's user data by content type."""
    document = message_from_bytes(base64.b64decode(gpu_template(recording)["userData"]))
    parts = {}
    for part in document.walk():
        if not part.is_multipart():
            payload = part.get_payload(decode=True)
            assert isinstance(payload, bytes)
            parts[part.get_content_type()] = payload.decode()
    return parts


def settings_of(overrides: Mapping[str, object]) -> Settings:
    """Return the checked settings of the repository's own stack with these overrides."""
    settings = parse(stack_config("aws", overrides), PROJECT, "aws", SECTIONS).settings
    assert isinstance(settings, Settings)
    return settings


def addons_by_name(recording: Recording) -> dict[str, Registration]:
    """Return the EKS add-ons by name."""
    return {item.inputs["addonName"]: item for item in recording.of_type(ADDON)}


def read_statements(policy: str) -> list[dict[str, Any]]:
    """Return the statements of a policy document."""
    return list(json.loads(policy)["Statement"])


def all_statements(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yield every statement of every policy in the recording, including trust policies."""
    for item in recording.registrations:
        for key in ("policy", "assumeRolePolicy"):
            if item.type.startswith(("aws:iam/", "aws:s3/", "aws:kms/")) and key in item.inputs:
                yield from read_statements(item.inputs[key])
