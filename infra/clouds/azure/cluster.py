"""AKS: the control plane and who administers it, the system pool, the GPU pool, the Kubernetes provider."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network

import pulumi
import pulumi_kubernetes as k8s
import yaml
from pulumi_azure_native import authorization, compute, containerservice, managedidentity

from infra.clouds.azure.network import PrivateNetwork
from infra.clouds.azure.settings import Settings, physical_name
from infra.contract import GPU_LABEL, GPU_TAINT, Toleration

#: AKS puts this taint and this label on every spot pool. Both are stated, or each refresh would find a difference.
SPOT_TAINT = Toleration("kubernetes.azure.com/scalesetpriority", "spot")
_SPOT_LABEL = {"kubernetes.azure.com/scalesetpriority": "spot"}

#: The application that every AKS cluster's log-in is meant for, the same in all tenants (AKS, kubelogin documentation).
_AKS_SERVER_ID = "6dae42f8-4368-4678-94ff-3960e28e3630"

_SCHEDULES = ("aksManagedAutoUpgradeSchedule", "aksManagedNodeOSUpgradeSchedule")


class Role(StrEnum):
    """Built-in roles, by the identifiers that are the same in every tenant (Azure built-in roles)."""

    ACR_PULL = "7f951dda-4ed3-4680-a7ca-43fe172d538d"
    ACR_PUSH = "8311e382-0749-4cb8-b61a-304f252e45ec"
    AI_NETWORK_APPROVER = "b556d68e-0be0-4f35-a333-ad7ee1ce17ea"
    AKS_CLUSTER_ADMIN = "b1ff04bb-8a4e-4dc4-8eb5-8693973ce19b"
    APPLICATION_INSIGHTS_CONTRIBUTOR = "ae349356-3a1b-4a5e-921d-050484c6347e"
    BLOB_CONTRIBUTOR = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
    CONTRIBUTOR = "b24988ac-6180-42a0-ab88-20f7382dd24c"
    GRAFANA_ADMIN = "22926164-76b3-42b3-bc55-97df8dab3e41"
    KEY_VAULT_CONTRIBUTOR = "f25e0fa2-a7c8-4377-a976-54943a77a395"
    KEY_VAULT_ADMINISTRATOR = "00482a5a-887f-4fb3-b363-3b7fe8e74483"
    KEY_USER = "12338af0-0e69-4776-bea7-57ae08d297de"
    MONITORING_DATA_READER = "b0d8363b-8ddd-447d-831f-62ca05bff136"
    STORAGE_ACCOUNT_CONTRIBUTOR = "17d1049b-9a84-46fb-8f53-869881c3d3ab"
    NETWORK_CONTRIBUTOR = "4d97b98b-1d4f-4787-a291-c67834d212e7"


#: Entra's object id, and its kind where it is known.
Principal = tuple[pulumi.Input[str], str | None]


@dataclass(frozen=True)
class Principals:
    """Who uses the registry: machines pull, people push."""

    kubelet_id: pulumi.Output[str]
    administrators: Mapping[str, Principal]


def grant(
    name: str,
    role: Role,
    scope: pulumi.Input[str],
    principal: pulumi.Input[str],
    kind: str | None,
    opts: pulumi.ResourceOptions,
) -> authorization.RoleAssignment:
    """A role on exactly one resource; naming the kind of principal spares Azure a look-up that a new one fails."""
    return authorization.RoleAssignment(
        name,
        role_definition_id=f"/providers/Microsoft.Authorization/roleDefinitions/{role}",
        scope=scope,
        principal_id=principal,
        principal_type=kind,
        opts=opts,
    )


class AksCluster(pulumi.ComponentResource):
    """A cluster without local accounts: people come with Entra, pods with federated identities.

    Pods get addresses from an overlay, since a node may run many and the VNet's addresses stay for nodes; Cilium is its
    data plane and enforces network policies. NFS and InfiniBand pass the overlay by: the node mounts the one and the
    device plugin hands out the other.
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
        super().__init__("torchrec-cloud:azure:Cluster", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        self._identity = managedidentity.UserAssignedIdentity(
            f"{name}-identity", resource_group_name=network.resource_group.name, tags=settings.labels, opts=self._child
        )
        self.administrators = administrators(settings.kubernetes.admin_group_ids, self._child)
        self.managed = self._control_plane(self._before_control_plane())
        self._schedules()
        self.gpu_pool = self._gpu_pool()
        self.kubelet_id = self.managed.identity_profile.apply(_kubelet)
        self.issuer = self.managed.oidc_issuer_profile.apply(_issuer)
        self.kubeconfig = self._kubeconfig()
        self.provider = self._kubernetes()
        self.register_outputs({"name": self.managed.name, "kubeconfig": self.kubeconfig})

    @property
    def principals(self) -> Principals:
        """Who uses the cluster's registry."""
        return Principals(self.kubelet_id, self.administrators)

    def _grant(self, what: str, role: Role, scope: pulumi.Input[str]) -> authorization.RoleAssignment:
        """A role for the control plane's own identity."""
        principal = self._identity.principal_id
        return grant(f"{self._name}-{what}", role, scope, principal, "ServicePrincipal", self._child)

    def _before_control_plane(self) -> list[pulumi.Resource]:
        """The identity joins nodes to its subnet, and unwraps secrets where the stack has a key of its own."""
        needed: list[pulumi.Resource] = [
            self._grant("network", Role.NETWORK_CONTRIBUTOR, self._network.nodes.id),
        ]
        wanted = self._settings.kubernetes
        if wanted.kms_key_id and wanted.kms_vault_id:
            key = wanted.kms_key_id.split("/keys/")[1].split("/")[0]
            needed.append(self._grant("key", Role.KEY_USER, f"{wanted.kms_vault_id}/keys/{key}"))
        return needed

    def _control_plane(self, after: Sequence[pulumi.Resource]) -> containerservice.ManagedCluster:
        settings, wanted = self._settings, self._settings.kubernetes
        monitored = containerservice.ManagedClusterAzureMonitorProfileMetricsArgs(enabled=settings.monitoring.managed)
        return containerservice.ManagedCluster(
            f"{self._name}-aks",
            resource_group_name=self._network.resource_group.name,
            dns_prefix=self._network.resource_group.id.apply(lambda group: physical_name(settings.stack, group, 54)),
            kubernetes_version=wanted.version,
            sku=containerservice.ManagedClusterSKUArgs(name="Base", tier="Standard"),
            identity=containerservice.ManagedClusterIdentityArgs(
                type=containerservice.ResourceIdentityType.USER_ASSIGNED,
                user_assigned_identities=[self._identity.id],
            ),
            enable_rbac=True,
            disable_local_accounts=True,
            aad_profile=containerservice.ManagedClusterAADProfileArgs(
                managed=True, enable_azure_rbac=True, admin_group_object_ids=list(wanted.admin_group_ids)
            ),
            oidc_issuer_profile=containerservice.ManagedClusterOIDCIssuerProfileArgs(enabled=True),
            security_profile=_security(wanted.kms_key_id),
            api_server_access_profile=_access(settings.network.authorized_cidrs),
            network_profile=_pod_network(settings),
            agent_pool_profiles=[self._system_pool()],
            auto_upgrade_profile=containerservice.ManagedClusterAutoUpgradeProfileArgs(
                upgrade_channel="patch", node_os_upgrade_channel="NodeImage"
            ),
            azure_monitor_profile=containerservice.ManagedClusterAzureMonitorProfileArgs(metrics=monitored),
            tags=settings.labels,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after)),
        )

    def _system_pool(self) -> containerservice.ManagedClusterAgentPoolProfileArgs:
        """The one pool that belongs to the control plane's own resource: AKS makes no cluster without it."""
        wanted = self._settings.system
        return containerservice.ManagedClusterAgentPoolProfileArgs(
            name="system",
            mode="System",
            type="VirtualMachineScaleSets",
            vm_size=wanted.instance_type,
            count=wanted.num_nodes,
            os_type="Linux",
            os_sku="Ubuntu",
            vnet_subnet_id=self._network.nodes.id,
            enable_encryption_at_host=self._settings.kubernetes.host_encryption,
            enable_node_public_ip=False,
            tags=self._settings.labels,
        )

    def _schedules(self) -> None:
        """Upgrades drain nodes, and so interrupt training: Sunday night (UTC), four hours."""
        sunday = containerservice.ScheduleArgs(
            weekly=containerservice.WeeklyScheduleArgs(day_of_week=containerservice.WeekDay.SUNDAY, interval_weeks=1)
        )
        for schedule in _SCHEDULES:
            containerservice.MaintenanceConfiguration(
                f"{self._name}-{schedule}",
                config_name=schedule,
                resource_group_name=self._network.resource_group.name,
                resource_name_=self.managed.name,
                maintenance_window=containerservice.MaintenanceWindowArgs(
                    schedule=sunday, duration_hours=4, start_time="00:00", utc_offset="+00:00"
                ),
                opts=self._child,
            )

    def _placement(self) -> tuple[pulumi.Output[str] | None, list[pulumi.Resource]]:
        """The placement group, if any, and the control plane's role on whatever the nodes are placed in."""
        reservation = self._settings.gpu.reservation_id
        after: list[pulumi.Resource] = []
        if reservation:
            after.append(self._grant("reservation", Role.CONTRIBUTOR, reservation))
        if not self._settings.proximity_placement:
            return None, after
        zones = self._settings.zones
        sizes = compute.ProximityPlacementGroupPropertiesIntentArgs(vm_sizes=[self._settings.gpu.instance_type])
        group = compute.ProximityPlacementGroup(
            f"{self._name}-placement",
            resource_group_name=self._network.resource_group.name,
            proximity_placement_group_type="Standard",
            # Azure takes an intent only together with a zone.
            intent=sizes if zones else None,
            zones=zones,
            tags=self._settings.labels,
            opts=self._child,
        )
        after.append(self._grant("placement", Role.CONTRIBUTOR, group.id))
        return group.id, after

    def _gpu_pool(self) -> containerservice.AgentPool:
        settings, spot = self._settings, self._settings.interruptible
        placement, after = self._placement()
        return containerservice.AgentPool(
            f"{self._name}-gpu",
            agent_pool_name="gpu",
            resource_group_name=self._network.resource_group.name,
            resource_name_=self.managed.name,
            mode="User",
            type="VirtualMachineScaleSets",
            vm_size=settings.gpu.instance_type,
            os_type="Linux",
            os_sku="Ubuntu",
            # The trainer's image and the driver's are gigabytes each.
            os_disk_size_gb=256,
            gpu_profile=containerservice.GPUProfileArgs(driver="Install" if settings.driver == "aks" else "None"),
            enable_auto_scaling=True,
            count=settings.gpu.nodes.desired,
            min_count=settings.gpu.nodes.min,
            max_count=settings.gpu.nodes.max,
            node_labels=dict(GPU_LABEL) | (_SPOT_LABEL if spot else {}),
            node_taints=[f"{taint.key}={taint.value}:{taint.effect}" for taint in taints(settings)],
            availability_zones=settings.zones,
            capacity_reservation_group_id=settings.gpu.reservation_id,
            proximity_placement_group_id=placement,
            scale_set_priority="Spot" if spot else "Regular",
            scale_set_eviction_policy="Delete" if spot else None,
            # -1: up to the on-demand price, so a node goes only when its capacity is needed.
            spot_max_price=-1.0 if spot else None,
            upgrade_settings=_upgrade_in_place() if not spot else None,
            vnet_subnet_id=self._network.nodes.id,
            enable_encryption_at_host=settings.kubernetes.host_encryption,
            enable_node_public_ip=False,
            tags=settings.labels,
            # `count` is where the pool starts; the autoscaler has it from then on.
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after), ignore_changes=["count"]),
        )

    def _kubeconfig(self) -> pulumi.Output[str]:
        """The cluster's address and authority as Azure gives them, with a log-in instead of any credential."""
        found = containerservice.list_managed_cluster_user_credentials_output(
            resource_group_name=self._network.resource_group.name,
            resource_name=self.managed.name,
            opts=pulumi.InvokeOutputOptions(parent=self, depends_on=[self.managed]),
        )
        login = self._settings.kubernetes.login
        return pulumi.Output.secret(found.apply(lambda answer: keyless(answer.kubeconfigs[0].value, login)))

    def _kubernetes(self) -> k8s.Provider:
        """Usable once an administrator's role is there, and until it is gone."""
        roles = [
            grant(f"{self._name}-admin-{who}", Role.AKS_CLUSTER_ADMIN, self.managed.id, principal, kind, self._child)
            for who, (principal, kind) in self.administrators.items()
        ]
        opts = pulumi.ResourceOptions(parent=self, depends_on=list(roles))
        return k8s.Provider(f"{self._name}-k8s", kubeconfig=self.kubeconfig, opts=opts)


