"""The AKS cluster: control plane, system pool, GPU pool, kubeconfig and Kubernetes provider."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network

import pulumi
import pulumi_kubernetes as k8s
import yaml
from pulumi_azure_native import authorization, compute, containerservice, managedidentity

from infra.clouds.azure import live, upgrades
from infra.clouds.azure.identity import Principal, Principals, Role, administrators, grant
from infra.clouds.azure.network import PrivateNetwork
from infra.clouds.azure.settings import GENERATED_SUFFIX, Settings, physical_name
from infra.contract import GPU_LABEL, GPU_TAINT, Toleration

#: AKS puts this taint and this label on every spot pool. Both are declared to avoid a diff after each refresh.
SPOT_TAINT = Toleration("kubernetes.azure.com/scalesetpriority", "spot")
_SPOT_LABEL = {"kubernetes.azure.com/scalesetpriority": "spot"}

#: AKS, naming restrictions.
_MAX_GROUP_NAME = 80

_GPU_POOL = "gpu"

#: The Entra application of the AKS server, the same in all tenants (AKS, kubelogin documentation).
_AKS_SERVER_ID = "6dae42f8-4368-4678-94ff-3960e28e3630"


class AksCluster(pulumi.ComponentResource):
    """An AKS cluster without local accounts: users authenticate with Entra, pods with federated identities.

    Pods get addresses from an overlay, which leaves the VNet's addresses to nodes. Cilium is its data plane and
    enforces network policies. NFS and InfiniBand bypass the overlay: the node mounts NFS, and a device plugin allocates
    the InfiniBand cards.
    """

    managed: containerservice.ManagedCluster
    gpu_pool: containerservice.AgentPool
    administrators: Mapping[str, Principal]
    kubelet_id: pulumi.Output[str]
    issuer: pulumi.Output[str]
    kubeconfig: pulumi.Output[str]
    provider: k8s.Provider

    def __init__(
        self, name: str, settings: Settings, network: PrivateNetwork, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        """Create the control plane, its maintenance windows and the GPU pool, then the Kubernetes provider."""
        super().__init__("torchrec-cloud:azure:Cluster", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        self._identity = managedidentity.UserAssignedIdentity(
            f"{name}-identity", resource_group_name=network.resource_group.name, tags=settings.labels, opts=self._child
        )
        self.administrators = administrators(settings.kubernetes.admin_group_ids, self._child)
        administrator_roles = self._grant_administrator_roles()
        self.managed = self._create_control_plane([*self._grant_control_plane_roles(), *administrator_roles])
        upgrades.maintenance_windows(
            name, settings.maintenance, network.resource_group.name, self.managed.name, self._child
        )
        self.gpu_pool = self._create_gpu_pool()
        self.kubelet_id = self.managed.identity_profile.apply(_kubelet_id)
        self.issuer = self.managed.oidc_issuer_profile.apply(_issuer_url)
        self.kubeconfig = self._build_kubeconfig()
        # The provider needs the roles until it is deleted.
        opts = pulumi.ResourceOptions(parent=self, depends_on=administrator_roles)
        self.provider = k8s.Provider(f"{name}-k8s", kubeconfig=self.kubeconfig, opts=opts)
        self.register_outputs({"name": self.managed.name, "kubeconfig": self.kubeconfig})

    @property
    def principals(self) -> Principals:
        """Return the principals that use the cluster's registry."""
        return Principals(self.kubelet_id, self.administrators)

    def _grant(self, what: str, role: Role, scope: pulumi.Input[str]) -> authorization.RoleAssignment:
        """Assign a role to the control plane's own identity."""
        principal = self._identity.principal_id
        return grant(f"{self._name}-{what}", role, scope, principal, "ServicePrincipal", self._child)

    def _grant_administrator_roles(self) -> list[pulumi.Resource]:
        """Grant the administrators the role on the stack's resource group, which holds no other cluster.

        A role takes up to five minutes to reach the API server (AKS, Azure RBAC for Kubernetes authorization), and the
        Kubernetes provider does not retry Forbidden. So it is granted before AKS creates the cluster, which takes
        longer.
        """
        scope = self._network.resource_group.id
        return [
            grant(f"{self._name}-admin-{who}", Role.AKS_CLUSTER_ADMIN, scope, principal, kind, self._child)
            for who, (principal, kind) in self.administrators.items()
        ]

    def _grant_control_plane_roles(self) -> list[pulumi.Resource]:
        """Let the control plane join nodes to their subnet and unwrap secrets if the stack has its own key."""
        roles: list[pulumi.Resource] = [
            self._grant("network", Role.NETWORK_CONTRIBUTOR, self._network.nodes.id),
        ]
        kubernetes = self._settings.kubernetes
        if kubernetes.kms_key_id and kubernetes.kms_vault_id:
            key = kubernetes.kms_key_id.split("/keys/")[1].split("/")[0]
            roles.append(self._grant("key", Role.KEY_USER, f"{kubernetes.kms_vault_id}/keys/{key}"))
        return roles

    def _create_control_plane(self, depends_on: Sequence[pulumi.Resource]) -> containerservice.ManagedCluster:
        """Create the managed cluster together with its system pool."""
        settings, kubernetes = self._settings, self._settings.kubernetes
        metrics = containerservice.ManagedClusterAzureMonitorProfileMetricsArgs(enabled=settings.monitoring.managed)
        return containerservice.ManagedCluster(
            f"{self._name}-aks",
            resource_group_name=self._network.resource_group.name,
            dns_prefix=self._network.resource_group.id.apply(
                lambda group: physical_name(settings.stack, group, max_length=54)
            ),
            kubernetes_version=settings.cluster.kubernetes_version,
            sku=containerservice.ManagedClusterSKUArgs(name="Base", tier="Standard"),
            identity=containerservice.ManagedClusterIdentityArgs(
                type=containerservice.ResourceIdentityType.USER_ASSIGNED,
                user_assigned_identities=[self._identity.id],
            ),
            enable_rbac=True,
            disable_local_accounts=True,
            aad_profile=containerservice.ManagedClusterAADProfileArgs(
                managed=True, enable_azure_rbac=True, admin_group_object_ids=list(kubernetes.admin_group_ids)
            ),
            oidc_issuer_profile=containerservice.ManagedClusterOIDCIssuerProfileArgs(enabled=True),
            security_profile=_security_profile(kubernetes.kms_key_id),
            api_server_access_profile=_api_server_access(
                settings.network.authorized_cidrs, self._network.outbound_range
            ),
            network_profile=_network_profile(settings),
            agent_pool_profiles=[self._system_pool_profile()],
            auto_upgrade_profile=upgrades.channels(),
            azure_monitor_profile=containerservice.ManagedClusterAzureMonitorProfileArgs(metrics=metrics),
            node_resource_group=self._nodes_group(),
            tags=settings.labels,
            # A stack that exists keeps the name; another one would replace the cluster.
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(depends_on), ignore_changes=["nodeResourceGroup"]),
        )

    def _nodes_group(self) -> pulumi.Output[str] | None:
        """Return a name for the nodes' resource group if the name that AKS derives has more than 80 characters."""
        stack = self._settings.stack
        group, cluster = (f"{self._name}-{what}{GENERATED_SUFFIX}" for what in ("network-group", "aks"))
        if len(f"MC_{group}_{cluster}_{self._settings.location}") <= _MAX_GROUP_NAME:
            return None
        return self._network.resource_group.id.apply(lambda unique: f"MC_{physical_name(stack, unique, max_length=60)}")

    def _system_pool_profile(self) -> containerservice.ManagedClusterAgentPoolProfileArgs:
        """Return the system pool, which is part of the cluster resource: AKS creates no cluster without one.

        It names no version: a request for the cluster must name those of all pools or of none, and the GPU pool is a
        resource of its own (Azure/ARO-HCP#662). So a new version reaches this pool by a command (infra/UPGRADE.md).
        """
        system = self._settings.system
        return containerservice.ManagedClusterAgentPoolProfileArgs(
            name="system",
            mode="System",
            type="VirtualMachineScaleSets",
            vm_size=system.instance_type,
            count=system.num_nodes,
            os_type="Linux",
            os_sku="Ubuntu",
            vnet_subnet_id=self._network.nodes.id,
            enable_encryption_at_host=self._settings.kubernetes.host_encryption,
            enable_node_public_ip=False,
            tags=self._settings.labels,
        )

    def _create_placement(self) -> tuple[pulumi.Output[str] | None, list[pulumi.Resource]]:
        """Create the placement group if the stack has one, and grant the control plane its roles on the placement."""
        reservation = self._settings.gpu.reservation_id
        roles: list[pulumi.Resource] = []
        if reservation:
            roles.append(self._grant("reservation", Role.CONTRIBUTOR, reservation))
        if not self._settings.proximity_placement:
            return None, roles
        zones = self._settings.zones
        sizes = compute.ProximityPlacementGroupPropertiesIntentArgs(vm_sizes=[self._settings.gpu.instance_type])
        group = compute.ProximityPlacementGroup(
            f"{self._name}-placement",
            resource_group_name=self._network.resource_group.name,
            proximity_placement_group_type="Standard",
            # Azure accepts an intent only together with a zone.
            intent=sizes if zones else None,
            zones=zones,
            tags=self._settings.labels,
            opts=self._child,
        )
        roles.append(self._grant("placement", Role.CONTRIBUTOR, group.id))
        return group.id, roles

    def _create_gpu_pool(self) -> containerservice.AgentPool:
        """Create the autoscaled GPU pool: one scale set, hence one InfiniBand network."""
        settings, spot = self._settings, self._settings.interruptible
        placement, roles = self._create_placement()
        bounds = settings.num_min_nodes, settings.gpu.nodes.max
        return containerservice.AgentPool(
            f"{self._name}-gpu",
            agent_pool_name=_GPU_POOL,
            resource_group_name=self._network.resource_group.name,
            resource_name_=self.managed.name,
            mode="User",
            type="VirtualMachineScaleSets",
            # Without it the pool would keep its version when the control plane is upgraded.
            orchestrator_version=settings.cluster.kubernetes_version,
            vm_size=settings.gpu.instance_type,
            os_type="Linux",
            os_sku="Ubuntu",
            # The images of the trainer and of the driver take gigabytes each.
            os_disk_size_gb=256,
            gpu_profile=containerservice.GPUProfileArgs(driver="Install" if settings.driver == "aks" else "None"),
            enable_auto_scaling=True,
            count=live.num_nodes(bounds, _GPU_POOL, settings.stack, self._network.resource_group.name, self.managed),
            min_count=bounds[0],
            max_count=bounds[1],
            node_labels=dict(GPU_LABEL) | (_SPOT_LABEL if spot else {}),
            node_taints=[f"{taint.key}={taint.value}:{taint.effect}" for taint in taints(settings)],
            availability_zones=settings.zones,
            capacity_reservation_group_id=settings.gpu.reservation_id,
            proximity_placement_group_id=placement,
            scale_set_priority="Spot" if spot else "Regular",
            scale_set_eviction_policy="Delete" if spot else None,
            # -1: pay up to the on-demand price, so that nodes are evicted only for capacity.
            spot_max_price=-1.0 if spot else None,
            upgrade_settings=None if spot else upgrades.without_surge(),
            vnet_subnet_id=self._network.nodes.id,
            enable_encryption_at_host=settings.kubernetes.host_encryption,
            enable_node_public_ip=False,
            tags=settings.labels | _scale_from_zero_tags(settings.devices),
            opts=pulumi.ResourceOptions(parent=self, depends_on=roles),
        )

    def _build_kubeconfig(self) -> pulumi.Output[str]:
        """Return Azure's kubeconfig with a call of kubelogin instead of credentials."""
        credentials = containerservice.list_managed_cluster_user_credentials_output(
            resource_group_name=self._network.resource_group.name,
            resource_name=self.managed.name,
            opts=pulumi.InvokeOutputOptions(parent=self, depends_on=[self.managed]),
        )
        login = self._settings.kubernetes.login
        return pulumi.Output.secret(credentials.apply(lambda result: keyless(result.kubeconfigs[0].value, login)))


