"""Builds the contract's Cluster from the settings of a stack on Google Cloud."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra import catalog
from infra.clouds.gcp.cluster import Cluster as GkeCluster
from infra.clouds.gcp.credentials import CLUSTER_APIS
from infra.clouds.gcp.fabric import Tcpx, node_fabric
from infra.clouds.gcp.monitoring import Monitoring
from infra.clouds.gcp.network import Network
from infra.clouds.gcp.nodes import tolerations
from infra.clouds.gcp.registry import ImageRegistry
from infra.clouds.gcp.settings import Settings
from infra.clouds.gcp.storage import CHECKPOINTS, DATASETS, TrainingStorage
from infra.components.namespace import training_namespace
from infra.contract import GPU_LABEL, Cluster, GpuPool

#: GKE creates this class in every cluster, for balanced persistent disks that are deleted with their claim.
_DISK_CLASS = "standard-rwo"


def provision(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
    """Create a VPC with a GKE cluster, its storage, registry and monitoring."""
    apis = Apis(f"{name}-apis", settings.gcp_project, opts)
    enabled = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[apis]))
    network = Network(f"{name}-network", settings, enabled)
    cluster = GkeCluster(f"{name}-cluster", settings, network, enabled)
    fabric = node_fabric(settings)
    on_cluster = pulumi.ResourceOptions(parent=cluster, provider=cluster.provider)
    namespace = training_namespace(name, settings.namespace, fabric, settings.labels, on_cluster)
    storage = TrainingStorage(f"{name}-storage", settings, network, cluster, namespace, enabled)
    registry = ImageRegistry(f"{name}-registry", settings, cluster.node_account, enabled)
    Monitoring(f"{name}-monitoring", cluster.name, enabled)
    tcpx = [Tcpx(f"{name}-tcpx", settings, network.fabric, cluster.provider, enabled)] if settings.tcpx else []
    bucket = pulumi.Output.concat("gs://", storage.bucket_name)
    return Cluster(
        name=cluster.name,
        kubeconfig=cluster.kubeconfig,
        provider=cluster.provider,
        namespace=settings.namespace,
        gpu=gpu_pool(settings),
        fabric=fabric,
        storage=storage.facts,
        identity=storage.identity,
        bucket_uri=bucket,
        checkpoint_uri=pulumi.Output.concat(bucket, f"/{CHECKPOINTS}"),
        registry=registry.facts,
        labels=settings.labels,
        commands={
            "registry_login": f"gcloud auth configure-docker {registry.server}",
            "upload_data": pulumi.Output.concat("gcloud storage rsync --recursive <folder> ", bucket, f"/{DATASETS}"),
        },
        disk_class=_DISK_CLASS,
        before_operators=(cluster.system_nodes,),
        before_workloads=(cluster.gpu_nodes, namespace, storage, registry, *tcpx),
    )


class Apis(pulumi.ComponentResource):
    """The Google Cloud services that this stack uses.

    They stay enabled after `pulumi destroy`: other stacks of the project may use them, and they cost nothing.
    """

    def __init__(
        self,
        name: str,
        project: str,
        opts: pulumi.ResourceOptions | None = None,
        services: Sequence[str] = CLUSTER_APIS,
    ) -> None:
        """Enable each service of the project."""
        super().__init__("torchrec-cloud:gcp:Apis", name, None, opts)
        for service in services:
            gcp.projects.Service(
                f"{name}-{service}",
                project=project,
                service=f"{service}.googleapis.com",
                disable_on_destroy=False,
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.register_outputs({})


def gpu_pool(settings: Settings) -> GpuPool:
    """Return the GPU pool of the contract; GKE installs driver, device plugin and DCGM itself."""
    gpu, instance = settings.gpu, catalog.instance(settings.cloud, settings.gpu.instance_type)
    return GpuPool(
        instance=instance,
        num_nodes_min=gpu.nodes.min,
        num_nodes_desired=gpu.nodes.desired,
        num_nodes_max=gpu.nodes.max,
        node_selector=GPU_LABEL,
        tolerations=tolerations(settings),
        resource_limits={"nvidia.com/gpu": str(instance.num_gpus)},
        shared_memory_gib=max(1, int(instance.memory_gib // 8)),
        exports_metrics=True,
        interruptible=settings.interruptible,
    )
