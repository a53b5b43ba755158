"""The GKE cluster: encryption key, service account of the nodes, control plane, kubeconfig and provider."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import get_args

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as k8s
import yaml

from infra.clouds.gcp import monitoring
from infra.clouds.gcp.network import PODS, SERVICES, Network
from infra.clouds.gcp.nodes import SCOPES, NodePools
from infra.clouds.gcp.settings import MAX_PODS_PER_NODE, Settings, account_id
from infra.clouds.gcp.versions import CHANNEL, UNTIL_END_OF_SUPPORT, Maintenance
from infra.config.maintenance import Day

#: The only project-wide role of a node: writing logs and metrics. Images and buckets are granted one by one.
_NODE_ROLE = "roles/container.defaultNodeServiceAccount"
_KEY_ROLE = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
_KEY_ROTATION = f"{90 * 24 * 3600}s"

#: A Monday. The date of a recurring window only anchors its time, and must be the same in each `up`.
_ANCHOR = date(2024, 1, 1)
#: The control plane's patches stay allowed: they interrupt no training.
_NO_NODE_UPGRADES = "NO_MINOR_OR_NODE_UPGRADES"


class Cluster(pulumi.ComponentResource):
    """A private GKE cluster and the Kubernetes provider that reaches it.

    `node_account` is the service account of the nodes, `workload_pool` the namespace of Kubernetes identities.
    Operators wait for `system_nodes`, jobs for `gpu_nodes`.
    """

    name: pulumi.Output[str]
    kubeconfig: pulumi.Output[str]
    provider: k8s.Provider
    node_account: gcp.serviceaccount.Account
    workload_pool: str
    control_plane: gcp.container.Cluster
    system_nodes: gcp.container.NodePool
    gpu_nodes: gcp.container.NodePool

    def __init__(
        self, name: str, settings: Settings, network: Network, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        """Create identity and key, the control plane, its node pools, then the Kubernetes provider."""
        super().__init__("torchrec-cloud:gcp:Cluster", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        self.workload_pool = f"{settings.gcp_project}.svc.id.goog"
        self.node_account, node_role = self._create_node_account()
        key, key_role = self._create_key()
        self.control_plane = self._create_control_plane(key, [node_role, key_role, *network.nat, *network.firewalls])
        pools = NodePools(name, settings, network, self.control_plane, self.node_account, self)
        self.system_nodes = pools.create_system_pool()
        self.gpu_nodes = pools.create_gpu_pool()
        self.name = self.control_plane.name
        self.kubeconfig = pulumi.Output.secret(self._build_kubeconfig())
        self.provider = self._create_kubernetes_provider()
        self.register_outputs({"name": self.name, "kubeconfig": self.kubeconfig})

    def _create_node_account(self) -> tuple[gcp.serviceaccount.Account, gcp.projects.IAMMember]:
        """Create a service account for nodes: the project's default account may edit the whole project."""
        account = gcp.serviceaccount.Account(
            f"{self._name}-nodes",
            account_id=account_id(self._settings, "nodes"),
            display_name=f"GKE nodes of {self._settings.stack}",
            opts=self._child,
        )
        role = gcp.projects.IAMMember(
            f"{self._name}-nodes-role",
            project=self._settings.gcp_project,
            role=_NODE_ROLE,
            member=account.member,
            opts=self._child,
        )
        return account, role

    def _create_key(self) -> tuple[gcp.kms.CryptoKey, gcp.kms.CryptoKeyIAMMember]:
        """Create the encryption key of Kubernetes secrets, which only GKE may use.

        A key ring cannot be deleted. Pulumi generates its name, so that a stack created again does not collide with it.
        """
        ring = gcp.kms.KeyRing(f"{self._name}-keys", location=self._settings.region, opts=self._child)
        key = gcp.kms.CryptoKey(
            f"{self._name}-secrets",
            key_ring=ring.id,
            rotation_period=_KEY_ROTATION,
            labels=self._settings.labels,
            opts=self._child,
        )
        agent = gcp.projects.ServiceIdentity(
            f"{self._name}-agent",
            project=self._settings.gcp_project,
            service="container.googleapis.com",
            opts=self._child,
        )
        role = gcp.kms.CryptoKeyIAMMember(
            f"{self._name}-secrets-role", crypto_key_id=key.id, role=_KEY_ROLE, member=agent.member, opts=self._child
        )
        return key, role

    def _create_control_plane(
        self, key: gcp.kms.CryptoKey, depends_on: Sequence[pulumi.Resource]
    ) -> gcp.container.Cluster:
        """Create a private control plane without a default node pool."""
        settings, existing = self._settings, self._settings.network.existing
        opts = pulumi.ResourceOptions(
            parent=self,
            depends_on=list(depends_on),
            # Two control planes cannot use the same range.
            delete_before_replace=True,
            # The required default pool is removed at once; its configuration must not replace the cluster later.
            ignore_changes=["nodeConfig"],
        )
        return gcp.container.Cluster(
            self._name,
            location=settings.cluster_location,
            node_locations=[settings.zone] if settings.cluster.location == "regional" else None,
            # With protection the provider refuses `pulumi destroy`.
            deletion_protection=False,
            release_channel=gcp.container.ClusterReleaseChannelArgs(channel=CHANNEL),
            min_master_version=settings.cluster.kubernetes_version,
            maintenance_policy=maintenance_policy(settings.maintenance),
            remove_default_node_pool=True,
            initial_node_count=1,
            node_config=self._default_pool_config(),
            network=self._network.vpc.id,
            subnetwork=self._network.subnet.id,
            networking_mode="VPC_NATIVE",
            ip_allocation_policy=gcp.container.ClusterIpAllocationPolicyArgs(
                cluster_secondary_range_name=existing.pods_range if existing else PODS,
                services_secondary_range_name=existing.services_range if existing else SERVICES,
            ),
            default_max_pods_per_node=MAX_PODS_PER_NODE,
            datapath_provider="ADVANCED_DATAPATH",
            enable_multi_networking=settings.tcpx,
            private_cluster_config=self._private_cluster_config(),
            master_authorized_networks_config=self._authorized_networks(),
            control_plane_endpoints_config=self._dns_endpoint_config(),
            enable_shielded_nodes=True,
            workload_identity_config=gcp.container.ClusterWorkloadIdentityConfigArgs(workload_pool=self.workload_pool),
            database_encryption=gcp.container.ClusterDatabaseEncryptionArgs(state="ENCRYPTED", key_name=key.id),
            addons_config=_addons_config(),
            monitoring_config=monitoring.metrics_config(),
            logging_config=monitoring.logging_config(),
            resource_labels=settings.labels,
            opts=opts,
        )

    def _default_pool_config(self) -> gcp.container.ClusterNodeConfigArgs:
        """Return the default pool's configuration, without the project's default account, which may not exist."""
        return gcp.container.ClusterNodeConfigArgs(
            machine_type=self._settings.system.instance_type,
            service_account=self.node_account.email,
            oauth_scopes=SCOPES,
            shielded_instance_config=gcp.container.ClusterNodeConfigShieldedInstanceConfigArgs(enable_secure_boot=True),
        )

    def _private_cluster_config(self) -> gcp.container.ClusterPrivateClusterConfigArgs:
        """Return nodes without public addresses, and a public API address only if ranges are authorized to use it."""
        net = self._settings.network
        return gcp.container.ClusterPrivateClusterConfigArgs(
            enable_private_nodes=True,
            enable_private_endpoint=not net.authorized_cidrs,
            master_ipv4_cidr_block=net.control_plane_cidr,
        )

    def _authorized_networks(self) -> gcp.container.ClusterMasterAuthorizedNetworksConfigArgs:
        """Return the ranges that may use the API; an empty list admits nodes, not Google Cloud's public addresses."""
        return gcp.container.ClusterMasterAuthorizedNetworksConfigArgs(
            cidr_blocks=[
                gcp.container.ClusterMasterAuthorizedNetworksConfigCidrBlockArgs(cidr_block=cidr)
                for cidr in self._settings.network.authorized_cidrs
            ],
            gcp_public_cidrs_access_enabled=False,
        )

    def _dns_endpoint_config(self) -> gcp.container.ClusterControlPlaneEndpointsConfigArgs:
        """Return whether the API can be reached by name from outside the VPC."""
        return gcp.container.ClusterControlPlaneEndpointsConfigArgs(
            dns_endpoint_config=gcp.container.ClusterControlPlaneEndpointsConfigDnsEndpointConfigArgs(
                allow_external_traffic=self._settings.network.dns_endpoint
            )
        )

    def _build_kubeconfig(self) -> pulumi.Output[str]:
        """Return a kubeconfig for the DNS endpoint if it is enabled, else for the public or private address.

        The DNS endpoint's certificate is publicly trusted, the address has one of the cluster's own authority.
        """
        plane = self.control_plane
        dns = plane.control_plane_endpoints_config.dns_endpoint_config
        server = dns.apply(lambda config: config.endpoint if config else None)
        authority = plane.master_auth.cluster_ca_certificate
        if self._settings.network.dns_endpoint:
            return pulumi.Output.all(plane.name, server).apply(lambda facts: kubeconfig(facts[0], facts[1], None))
        return pulumi.Output.all(plane.name, plane.endpoint, authority).apply(
            lambda facts: kubeconfig(facts[0], facts[1], facts[2])
        )

    def _create_kubernetes_provider(self) -> k8s.Provider:
        """Create a provider whose objects are deleted before the system nodes.

        Without its metrics server, which runs on them, a cluster cannot delete a namespace.
        """
        opts = pulumi.ResourceOptions(parent=self, depends_on=[self.system_nodes])
        # Without the identifier another way to the same API server would replace every object in the cluster:
        # https://github.com/pulumi/pulumi-kubernetes/blob/master/provider/pkg/provider/provider.go (DiffConfig)
        identifier = self.control_plane.id
        return k8s.Provider(f"{self._name}-k8s", kubeconfig=self.kubeconfig, cluster_identifier=identifier, opts=opts)