def taints(settings: Settings) -> tuple[Toleration, ...]:
    """Return the taints of the GPU pool, which its pods tolerate."""
    return (GPU_TAINT, SPOT_TAINT) if settings.interruptible else (GPU_TAINT,)


def keyless(kubeconfig: str, login: str) -> str:
    """Replace the credentials of a base64-encoded kubeconfig by a call of kubelogin."""
    document = yaml.safe_load(base64.b64decode(kubeconfig))
    exec_plugin = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "kubelogin",
        "args": ["get-token", "--login", login, "--server-id", _AKS_SERVER_ID],
        "installHint": "az aks install-cli",
        "provideClusterInfo": False,
    }
    users = [{"name": user["name"], "user": {"exec": exec_plugin}} for user in document["users"]]
    return yaml.safe_dump({**document, "users": users}, sort_keys=True)


def _security_profile(key: str | None) -> containerservice.ManagedClusterSecurityProfileArgs:
    """Return workload identity, removal of unused images, and encryption of secrets with the stack's key if any."""
    kms = containerservice.AzureKeyVaultKmsArgs(enabled=True, key_id=key, key_vault_network_access="Public")
    return containerservice.ManagedClusterSecurityProfileArgs(
        workload_identity=containerservice.ManagedClusterSecurityProfileWorkloadIdentityArgs(enabled=True),
        image_cleaner=containerservice.ManagedClusterSecurityProfileImageCleanerArgs(enabled=True, interval_hours=168),
        azure_key_vault_kms=kms if key else None,
    )


