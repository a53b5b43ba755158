"""Which machines each cloud's API server lets in, by the inputs of its cluster."""

from __future__ import annotations

import base64
import json
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network

from engine_values import at
from engine_world import Inputs, Refused, World

_INSTANCE, _INGRESS = "aws:ec2/instance:Instance", "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
_ATTACHMENT = "aws:iam/rolePolicyAttachment:RolePolicyAttachment"


def _aws_ranges(inputs: Inputs) -> Iterable[str]:
    """Return who reaches the public endpoint, by default everyone; the private one accepts only the VPC.

    https://docs.aws.amazon.com/eks/latest/userguide/cluster-endpoint.html
    """
    if not at(inputs, "vpcConfig.endpointPublicAccess"):
        return ()
    return at(inputs, "vpcConfig.publicAccessCidrs") or ("0.0.0.0/0",)


def _azure_ranges(inputs: Inputs) -> Iterable[str]:
    """Return the authorized ranges, everyone without them; only the VNet reaches a private cluster.

    https://learn.microsoft.com/azure/aks/api-server-authorized-ip-ranges
    """
    access = inputs.get("apiServerAccessProfile") or {}
    if access.get("enablePrivateCluster"):
        return ()
    return access.get("authorizedIPRanges") or ("0.0.0.0/0",)


def _gcp_ranges(inputs: Inputs) -> Iterable[str]:
    """Return the authorized networks of the public address; IAM alone guards the DNS endpoint.

    https://cloud.google.com/kubernetes-engine/docs/concepts/network-isolation
    """
    if at(inputs, "controlPlaneEndpointsConfig.dnsEndpointConfig.allowExternalTraffic"):
        return ("0.0.0.0/0",)
    if at(inputs, "privateClusterConfig.enablePrivateEndpoint"):
        return ()
    networks = inputs.get("masterAuthorizedNetworksConfig")
    return ("0.0.0.0/0",) if networks is None else [block["cidrBlock"] for block in networks.get("cidrBlocks") or ()]


#: The control plane of each cloud, with the ranges that it lets in and what a machine outside of them sees.
_DOORS: Mapping[str, tuple[Callable[[Inputs], Iterable[str]], str]] = {
    "aws:eks/cluster:Cluster": (_aws_ranges, "dial tcp 10.0.17.4:443: i/o timeout"),
    "azure-native:containerservice:ManagedCluster": (_azure_ranges, "dial tcp: lookup stack.privatelink: no such host"),
    "gcp:container/cluster:Cluster": (_gcp_ranges, "dial tcp 172.16.0.2:443: i/o timeout"),
}


def _is_inside(address: IPv4Address) -> bool:
    """Return whether the machine is in the network of the cluster."""
    return address in IPv4Network("10.0.0.0/8")


def check_address(world: World) -> None:
    """Refuse a machine whose address the API server does not let in, as the Kubernetes provider reports it."""
    if "tls-server-name" in world.kubeconfig:
        _check_tunnel(json.loads(world.kubeconfig)["clusters"][0]["cluster"])
        _check_bastion(world)
        return
    address = IPv4Address(world.machine)
    for cluster in world.of_type(*_DOORS) if not _is_inside(address) else ():
        ranges, error = _DOORS[cluster.type]
        if not any(address in IPv4Network(cidr) for cidr in ranges(cluster.inputs)):
            raise _unreachable(error)


def is_own_cluster(world: World) -> bool:
    """Return whether the kubeconfig is that of the stack's own cluster, not of one on this machine."""
    return "127.0.0.1" not in world.kubeconfig or "tls-server-name" in world.kubeconfig


def _unreachable(error: str) -> Refused:
    return Refused(f"configured Kubernetes cluster is unreachable: unable to load schema information: {error}")


def _check_tunnel(cluster: Mapping[str, str]) -> None:
    """Refuse if no server with the cluster's certificate answers at the tunnel's port of this machine."""
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    port = int(cluster["server"].rpartition(":")[2])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as raw,
            context.wrap_socket(raw, server_hostname=cluster["tls-server-name"]),
        ):
            return
    except OSError as error:
        raise _unreachable(f"dial tcp 127.0.0.1:{port}: {error}") from None


def _check_bastion(world: World) -> None:
    """Refuse if the tunnel's far end cannot reach the API server or Session Manager.

    https://docs.aws.amazon.com/eks/latest/userguide/sec-group-reqs.html: the cluster's security group admits only its
    own members. https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-prerequisites.html: the
    agent needs the permissions of the policy.
    """
    groups = [group for one in world.ready(_INSTANCE) for group in one.inputs["vpcSecurityGroupIds"]]
    if not groups:
        raise _unreachable("TargetNotConnected: the machine at the tunnel's end does not exist")
    admitted = [one.inputs.get("referencedSecurityGroupId") for one in world.ready(_INGRESS)]
    if not set(admitted) & set(groups):
        raise _unreachable("EOF: the cluster's security group does not admit the machine at the tunnel's end")
    attached = [str(one.inputs["policyArn"]) for one in world.ready(_ATTACHMENT)]
    if not any(arn.endswith("/AmazonSSMManagedInstanceCore") for arn in attached):
        raise _unreachable("TargetNotConnected: the agent of Session Manager has no permissions")
