"""The VPC, Cloud NAT, firewall rules, and the additional networks of GPUDirect-TCPX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra.clouds.gcp.addresses import MTU_BYTES, ExistingNetwork
from infra.clouds.gcp.settings import NUM_FABRIC_NETWORKS, Settings

#: Names of the subnet's secondary ranges.
PODS, SERVICES = "pods", "services"
#: Names of GPUDirect-TCPX's networks in logical names and in Kubernetes.
FABRIC_NETWORK_NAMES = [f"fabric{number}" for number in range(1, NUM_FABRIC_NETWORKS + 1)]

#: Ports of the operators' webhooks. GKE opens only 443 and 10250 for the API server, and an unreachable webhook rejects
#: every job: https://cloud.google.com/kubernetes-engine/docs/how-to/private-clusters#add_firewall_rules
_WEBHOOK_PORTS = ("8443", "9443")


@dataclass(frozen=True)
class FabricNetwork:
    """One network of GPUDirect-TCPX and its subnet; pods refer to it as `kubernetes_name` in an annotation."""

    kubernetes_name: str
    vpc: gcp.compute.Network
    subnet: gcp.compute.Subnetwork


@dataclass(frozen=True)
class Existing:
    """A VPC or subnet outside this stack, which never changes or deletes it."""

    id: pulumi.Output[str]
    name: pulumi.Output[str]


def _existing(path: str) -> Existing:
    """Return a resource by its full name."""
    return Existing(pulumi.Output.from_input(path), pulumi.Output.from_input(path.rpartition("/")[2]))


class Network(pulumi.ComponentResource):
    """A VPC without public addresses: a subnet, a NAT gateway, and a network per additional card of a GPU node.

    Firewall rules select nodes by `node_tag`; nodes need `nat` to start. With `network.existing` VPC, subnet and NAT
    are not the stack's, and `nat` is empty.
    """

    vpc: gcp.compute.Network | Existing
    subnet: gcp.compute.Subnetwork | Existing
    nat: Sequence[pulumi.Resource]
    node_tag: str
    fabric: Sequence[FabricNetwork]

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        """Create the VPC, its subnet, NAT and firewall rules, then the additional networks."""
        super().__init__("torchrec-cloud:gcp:Network", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.node_tag = f"{name}-node"
        if existing := settings.network.existing:
            ranges = self._find_existing(existing)
        else:
            self.vpc = self._create_vpc(f"{name}-vpc")
            self.subnet = self._create_subnet(self.vpc)
            self.nat = (self._create_nat(self.subnet),)
            ranges = [settings.network.cidr, settings.network.pods_cidr]
        self.firewalls = (self._allow_internal_traffic("nodes", self.vpc, ranges), self._allow_webhooks())
        self.fabric = self._create_fabric_networks() if settings.tcpx else ()
        self.register_outputs({"vpc": self.vpc.name, "subnet": self.subnet.name})

    def _create_vpc(self, name: str) -> gcp.compute.Network:
        """Create an empty VPC."""
        return gcp.compute.Network(
            name, auto_create_subnetworks=False, mtu=MTU_BYTES, routing_mode="REGIONAL", opts=self._child
        )

    def _find_existing(self, existing: ExistingNetwork) -> list[pulumi.Input[str]]:
        """Refer to the existing network; return the ranges of its nodes and pods."""
        project, region = self._settings.gcp_project, self._settings.region
        self.nat = ()
        self.vpc = _existing(f"projects/{project}/global/networks/{existing.network}")
        self.subnet = _existing(f"projects/{project}/regions/{region}/subnetworks/{existing.subnetwork}")
        found = gcp.compute.get_subnetwork_output(
            name=existing.subnetwork, region=region, project=project, opts=pulumi.InvokeOutputOptions(parent=self)
        )
        pods = found.secondary_ip_ranges.apply(
            lambda ranges: next(one.ip_cidr_range for one in ranges if one.range_name == existing.pods_range)
        )
        return [found.ip_cidr_range, pods]

    def _create_subnet(self, vpc: gcp.compute.Network) -> gcp.compute.Subnetwork:
        """Create the nodes' subnet, which reaches storage, registry and metrics without NAT."""
        net = self._settings.network
        secondary = [
            gcp.compute.SubnetworkSecondaryIpRangeArgs(range_name=range_name, ip_cidr_range=cidr)
            for range_name, cidr in ((PODS, net.pods_cidr), (SERVICES, net.services_cidr))
        ]
        return gcp.compute.Subnetwork(
            f"{self._name}-subnet",
            network=vpc.id,
            region=self._settings.region,
            ip_cidr_range=net.cidr,
            secondary_ip_ranges=secondary,
            private_ip_google_access=True,
            opts=self._child,
        )

    def _create_nat(self, subnet: gcp.compute.Subnetwork) -> gcp.compute.RouterNat:
        """Create Cloud NAT; dynamic ports let a node pull images from many hosts at once."""
        region = self._settings.region
        router = gcp.compute.Router(f"{self._name}-router", network=self.vpc.id, region=region, opts=self._child)
        return gcp.compute.RouterNat(
            f"{self._name}-nat",
            router=router.name,
            region=region,
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[
                gcp.compute.RouterNatSubnetworkArgs(name=subnet.id, source_ip_ranges_to_nats=["ALL_IP_RANGES"])
            ],
            enable_dynamic_port_allocation=True,
            enable_endpoint_independent_mapping=False,
            min_ports_per_vm=64,
            log_config=gcp.compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
            opts=self._child,
        )

    def _allow_internal_traffic(
        self, rule: str, vpc: gcp.compute.Network | Existing, sources: Sequence[pulumi.Input[str]]
    ) -> gcp.compute.Firewall:
        """Open all ports among nodes and pods: NCCL and c10d choose theirs when a job starts."""
        return gcp.compute.Firewall(
            f"{self._name}-{rule}",
            network=vpc.id,
            direction="INGRESS",
            source_ranges=list(sources),
            target_tags=[self.node_tag],
            allows=[gcp.compute.FirewallAllowArgs(protocol=protocol) for protocol in ("tcp", "udp", "icmp")],
            opts=self._child,
        )

    def _allow_webhooks(self) -> gcp.compute.Firewall:
        """Let the control plane reach the operators' webhooks."""
        return gcp.compute.Firewall(
            f"{self._name}-webhooks",
            network=self.vpc.id,
            direction="INGRESS",
            source_ranges=[self._settings.network.control_plane_cidr],
            target_tags=[self.node_tag],
            allows=[gcp.compute.FirewallAllowArgs(protocol="tcp", ports=list(_WEBHOOK_PORTS))],
            opts=self._child,
        )

    def _create_fabric_networks(self) -> Sequence[FabricNetwork]:
        """Create one VPC for each additional card, because two cards of a machine cannot share a VPC."""
        networks = []
        for kubernetes_name, cidr in zip(FABRIC_NETWORK_NAMES, self._settings.network.fabric_subnets, strict=True):
            vpc = self._create_vpc(f"{self._name}-{kubernetes_name}")
            subnet = gcp.compute.Subnetwork(
                f"{self._name}-{kubernetes_name}-subnet",
                network=vpc.id,
                region=self._settings.region,
                ip_cidr_range=cidr,
                opts=self._child,
            )
            self._allow_internal_traffic(f"{kubernetes_name}-cards", vpc, [cidr])
            networks.append(FabricNetwork(kubernetes_name, vpc, subnet))
        return networks