def _api_server_access(
    authorized: Sequence[str], outbound: pulumi.Output[str]
) -> containerservice.ManagedClusterAPIServerAccessProfileArgs:
    """Return a private API server, or a public one restricted to the authorized ranges: AKS offers nothing else.

    Nodes reach a public API server from the address of their NAT gateway, which AKS does not authorize by itself
    (MicrosoftDocs/azure-docs#111834).
    """
    return containerservice.ManagedClusterAPIServerAccessProfileArgs(
        authorized_ip_ranges=[*authorized, outbound] if authorized else None,
        enable_private_cluster=not authorized,
        enable_private_cluster_public_fqdn=None if authorized else False,
        disable_run_command=True,
    )


def _network_profile(settings: Settings) -> containerservice.ContainerServiceNetworkProfileArgs:
    """Return the pod overlay with Cilium and the outbound NAT gateway."""
    services = settings.network.services_cidr
    return containerservice.ContainerServiceNetworkProfileArgs(
        network_plugin="azure",
        network_plugin_mode="overlay",
        network_dataplane="cilium",
        network_policy="cilium",
        load_balancer_sku="standard",
        outbound_type="userAssignedNATGateway",
        pod_cidr=settings.network.pods_cidr,
        service_cidr=services,
        dns_service_ip=dns_address(services),
    )


