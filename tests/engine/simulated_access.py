"""Which machines each cloud's API server lets in, by the inputs of its cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network

from engine_values import at
from engine_world import Inputs, Refused, World


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
        return  # a tunnel ends inside the network
    address = IPv4Address(world.machine)
    for cluster in world.of_type(*_DOORS) if not _is_inside(address) else ():
        ranges, error = _DOORS[cluster.type]
        if not any(address in IPv4Network(cidr) for cidr in ranges(cluster.inputs)):
            raise Refused(f"configured Kubernetes cluster is unreachable: unable to load schema information: {error}")
