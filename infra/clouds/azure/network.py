"""The resource group, the VNet and its subnets, the NAT gateway, and private endpoints of Azure services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
from pulumi_azure_native import network as vnets
from pulumi_azure_native import privatedns, resources

from infra.clouds.azure.addresses import PRIVATE_ZONES, ExistingNetwork
from infra.clouds.azure.settings import Settings


@dataclass(frozen=True)
class Existing:
    """A VNet or subnet outside this stack, which never changes or deletes it."""

    id: pulumi.Output[str]


def _existing(identifier: str) -> Existing:
    """Return a resource by its id."""
    return Existing(pulumi.Output.from_input(identifier))


class EndpointNetwork(pulumi.ComponentResource):
    """A VNet with a subnet for the private endpoints of Azure services."""

    resource_group: resources.ResourceGroup
    vnet: vnets.VirtualNetwork | Existing
    endpoints: vnets.Subnet | Existing

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        """Create the resource group, the VNet and its subnets."""
        super().__init__("torchrec-cloud:azure:Network", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.resource_group = resources.ResourceGroup(
            f"{name}-group", location=settings.location, tags=settings.labels, opts=self._child
        )
        if settings.network.existing:
            self._refer_to(settings.network.existing)
        else:
            self._create_network()
        self.register_outputs({"vnet": self.vnet.id})

    def _refer_to(self, existing: ExistingNetwork) -> None:
        """Use an existing VNet and its subnet for private endpoints."""
        self.vnet, self.endpoints = _existing(existing.vnet_id), _existing(existing.endpoints_subnet_id)

    def _create_network(self) -> None:
        """Create the VNet, then its subnets."""
        self._own_vnet = self.vnet = self._create_vnet()
        self.endpoints = self._create_subnet(
            "endpoints",
            self._settings.network.subnets["network.endpoints_cidr"],
            self._create_firewall("endpoints", allow_only("VirtualNetwork", "443")),
            self._create_node_subnets(),
        )

    def _create_node_subnets(self) -> Sequence[vnets.Subnet]:
        """Return the subnets to wait for: Azure changes one subnet of a VNet at a time."""
        return ()

    def _create_vnet(self) -> vnets.VirtualNetwork:
        """Create the VNet without subnets, which are separate resources with their own order."""
        return vnets.VirtualNetwork(
            f"{self._name}-vnet",
            resource_group_name=self.resource_group.name,
            address_space=vnets.AddressSpaceArgs(address_prefixes=[self._settings.network.cidr]),
            tags=self._settings.labels,
            opts=self._child,
        )

    def _create_firewall(self, subnet: str, rules: Sequence[vnets.SecurityRuleArgs]) -> vnets.NetworkSecurityGroup:
        """Create the inbound rules of one subnet; Azure's default last rule denies the internet."""
        return vnets.NetworkSecurityGroup(
            f"{self._name}-{subnet}-nsg",
            resource_group_name=self.resource_group.name,
            security_rules=list(rules),
            tags=self._settings.labels,
            opts=self._child,
        )

    def _create_subnet(
        self,
        subnet: str,
        cidr: str,
        firewall: vnets.NetworkSecurityGroup,
        depends_on: Sequence[pulumi.Resource],
        *,
        gateway: vnets.NatGateway | None = None,
        delegated_to: str | None = None,
    ) -> vnets.Subnet:
        """Create one subnet, delegated to a service if one is given."""
        delegations = [vnets.DelegationArgs(name="service", service_name=delegated_to)] if delegated_to else None
        return vnets.Subnet(
            f"{self._name}-{subnet}-subnet",
            subnet_name=subnet,
            resource_group_name=self.resource_group.name,
            virtual_network_name=self._own_vnet.name,
            address_prefix=cidr,
            default_outbound_access=False,
            delegations=delegations,
            nat_gateway=vnets.SubResourceArgs(id=gateway.id) if gateway else None,
            network_security_group=vnets.NetworkSecurityGroupArgs(id=firewall.id),
            # Without this a private endpoint ignores the subnet's rules.
            private_endpoint_network_policies="NetworkSecurityGroupEnabled",
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(depends_on)),
        )


