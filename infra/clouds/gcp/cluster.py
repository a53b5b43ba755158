"""The GKE cluster: its key, its nodes' identity, the control plane, a system pool and the accelerator pool."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as k8s
import yaml

from infra.clouds.gcp import monitoring
from infra.clouds.gcp.network import PODS, SERVICES, Network
from infra.clouds.gcp.settings import MAX_FLEX_START_HOURS, MAX_PODS_PER_NODE, Settings
from infra.contract import GPU_LABEL, GPU_TAINT, Toleration

#: Spot nodes carry this taint; GKE labels them itself, but puts no taint on a pool that somebody else made.
SPOT_TAINT = Toleration("cloud.google.com/gke-spot", "true")

#: The newest driver of the node image: CUDA 13 needs 580 or later. It is not a key, because a change replaces the pool.
GPU_DRIVER = "LATEST"

#: Local disks that come with a type and must be named, else GKE leaves them unused.
_NUM_LOCAL_SSDS = {"a2-ultragpu-8g": 8, "a3-highgpu-8g": 16}

#: The one role that a node needs by itself: writing logs and metrics. Images and buckets are granted one by one.
_NODE_ROLE = "roles/container.defaultNodeServiceAccount"
_KEY_ROLE = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_KEY_ROTATION = f"{90 * 24 * 3600}s"
_SYSTEM_DISK_GIB = 100


class Cluster(pulumi.ComponentResource):
    """A private GKE cluster and the Kubernetes provider that reaches it.

    `node_account` is who the nodes are, `workload_pool` the name space of Kubernetes identities;
    `system_nodes` and `gpu_nodes` are what operators and jobs wait for.
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
        super().__init__("torchrec-cloud:gcp:Cluster", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        self.workload_pool = f"{settings.gcp_project}.svc.id.goog"
        self.node_account, granted = self._nodes_identity()
        key, key_granted = self._key()
        self.control_plane = self._control_plane(key, [granted, key_granted, network.nat])
        self.system_nodes = self._system_pool()
        self.gpu_nodes = self._gpu_pool()
        self.name = self.control_plane.name
        self.kubeconfig = pulumi.Output.secret(self._kubeconfig())
        self.provider = self._kubernetes_provider()
        self.register_outputs({"name": self.name, "kubeconfig": self.kubeconfig})

    def _nodes_identity(self) -> tuple[gcp.serviceaccount.Account, gcp.projects.IAMMember]:
        """An account of the nodes' own: the project's default one may edit everything in it."""
        account = gcp.serviceaccount.Account(
            f"{self._name}-nodes",
            account_id=account_id(self._settings, "nodes"),
            display_name=f"GKE nodes of {self._settings.stack}",
            opts=self._child,
        )
        granted = gcp.projects.IAMMember(
            f"{self._name}-nodes-role",
            project=self._settings.gcp_project,
            role=_NODE_ROLE,
            member=account.member,
            opts=self._child,
        )
        return account, granted

    def _key(self) -> tuple[gcp.kms.CryptoKey, gcp.kms.CryptoKeyIAMMember]:
        """The key of Kubernetes secrets, usable by GKE alone.

        A key ring is never deleted, so its name is left to Pulumi: a second `pulumi up` must not meet the first's.
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
        granted = gcp.kms.CryptoKeyIAMMember(
            f"{self._name}-secrets-role", crypto_key_id=key.id, role=_KEY_ROLE, member=agent.member, opts=self._child
        )
        return key, granted

    def _control_plane(self, key: gcp.kms.CryptoKey, after: Sequence[pulumi.Resource]) -> gcp.container.Cluster:
        wanted = self._settings
        opts = pulumi.ResourceOptions(
            parent=self,
            depends_on=list(after),
            # Two control planes cannot have the same range.
            delete_before_replace=True,
            # The pool that GKE insists on is removed at once; what it was made with must not replace the cluster later.
            ignore_changes=["nodeConfig"],
        )
        return gcp.container.Cluster(
            self._name,
            location=wanted.cluster_location,
            node_locations=[wanted.zone] if wanted.cluster.location == "regional" else None,
            # Else the provider refuses `pulumi destroy`.
            deletion_protection=False,
            release_channel=gcp.container.ClusterReleaseChannelArgs(channel="REGULAR"),
            remove_default_node_pool=True,
            initial_node_count=1,
            node_config=self._first_pool(),
            network=self._network.vpc.id,
            subnetwork=self._network.subnet.id,
            networking_mode="VPC_NATIVE",
            ip_allocation_policy=gcp.container.ClusterIpAllocationPolicyArgs(
                cluster_secondary_range_name=PODS, services_secondary_range_name=SERVICES
            ),
            default_max_pods_per_node=MAX_PODS_PER_NODE,
            datapath_provider="ADVANCED_DATAPATH",
            enable_multi_networking=wanted.tcpx,
            private_cluster_config=self._private(),
            master_authorized_networks_config=self._authorized(),
            control_plane_endpoints_config=self._by_name(),
            enable_shielded_nodes=True,
            workload_identity_config=gcp.container.ClusterWorkloadIdentityConfigArgs(workload_pool=self.workload_pool),
            database_encryption=gcp.container.ClusterDatabaseEncryptionArgs(state="ENCRYPTED", key_name=key.id),
            addons_config=_addons(),
            monitoring_config=monitoring.metrics(),
            logging_config=monitoring.logs(),
            resource_labels=wanted.labels,
            opts=opts,
        )

    def _first_pool(self) -> gcp.container.ClusterNodeConfigArgs:
        """What the pool that GKE removes at once is made with: not the project's default account, which may be gone."""
        return gcp.container.ClusterNodeConfigArgs(
            machine_type=self._settings.system.instance_type,
            service_account=self.node_account.email,
            oauth_scopes=_SCOPES,
            shielded_instance_config=gcp.container.ClusterNodeConfigShieldedInstanceConfigArgs(enable_secure_boot=True),
        )

    def _private(self) -> gcp.container.ClusterPrivateClusterConfigArgs:
        """Nodes without public addresses; the API has one only where ranges are authorised to use it."""
        net = self._settings.network
        return gcp.container.ClusterPrivateClusterConfigArgs(
            enable_private_nodes=True,
            enable_private_endpoint=not net.authorized_cidrs,
            master_ipv4_cidr_block=net.control_plane_cidr,
        )

    def _authorized(self) -> gcp.container.ClusterMasterAuthorizedNetworksConfigArgs:
        """An empty list admits the nodes and nobody else; Google Cloud's own public addresses are strangers too."""
        return gcp.container.ClusterMasterAuthorizedNetworksConfigArgs(
            cidr_blocks=[
                gcp.container.ClusterMasterAuthorizedNetworksConfigCidrBlockArgs(cidr_block=cidr)
                for cidr in self._settings.network.authorized_cidrs
            ],
            gcp_public_cidrs_access_enabled=False,
        )

    def _by_name(self) -> gcp.container.ClusterControlPlaneEndpointsConfigArgs:
        return gcp.container.ClusterControlPlaneEndpointsConfigArgs(
            dns_endpoint_config=gcp.container.ClusterControlPlaneEndpointsConfigDnsEndpointConfigArgs(
                allow_external_traffic=self._settings.network.dns_endpoint
            )
        )

    def _system_pool(self) -> gcp.container.NodePool:
        """Nodes for operators and dashboards; one more of them while GKE puts in a newer one."""
        wanted = self._settings
        return gcp.container.NodePool(
            f"{self._name}-system",
            cluster=self.control_plane.name,
            location=wanted.cluster_location,
            node_locations=[wanted.zone],
            node_count=wanted.system.num_nodes,
            node_config=self._node_config(wanted.system.instance_type, _SYSTEM_DISK_GIB),
            management=gcp.container.NodePoolManagementArgs(auto_repair=True, auto_upgrade=True),
            upgrade_settings=gcp.container.NodePoolUpgradeSettingsArgs(max_surge=1, max_unavailable=0),
            network_config=gcp.container.NodePoolNetworkConfigArgs(enable_private_nodes=True),
            opts=self._child,
        )

    def _gpu_pool(self) -> gcp.container.NodePool:
        """The nodes that train, in one zone.

        GPUs are scarce: an upgrade takes a node before it brings one, and so does a replacement of the pool. The number
        of nodes to start with is the autoscaler's business afterwards, and the driver's version must not replace nodes:
        https://github.com/hashicorp/terraform-provider-google/issues/23248
        """
        wanted, nodes = self._settings, self._settings.gpu.nodes
        flexible = wanted.gpu.capacity == "flex_start"
        return gcp.container.NodePool(
            f"{self._name}-gpu",
            cluster=self.control_plane.name,
            location=wanted.cluster_location,
            node_locations=[wanted.zone],
            initial_node_count=wanted.num_initial_nodes,
            autoscaling=gcp.container.NodePoolAutoscalingArgs(
                total_min_node_count=nodes.min, total_max_node_count=nodes.max, location_policy="ANY"
            ),
            node_config=self._gpu_config(),
            placement_policy=gcp.container.NodePoolPlacementPolicyArgs(type="COMPACT") if wanted.compact else None,
            # A node that flex-start lent is given back, not repaired.
            management=gcp.container.NodePoolManagementArgs(auto_repair=not flexible, auto_upgrade=True),
            upgrade_settings=gcp.container.NodePoolUpgradeSettingsArgs(max_surge=0, max_unavailable=1),
            network_config=gcp.container.NodePoolNetworkConfigArgs(
                enable_private_nodes=True, additional_node_network_configs=self._cards()
            ),
            opts=pulumi.ResourceOptions(
                parent=self,
                delete_before_replace=True,
                ignore_changes=["initialNodeCount", "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig"],
            ),
        )

    def _cards(self) -> list[gcp.container.NodePoolNetworkConfigAdditionalNodeNetworkConfigArgs] | None:
        """The networks of a GPU node's further cards, in the order of its interfaces."""
        return [
            gcp.container.NodePoolNetworkConfigAdditionalNodeNetworkConfigArgs(
                network=network.vpc.name, subnetwork=network.subnet.name
            )
            for network in self._network.fabric
        ] or None

    def _node_config(self, machine_type: str, disk_size_gib: int) -> gcp.container.NodePoolNodeConfigArgs:
        """What all nodes have in common: their own identity, verified boot, no way to another node's credentials."""
        return gcp.container.NodePoolNodeConfigArgs(
            machine_type=machine_type,
            image_type="COS_CONTAINERD",
            disk_size_gb=disk_size_gib,
            disk_type="pd-balanced",
            service_account=self.node_account.email,
            oauth_scopes=_SCOPES,
            tags=[self._network.node_tag],
            gvnic=gcp.container.NodePoolNodeConfigGvnicArgs(enabled=True),
            workload_metadata_config=gcp.container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
            shielded_instance_config=gcp.container.NodePoolNodeConfigShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_integrity_monitoring=True
            ),
            metadata={"disable-legacy-endpoints": "true"},
            resource_labels=self._settings.labels,
        )

    def _gpu_config(self) -> gcp.container.NodePoolNodeConfigArgs:
        """A node with accelerators, whose driver GKE installs, bought as the stack says."""
        wanted = self._settings
        assert wanted.instance is not None, f"{wanted.gpu.instance_type} is not in the catalog"
        config = self._node_config(wanted.gpu.instance_type, wanted.gpu.boot_disk_gib)
        driver = gcp.container.NodePoolNodeConfigGuestAcceleratorGpuDriverInstallationConfigArgs(
            gpu_driver_version=GPU_DRIVER
        )
        config.guest_accelerators = [
            gcp.container.NodePoolNodeConfigGuestAcceleratorArgs(
                type=wanted.instance.accelerator,
                count=wanted.instance.num_gpus,
                gpu_driver_installation_config=driver,
            )
        ]
        config.labels = dict(GPU_LABEL)
        config.taints = [_taint(toleration) for toleration in tolerations(wanted)]
        if wanted.fast_socket:
            config.fast_socket = gcp.container.NodePoolNodeConfigFastSocketArgs(enabled=True)
        if count := _NUM_LOCAL_SSDS.get(wanted.instance.name):
            config.ephemeral_storage_local_ssd_config = (
                gcp.container.NodePoolNodeConfigEphemeralStorageLocalSsdConfigArgs(local_ssd_count=count)
            )
        self._buy(config)
        return config

    def _buy(self, config: gcp.container.NodePoolNodeConfigArgs) -> None:
        """Spot and flex-start never come out of a reservation; on demand takes one that is open to everybody."""
        gpu = self._settings.gpu
        if gpu.capacity == "reservation" and gpu.reservation_id:
            config.reservation_affinity = gcp.container.NodePoolNodeConfigReservationAffinityArgs(
                consume_reservation_type="SPECIFIC_RESERVATION",
                key="compute.googleapis.com/reservation-name",
                values=[gpu.reservation_id],
            )
        elif gpu.capacity != "on_demand":
            config.reservation_affinity = gcp.container.NodePoolNodeConfigReservationAffinityArgs(
                consume_reservation_type="NO_RESERVATION"
            )
        if gpu.capacity == "spot":
            config.spot = True
        if gpu.capacity == "flex_start":
            config.flex_start = True
            config.max_run_duration = f"{(gpu.max_run_hours or MAX_FLEX_START_HOURS) * 3600}s"

    def _kubeconfig(self) -> pulumi.Output[str]:
        """The way in that the settings open: by name, else by address; `endpoint` is the private one where no other is.

        The name has a certificate that every machine trusts, the address one of the cluster's own authority.
        """
        plane = self.control_plane
        by_name = plane.control_plane_endpoints_config.dns_endpoint_config
        server = by_name.apply(lambda found: found.endpoint if found else None)
        authority = plane.master_auth.cluster_ca_certificate
        if self._settings.network.dns_endpoint:
            return pulumi.Output.all(plane.name, server).apply(lambda facts: kubeconfig(facts[0], facts[1], None))
        return pulumi.Output.all(plane.name, plane.endpoint, authority).apply(
            lambda facts: kubeconfig(facts[0], facts[1], facts[2])
        )

    def _kubernetes_provider(self) -> k8s.Provider:
        """Kubernetes objects go before the system nodes: without its metrics server a cluster deletes no namespace."""
        opts = pulumi.ResourceOptions(parent=self, depends_on=[self.system_nodes])
        return k8s.Provider(f"{self._name}-k8s", kubeconfig=self.kubeconfig, opts=opts)


