"""The resource group, the VNet with its subnets, the way out, and private addresses for Azure's services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi
from pulumi_azure_native import network as vnets
from pulumi_azure_native import privatedns, resources

from infra.clouds.azure.settings import Settings

#: Where the private address of each kind of endpoint is looked up (Azure Private Link, DNS zone values).
_ZONES: Mapping[str, str] = {
    "blob": "privatelink.blob.core.windows.net",
    "dfs": "privatelink.dfs.core.windows.net",
    "registry": "privatelink.azurecr.io",
    "grafana": "privatelink.grafana.azure.com",
    "amlworkspace": "privatelink.api.azureml.ms",
}


class EndpointNetwork(pulumi.ComponentResource):
    """A VNet in which Azure's services have private addresses, in a subnet of their own."""

    resource_group: resources.ResourceGroup
    vnet: vnets.VirtualNetwork
    endpoints: vnets.Subnet

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("torchrec-cloud:azure:Network", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.resource_group = resources.ResourceGroup(
            f"{name}-group", location=settings.location, tags=settings.labels, opts=self._child
        )
        self.vnet = self._vnet()
        self.endpoints = self._subnet(
            "endpoints",
            settings.network.subnets["network.endpoints_cidr"],
            self._firewall("endpoints", only("VirtualNetwork", "443")),
            self._subnets_before(),
        )
        self.register_outputs({"vnet": self.vnet.id})

    def _subnets_before(self) -> Sequence[vnets.Subnet]:
        """Further subnets, the last of which is waited for: Azure changes one subnet of a VNet at a time."""
        return ()

    def _vnet(self) -> vnets.VirtualNetwork:
        """The VNet alone: its subnets are resources of their own, so that each can be waited for and destroyed."""
        return vnets.VirtualNetwork(
            f"{self._name}-vnet",
            resource_group_name=self.resource_group.name,
            address_space=vnets.AddressSpaceArgs(address_prefixes=[self._settings.network.cidr]),
            tags=self._settings.labels,
            opts=self._child,
        )

    def _firewall(self, what: str, rules: Sequence[vnets.SecurityRuleArgs]) -> vnets.NetworkSecurityGroup:
        """What may come into one subnet; Azure's own last rule denies the internet."""
        return vnets.NetworkSecurityGroup(
            f"{self._name}-{what}-nsg",
            resource_group_name=self.resource_group.name,
            security_rules=list(rules),
            tags=self._settings.labels,
            opts=self._child,
        )

    def _subnet(
        self,
        what: str,
        cidr: str,
        firewall: vnets.NetworkSecurityGroup,
        after: Sequence[pulumi.Resource],
        *,
        gateway: vnets.NatGateway | None = None,
        delegated_to: str | None = None,
    ) -> vnets.Subnet:
        delegations = [vnets.DelegationArgs(name="service", service_name=delegated_to)] if delegated_to else None
        return vnets.Subnet(
            f"{self._name}-{what}-subnet",
            subnet_name=what,
            resource_group_name=self.resource_group.name,
            virtual_network_name=self.vnet.name,
            address_prefix=cidr,
            default_outbound_access=False,
            delegations=delegations,
            nat_gateway=vnets.SubResourceArgs(id=gateway.id) if gateway else None,
            network_security_group=vnets.NetworkSecurityGroupArgs(id=firewall.id),
            # Without it a private endpoint ignores the subnet's rules.
            private_endpoint_network_policies="NetworkSecurityGroupEnabled",
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after)),
        )


class PrivateNetwork(EndpointNetwork):
    """A VNet whose nodes have no public address: they leave through one NAT gateway.

    Three subnets: nodes, NetApp (delegated to its service) and private endpoints.
    """

    nodes: vnets.Subnet
    netapp: vnets.Subnet

    def _subnets_before(self) -> Sequence[vnets.Subnet]:
        """The nodes', then NetApp's."""
        ranges = self._settings.network.subnets
        nodes, pods = ranges["network.nodes_cidr"], self._settings.network.pods_cidr
        gateway = self._nat_gateway()
        self.nodes = self._subnet(
            "nodes", nodes, self._firewall("nodes", overlay_rules(nodes, pods)), (), gateway=gateway
        )
        self.netapp = self._subnet(
            "netapp",
            ranges["network.netapp_cidr"],
            self._firewall("netapp", only(nodes, "2049")),
            (self.nodes,),
            delegated_to="Microsoft.NetApp/volumes",
        )
        return (self.netapp,)

    def _nat_gateway(self) -> vnets.NatGateway:
        """The one public address of the cluster, for connections that nodes open."""
        address = vnets.PublicIPAddress(
            f"{self._name}-address",
            resource_group_name=self.resource_group.name,
            public_ip_allocation_method="Static",
            sku=vnets.PublicIPAddressSkuArgs(name="Standard"),
            tags=self._settings.labels,
            opts=self._child,
        )
        return vnets.NatGateway(
            f"{self._name}-nat",
            resource_group_name=self.resource_group.name,
            public_ip_addresses=[vnets.SubResourceArgs(id=address.id)],
            sku=vnets.NatGatewaySkuArgs(name="Standard"),
            tags=self._settings.labels,
            opts=self._child,
        )


def overlay_rules(nodes: str, pods: str) -> list[vnets.SecurityRuleArgs]:
    """Nodes and pods among themselves: the overlay's pod addresses are no part of the VNet that Azure's rule admits."""
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


def only(source: str, port: str) -> list[vnets.SecurityRuleArgs]:
    """One port from one source, and nothing else, not even from the rest of the VNet."""
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
    """The spelling of Azure's IP rules, which refuse a range of one address."""
    return cidr.removesuffix("/32")


def private_endpoint(
    name: str,
    network: EndpointNetwork,
    target: pulumi.Input[str],
    kind: str,
    tags: Mapping[str, str],
    opts: pulumi.ResourceOptions,
) -> vnets.PrivateDnsZoneGroup:
    """An address within the VNet for the service `target`, and the DNS zone that makes its usual name resolve to it."""
    group = network.resource_group.name
    zone = privatedns.PrivateZone(
        f"{name}-{kind}-zone",
        private_zone_name=_ZONES[kind],
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
        opts=opts,
    )
    return vnets.PrivateDnsZoneGroup(
        f"{name}-{kind}-dns",
        resource_group_name=group,
        private_endpoint_name=endpoint.name,
        private_dns_zone_configs=[vnets.PrivateDnsZoneConfigArgs(name=kind, private_dns_zone_id=zone.id)],
        opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[link])),
    )