def administrators(groups: Sequence[str], opts: pulumi.ResourceOptions) -> dict[str, Principal]:
    """The groups that were named, or whoever runs the program, by a word for logical names."""
    if groups:
        return {group.partition("-")[0]: (group, "Group") for group in groups}
    client = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=opts.parent))
    return {"caller": (client.apply(lambda caller: caller.object_id), None)}


def taints(settings: Settings) -> tuple[Toleration, ...]:
    """The GPU pool's taints, which are what its pods tolerate."""
    return (GPU_TAINT, SPOT_TAINT) if settings.interruptible else (GPU_TAINT,)


def keyless(kubeconfig: str, login: str) -> str:
    """A kubeconfig (base64, as the API answers) whose users are nothing but a call of kubelogin."""
    document = yaml.safe_load(base64.b64decode(kubeconfig))
    call = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "kubelogin",
        "args": ["get-token", "--login", login, "--server-id", _AKS_SERVER_ID],
        "installHint": "az aks install-cli",
        "provideClusterInfo": False,
    }
    users = [{"name": user["name"], "user": {"exec": call}} for user in document["users"]]
    return yaml.safe_dump({**document, "users": users}, sort_keys=True)


def _security(key: str | None) -> containerservice.ManagedClusterSecurityProfileArgs:
    """Federated identities for pods, unused images removed, secrets under the stack's key where it has one."""
    kms = containerservice.AzureKeyVaultKmsArgs(enabled=True, key_id=key, key_vault_network_access="Public")
    return containerservice.ManagedClusterSecurityProfileArgs(
        workload_identity=containerservice.ManagedClusterSecurityProfileWorkloadIdentityArgs(enabled=True),
        image_cleaner=containerservice.ManagedClusterSecurityProfileImageCleanerArgs(enabled=True, interval_hours=168),
        azure_key_vault_kms=kms if key else None,
    )