class PrivateNetwork(EndpointNetwork):
    """A VNet whose nodes have no public address and reach the internet through one NAT gateway.

    It has three subnets: nodes, NetApp (delegated to its service) and private endpoints.
    """

    nodes: vnets.Subnet | Existing
    netapp: vnets.Subnet | Existing
    #: The public address of the nodes' outbound connections, as a range.
    outbound_range: pulumi.Output[str]

    def _refer_to(self, existing: ExistingNetwork) -> None:
        """Use the subnets of an existing VNet."""
        super()._refer_to(existing)
        self.nodes, self.netapp = _existing(existing.nodes_subnet_id), _existing(existing.netapp_subnet_id)
        self.outbound_range = pulumi.Output.from_input(existing.outbound_cidr)

    def _create_node_subnets(self) -> Sequence[vnets.Subnet]:
        """Create the subnet of the nodes, then NetApp's, and return the last one."""
        ranges = self._settings.network.subnets
        nodes, pods = ranges["network.nodes_cidr"], self._settings.network.pods_cidr
        gateway = self._create_nat_gateway()
        self.nodes = first = self._create_subnet(
            "nodes", nodes, self._create_firewall("nodes", overlay_rules(nodes, pods)), (), gateway=gateway
        )
        self.netapp = last = self._create_subnet(
            "netapp",
            ranges["network.netapp_cidr"],
            self._create_firewall("netapp", allow_only(nodes, "2049")),
            (first,),
            delegated_to="Microsoft.NetApp/volumes",
        )
        return (last,)

    def _create_nat_gateway(self) -> vnets.NatGateway:
        """Create the cluster's only public address, for outbound connections of the nodes."""
        address = vnets.PublicIPAddress(
            f"{self._name}-address",
            resource_group_name=self.resource_group.name,
            public_ip_allocation_method="Static",
            sku=vnets.PublicIPAddressSkuArgs(name="Standard"),
            tags=self._settings.labels,
            opts=self._child,
        )
        self.outbound_range = address.ip_address.apply(lambda ip: f"{ip}/32")
        return vnets.NatGateway(
            f"{self._name}-nat",
            resource_group_name=self.resource_group.name,
            public_ip_addresses=[vnets.SubResourceArgs(id=address.id)],
            sku=vnets.NatGatewaySkuArgs(name="Standard"),
            tags=self._settings.labels,
            opts=self._child,
        )


def overlay_rules(nodes: str, pods: str) -> list[vnets.SecurityRuleArgs]:
    """Allow traffic among nodes and pods: Azure's default rule admits the VNet, which excludes pod addresses."""
    return [
        vnets.SecurityRuleArgs(
            name="cluster",
            priority=100,
            direction="Inbound",
            access="Allow",
            protocol="*",
            source_address_prefixes=[nodes, pods],
            source_port_range="*",
            destination_address_prefixes=[nodes, pods],
            destination_port_range="*",
        )
    ]


def allow_only(source: str, port: str) -> list[vnets.SecurityRuleArgs]:
    """Allow one port from one source, and deny everything else, including the rest of the VNet."""
    return [
        vnets.SecurityRuleArgs(
            name="allowed",
            priority=100,
            direction="Inbound",
            access="Allow",
            protocol="Tcp",
            source_address_prefix=source,
            source_port_range="*",
            destination_address_prefix="*",
            destination_port_range=port,
        ),
        vnets.SecurityRuleArgs(
            name="everything-else",
            priority=4096,
            direction="Inbound",
            access="Deny",
            protocol="*",
            source_address_prefix="*",
            source_port_range="*",
            destination_address_prefix="*",
            destination_port_range="*",
        ),
    ]


def address_or_range(cidr: str) -> str:
    """Return the range as Azure's IP rules accept it: they reject a range of one address."""
    return cidr.removesuffix("/32")


def private_endpoint(
    name: str,
    network: EndpointNetwork,
    target: pulumi.Input[str],
    kind: str,
    tags: Mapping[str, str],
    opts: pulumi.ResourceOptions,
    after: Sequence[pulumi.Resource] = (),
) -> vnets.PrivateDnsZoneGroup:
    """Create a private endpoint for the service `target` and a DNS zone that resolves the service's name to it.

    The endpoint is created after the resources `after`: some services accept one change at a time.
    """
    group = network.resource_group.name
    zone = privatedns.PrivateZone(
        f"{name}-{kind}-zone",
        private_zone_name=PRIVATE_ZONES[kind],
        resource_group_name=group,
        location="global",
        tags=tags,
        opts=opts,
    )
    link = privatedns.VirtualNetworkLink(
        f"{name}-{kind}-link",
        private_zone_name=zone.name,
        resource_group_name=group,
        location="global",
        registration_enabled=False,
        virtual_network=privatedns.SubResourceArgs(id=network.vnet.id),
        tags=tags,
        opts=opts,
    )
    endpoint = vnets.PrivateEndpoint(
        f"{name}-{kind}-endpoint",
        resource_group_name=group,
        subnet=vnets.SubnetArgs(id=network.endpoints.id),
        private_link_service_connections=[
            vnets.PrivateLinkServiceConnectionArgs(name=kind, private_link_service_id=target, group_ids=[kind])
        ],
        tags=tags,
        opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=list(after))),
    )
    return vnets.PrivateDnsZoneGroup(
        f"{name}-{kind}-dns",
        resource_group_name=group,
        private_endpoint_name=endpoint.name,
        private_dns_zone_configs=[vnets.PrivateDnsZoneConfigArgs(name=kind, private_dns_zone_id=zone.id)],
        opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[link])),
    )
