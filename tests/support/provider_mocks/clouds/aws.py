"""Values that AWS computes, in the format of its API."""

from __future__ import annotations

import json
import zlib
from typing import Any

ACCOUNT = "123456789012"


def _kubeconfig(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the kubeconfig of pulumi-eks, which contains a command that fetches a token instead of a token."""
    arguments = ["--region", "us-west-2", "eks", "get-token", "--cluster-name", inputs["name"]]
    command = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "aws", "args": arguments}
    server = {"server": f"https://{name}.gr7.us-west-2.eks.amazonaws.com", "certificate-authority-data": "Q0E="}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "aws",
        "contexts": [{"name": "aws", "context": {"cluster": "kubernetes", "user": "aws"}}],
        "clusters": [{"name": "kubernetes", "cluster": server}],
        "users": [{"name": "aws", "user": {"exec": command}}],
    }
    return {
        "kubeconfig": config,
        "kubeconfigJson": json.dumps(config),
        "clusterSecurityGroupId": f"sg-{name}",
        "oidcIssuer": "oidc.eks.us-west-2.amazonaws.com/id/0",
    }


def _node_group(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"resources": [{"autoscalingGroups": [{"name": f"eks-{name}-0"}]}]}


def _arn(service: str, kind: str) -> Any:
    return lambda name, inputs: {"arn": f"arn:aws:{service}:us-west-2:{ACCOUNT}:{kind}/{name}"}


def _repository(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    host = f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com"
    return {"registryId": ACCOUNT, "repositoryUrl": f"{host}/{name}"}


def _key_id(name: str) -> str:
    """Return an id that differs between the keys of two stacks, and between the keys of one stack after a destroy."""
    return f"{zlib.crc32(name.encode()):08x}-12ab-34cd-56ef-1234567890ab"


def _zone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a zone whose id has another order than the letters, as in most accounts."""
    ids = {"us-east-1e": "use1-az3", "us-west-1c": "usw1-az2", "ca-central-1d": "cac1-az3"}
    name = arguments["name"]
    return {"name": name, "zoneId": ids.get(name, f"{name}-id"), "region": name[:-1], "id": name[:-1]}


OUTPUTS: dict[str, Any] = {
    "aws:ec2/eip:Eip": lambda name, inputs: {"allocationId": f"eipalloc-{name}", "publicIp": "192.0.2.1"},
    "aws:ec2/launchTemplate:LaunchTemplate": lambda name, inputs: {"latestVersion": 1},
    "aws:ecr/repository:Repository": _repository,
    "aws:eks/nodeGroup:NodeGroup": _node_group,
    "aws:fsx/lustreFileSystem:LustreFileSystem": lambda name, inputs: {
        "dnsName": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
        "mountName": "abcdefgh",
    },
    "aws:iam/role:Role": lambda name, inputs: {"arn": f"arn:aws:iam::{ACCOUNT}:role/{name}"},
    "aws:kms/key:Key": lambda name, inputs: {**_arn("kms", "key")(name, inputs), "keyId": _key_id(name)},
    "aws:s3/bucket:Bucket": lambda name, inputs: {"bucket": f"{name}-0a1b2c3", "arn": f"arn:aws:s3:::{name}-0a1b2c3"},
    "eks:index:Cluster": _kubeconfig,
}

CALLS: dict[str, Any] = {
    "aws:ssm/getParameter:getParameter": lambda arguments: {"id": arguments["name"], "value": "ami-0123456789abcdef0"},
    "aws:index/getCallerIdentity:getCallerIdentity": lambda arguments: {
        "accountId": ACCOUNT,
        "arn": f"arn:aws:iam::{ACCOUNT}:user/someone",
        "id": ACCOUNT,
        "userId": "AIDAEXAMPLE",
    },
    "aws:index/getAvailabilityZone:getAvailabilityZone": _zone,
    "aws:eks/getAddonVersion:getAddonVersion": lambda arguments: {
        **arguments,
        "id": arguments["addonName"],
        "region": "us-west-2",
        "version": f"v{arguments['kubernetesVersion']}.0-eksbuild.1",
    },
    # An account without clusters; the engine's tests answer from the simulated world.
    "aws:eks/getClusters:getClusters": lambda arguments: {"id": "us-west-2", "names": [], "region": "us-west-2"},
    "aws:ecr/getAuthorizationToken:getAuthorizationToken": lambda arguments: {
        "authorizationToken": "QVdTOnRva2Vu",
        "expiresAt": "2026-11-21T12:00:00Z",
        "id": "us-west-2",
        "password": "token",
        "proxyEndpoint": f"https://{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com",
        "region": "us-west-2",
        "userName": "AWS",
    },
}