def kubeconfig(name: str, server: str, authority: str | None) -> str:
    """Return a kubeconfig that requests a short-lived token at each use and contains no secret.

    `authority` is the cluster's CA certificate in base64, None if the server's certificate is publicly trusted.
    """
    plugin = "gke-gcloud-auth-plugin"
    user = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": plugin,
        "installHint": f"gcloud components install {plugin}",
        "interactiveMode": "IfAvailable",
        "provideClusterInfo": True,
    }
    cluster = {"server": f"https://{server}"} | ({"certificate-authority-data": authority} if authority else {})
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"exec": user}}],
    }
    return yaml.safe_dump(document, sort_keys=True)


def _addons_config() -> gcp.container.ClusterAddonsConfigArgs:
    """Return the CSI drivers and no ingress controller, whose load balancers would outlive the cluster."""
    return gcp.container.ClusterAddonsConfigArgs(
        gcp_filestore_csi_driver_config=gcp.container.ClusterAddonsConfigGcpFilestoreCsiDriverConfigArgs(enabled=True),
        gce_persistent_disk_csi_driver_config=gcp.container.ClusterAddonsConfigGcePersistentDiskCsiDriverConfigArgs(
            enabled=True
        ),
        http_load_balancing=gcp.container.ClusterAddonsConfigHttpLoadBalancingArgs(disabled=True),
    )