def _access(authorized: Sequence[str]) -> containerservice.ManagedClusterAPIServerAccessProfileArgs:
    """A private API server, or a public one for the ranges given: AKS has no third way."""
    return containerservice.ManagedClusterAPIServerAccessProfileArgs(
        authorized_ip_ranges=list(authorized) or None,
        enable_private_cluster=not authorized,
        enable_private_cluster_public_fqdn=None if authorized else False,
        disable_run_command=True,
    )


def _pod_network(settings: Settings) -> containerservice.ContainerServiceNetworkProfileArgs:
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
        dns_service_ip=dns_service(services),
    )


def dns_service(services: str) -> str:
    """The tenth address of the services' range, where AKS's own examples put DNS."""
    return str(IPv4Network(services)[10])


def _upgrade_in_place() -> containerservice.AgentPoolUpgradeSettingsArgs:
    """One node at a time and none in addition: a spare GPU node costs quota that few have. Spot pools take no such key.

    Thirty minutes to drain are more than a checkpoint on SIGTERM needs.
    """
    return containerservice.AgentPoolUpgradeSettingsArgs(
        max_surge="0", max_unavailable="1", drain_timeout_in_minutes=30
    )


def _kubelet(
    profile: Mapping[str, containerservice.outputs.UserAssignedIdentityManagedClusterResponse] | None,
) -> str:
    found = (profile or {}).get("kubeletidentity")
    assert found, "AKS gives every cluster an identity for its nodes"
    assert found.object_id, "an identity has an object id"
    return found.object_id


def _issuer(profile: containerservice.outputs.ManagedClusterOIDCIssuerProfileResponse | None) -> str:
    assert profile, "the issuer was asked for"
    return profile.issuer_url