def account_id(settings: Settings, role: str) -> str:
    """The first part of a service account's address: 6 to 30 letters, unique in the project.

    Nothing random goes into it, because an account that is deleted keeps its address for 30 days; the digest keeps
    stacks of the same name apart.
    """
    digest = hashlib.sha256(f"{settings.project}/{settings.stack}".encode()).hexdigest()[:6]
    return f"{settings.stack[: 30 - len(f'-{role}-{digest}')]}-{role}-{digest}"


def kubeconfig(name: str, server: str, authority: str | None) -> str:
    """A kubeconfig that asks Google for a short-lived token whenever it is used; nothing secret is written into it.

    `authority` is the cluster's certificate in base 64, None where the server's is publicly trusted.
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


def tolerations(settings: Settings) -> tuple[Toleration, ...]:
    """The taints of the GPU pool, which a job tolerates."""
    return (GPU_TAINT, SPOT_TAINT) if settings.gpu.capacity == "spot" else (GPU_TAINT,)


def _taint(toleration: Toleration) -> gcp.container.NodePoolNodeConfigTaintArgs:
    effect = {"NoSchedule": "NO_SCHEDULE", "NoExecute": "NO_EXECUTE", "PreferNoSchedule": "PREFER_NO_SCHEDULE"}
    return gcp.container.NodePoolNodeConfigTaintArgs(
        key=toleration.key, value=toleration.value, effect=effect[toleration.effect]
    )


def _addons() -> gcp.container.ClusterAddonsConfigArgs:
    """The driver that mounts Filestore; no ingress controller, whose load balancers would outlive the cluster."""
    return gcp.container.ClusterAddonsConfigArgs(
        gcp_filestore_csi_driver_config=gcp.container.ClusterAddonsConfigGcpFilestoreCsiDriverConfigArgs(enabled=True),
        gce_persistent_disk_csi_driver_config=gcp.container.ClusterAddonsConfigGcePersistentDiskCsiDriverConfigArgs(
            enabled=True
        ),
        http_load_balancing=gcp.container.ClusterAddonsConfigHttpLoadBalancingArgs(disabled=True),
    )