def maintenance_policy(maintenance: Maintenance) -> gcp.container.ClusterMaintenancePolicyArgs:
    """Return the window and the exclusions as the GKE API returns them: another spelling is a difference at each `up`.

    The last exclusion, without an end, lasts until the version's end of support.
    """
    day = _ANCHOR + timedelta(days=get_args(Day).index(maintenance.day))
    start = datetime.fromisoformat(f"{day}T{maintenance.start}")
    exclusions = [
        _exclusion(one.name, one.start, end_time=_midnight(one.end + timedelta(days=1)))
        for one in maintenance.exclusions
    ]
    if not maintenance.automatic:
        exclusions.append(_exclusion(UNTIL_END_OF_SUPPORT, _ANCHOR, end_time=None))
    return gcp.container.ClusterMaintenancePolicyArgs(
        recurring_window=gcp.container.ClusterMaintenancePolicyRecurringWindowArgs(
            start_time=f"{start.isoformat()}Z",
            end_time=f"{(start + timedelta(hours=maintenance.hours)).isoformat()}Z",
            recurrence=f"FREQ=WEEKLY;BYDAY={maintenance.day[:2].upper()}",
        ),
        maintenance_exclusions=exclusions,
    )


def _exclusion(
    name: str, start: date, end_time: str | None
) -> gcp.container.ClusterMaintenancePolicyMaintenanceExclusionArgs:
    """Return a period in which GKE upgrades neither the minor version nor the nodes."""
    return gcp.container.ClusterMaintenancePolicyMaintenanceExclusionArgs(
        exclusion_name=name,
        start_time=_midnight(start),
        end_time=end_time,
        exclusion_options=gcp.container.ClusterMaintenancePolicyMaintenanceExclusionExclusionOptionsArgs(
            scope=_NO_NODE_UPGRADES, end_time_behavior=None if end_time else "UNTIL_END_OF_SUPPORT"
        ),
    )


def _midnight(day: date) -> str:
    """Return the start of a day in UTC."""
    return f"{day}T00:00:00Z"
