"""The node pools of a GKE cluster: system nodes and the autoscaled GPU nodes."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra.clouds.gcp.network import Network
from infra.clouds.gcp.settings import MAX_FLEX_START_HOURS, Settings
from infra.contract import GPU_LABEL, GPU_TAINT, Toleration

#: The taint of spot nodes. GKE labels them, but adds no taint to a pool that it did not create itself.
SPOT_TAINT = Toleration("cloud.google.com/gke-spot", "true")

#: The newest driver of the node image: CUDA 13 needs 580 or later. No setting, because a change replaces the pool.
GPU_DRIVER = "LATEST"

#: Local SSDs included in a machine type; GKE leaves them unused unless they are requested.
_NUM_LOCAL_SSDS = {"a2-ultragpu-8g": 8, "a3-highgpu-8g": 16}

#: All scopes: the node's role decides what it may do.
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_SYSTEM_DISK_GIB = 100


@dataclass(frozen=True)
class NodePools:
    """Creates the node pools of one cluster as children of `parent`."""

    name: str
    settings: Settings
    network: Network
    control_plane: gcp.container.Cluster
    account: gcp.serviceaccount.Account
    parent: pulumi.Resource

    def create_system_pool(self) -> gcp.container.NodePool:
        """Create the nodes of operators and dashboards, with one extra node during upgrades."""
        settings = self.settings
        return gcp.container.NodePool(
            f"{self.name}-system",
            cluster=self.control_plane.name,
            location=settings.cluster_location,
            node_locations=[settings.zone],
            node_count=settings.system.num_nodes,
            node_config=self._node_config(settings.system.instance_type, _SYSTEM_DISK_GIB),
            management=gcp.container.NodePoolManagementArgs(auto_repair=True, auto_upgrade=True),
            upgrade_settings=gcp.container.NodePoolUpgradeSettingsArgs(max_surge=1, max_unavailable=0),
            network_config=gcp.container.NodePoolNetworkConfigArgs(enable_private_nodes=True),
            opts=pulumi.ResourceOptions(parent=self.parent),
        )

    def create_gpu_pool(self) -> gcp.container.NodePool:
        """Create the GPU nodes, all in one zone.

        GPUs are scarce: upgrades and a replacement of the pool delete nodes before they create new ones. The autoscaler
        owns the number of nodes after creation, and the driver's version must not replace nodes:
        https://github.com/hashicorp/terraform-provider-google/issues/23248
        """
        settings, nodes = self.settings, self.settings.gpu.nodes
        flex_start = settings.gpu.capacity == "flex_start"
        return gcp.container.NodePool(
            f"{self.name}-gpu",
            cluster=self.control_plane.name,
            location=settings.cluster_location,
            node_locations=[settings.zone],
            initial_node_count=settings.num_initial_nodes,
            autoscaling=gcp.container.NodePoolAutoscalingArgs(
                total_min_node_count=nodes.min, total_max_node_count=nodes.max, location_policy="ANY"
            ),
            node_config=self._gpu_node_config(),
            placement_policy=gcp.container.NodePoolPlacementPolicyArgs(type="COMPACT") if settings.compact else None,
            # Flex-start nodes are returned, not repaired.
            management=gcp.container.NodePoolManagementArgs(auto_repair=not flex_start, auto_upgrade=True),
            # GKE itself chooses how flex-start nodes, which live for days, are upgraded.
            upgrade_settings=None
            if flex_start
            else gcp.container.NodePoolUpgradeSettingsArgs(max_surge=0, max_unavailable=1),
            network_config=gcp.container.NodePoolNetworkConfigArgs(
                enable_private_nodes=True, additional_node_network_configs=self._additional_networks()
            ),
            opts=pulumi.ResourceOptions(
                parent=self.parent,
                delete_before_replace=True,
                ignore_changes=["initialNodeCount", "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig"],
            ),
        )

    def _additional_networks(self) -> list[gcp.container.NodePoolNetworkConfigAdditionalNodeNetworkConfigArgs] | None:
        """Return the networks of a GPU node's additional network cards, in the order of its interfaces."""
        return [
            gcp.container.NodePoolNetworkConfigAdditionalNodeNetworkConfigArgs(
                network=network.vpc.name, subnetwork=network.subnet.name
            )
            for network in self.network.fabric
        ] or None

    def _node_config(self, machine_type: str, disk_size_gib: int) -> gcp.container.NodePoolNodeConfigArgs:
        """Return what all nodes share: service account, secure boot, and no access to node credentials for pods."""
        return gcp.container.NodePoolNodeConfigArgs(
            machine_type=machine_type,
            image_type="COS_CONTAINERD",
            disk_size_gb=disk_size_gib,
            disk_type="pd-balanced",
            service_account=self.account.email,
            oauth_scopes=SCOPES,
            tags=[self.network.node_tag],
            gvnic=gcp.container.NodePoolNodeConfigGvnicArgs(enabled=True),
            workload_metadata_config=gcp.container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
            shielded_instance_config=gcp.container.NodePoolNodeConfigShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_integrity_monitoring=True
            ),
            metadata={"disable-legacy-endpoints": "true"},
            resource_labels=self.settings.labels,
        )

    def _gpu_node_config(self) -> gcp.container.NodePoolNodeConfigArgs:
        """Return a node with GPUs, whose driver GKE installs, in the stack's kind of capacity."""
        settings = self.settings
        assert settings.instance is not None, f"{settings.gpu.instance_type} is not in the catalog"
        config = self._node_config(settings.gpu.instance_type, settings.gpu.boot_disk_gib)
        driver = gcp.container.NodePoolNodeConfigGuestAcceleratorGpuDriverInstallationConfigArgs(
            gpu_driver_version=GPU_DRIVER
        )
        config.guest_accelerators = [
            gcp.container.NodePoolNodeConfigGuestAcceleratorArgs(
                type=settings.instance.accelerator,
                count=settings.instance.num_gpus,
                gpu_driver_installation_config=driver,
            )
        ]
        config.labels = dict(GPU_LABEL)
        config.taints = [_taint(toleration) for toleration in tolerations(settings)]
        if settings.fast_socket:
            config.fast_socket = gcp.container.NodePoolNodeConfigFastSocketArgs(enabled=True)
        if count := _NUM_LOCAL_SSDS.get(settings.instance.name):
            config.ephemeral_storage_local_ssd_config = (
                gcp.container.NodePoolNodeConfigEphemeralStorageLocalSsdConfigArgs(local_ssd_count=count)
            )
        self._set_capacity(config)
        return config

    def _set_capacity(self, config: gcp.container.NodePoolNodeConfigArgs) -> None:
        """Set the kind of capacity: on-demand nodes may use an open reservation, spot and flex-start nodes none."""
        gpu = self.settings.gpu
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


def tolerations(settings: Settings) -> tuple[Toleration, ...]:
    """Return the taints of the GPU pool, which its pods tolerate."""
    return (GPU_TAINT, SPOT_TAINT) if settings.gpu.capacity == "spot" else (GPU_TAINT,)


def _taint(toleration: Toleration) -> gcp.container.NodePoolNodeConfigTaintArgs:
    """Return the taint in the spelling of the GKE API."""
    effect = {"NoSchedule": "NO_SCHEDULE", "NoExecute": "NO_EXECUTE", "PreferNoSchedule": "PREFER_NO_SCHEDULE"}
    return gcp.container.NodePoolNodeConfigTaintArgs(
        key=toleration.key, value=toleration.value, effect=effect[toleration.effect]
    )