def dns_address(services: str) -> str:
    """Return the tenth address of the services' range, where AKS's own examples put DNS."""
    return str(IPv4Network(services)[10])


def _scale_from_zero_tags(devices: Mapping[str, int]) -> dict[str, str]:
    """Return the tags from which the autoscaler learns the devices of a node that does not exist yet.

    AKS copies the tags of a pool to its scale set. The autoscaler knows GPUs by the size of the machine, and other
    devices only from these tags, in which `_` stands for `/` (cluster-autoscaler, azure_template.go).
    """
    prefix = "k8s.io_cluster-autoscaler_node-template_resources_"
    return {prefix + name.replace("/", "_"): str(count) for name, count in devices.items()}


def _kubelet_id(
    profile: Mapping[str, containerservice.outputs.UserAssignedIdentityManagedClusterResponse] | None,
) -> str:
    """Return the object id of the nodes' identity."""
    identity = (profile or {}).get("kubeletidentity")
    assert identity, "AKS gives every cluster an identity for its nodes"
    assert identity.object_id, "an identity has an object id"
    return identity.object_id


def _issuer_url(profile: containerservice.outputs.ManagedClusterOIDCIssuerProfileResponse | None) -> str:
    """Return the URL of the cluster's OIDC issuer."""
    assert profile, "the cluster has an OIDC issuer"
    return profile.issuer_url
