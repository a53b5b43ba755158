"""From the settings of a stack on Google Cloud to the contract."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra import catalog
from infra.clouds.gcp.cluster import Cluster as GkeCluster
from infra.clouds.gcp.cluster import tolerations
from infra.clouds.gcp.monitoring import Monitoring
from infra.clouds.gcp.network import Network, Tcpx, fabric
from infra.clouds.gcp.registry import ImageRegistry
from infra.clouds.gcp.settings import Settings
from infra.clouds.gcp.storage import CHECKPOINTS, DATASETS, TrainingStorage
from infra.components.namespace import training_namespace
from infra.config.problems import fix_by_setting
from infra.contract import GPU_LABEL, Cluster, GpuPool

#: What the resources here are made with; a new project has none of them switched on.
_APIS = (
    "artifactregistry",
    "cloudkms",
    "cloudresourcemanager",
    "compute",
    "container",
    "file",
    "iam",
    "iamcredentials",
    "logging",
    "monitoring",
    "storage",
)


def provision(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
    """A VPC, a GKE cluster in it, its storage, registry and monitoring."""
    _say_who_can_reach_it(settings)
    apis = Apis(f"{name}-apis", settings.gcp_project, opts)
    enabled = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[apis]))
    network = Network(f"{name}-network", settings, enabled)
    cluster = GkeCluster(f"{name}-cluster", settings, network, enabled)
    on_cluster = pulumi.ResourceOptions(parent=cluster, provider=cluster.provider)
    namespace = training_namespace(name, settings.namespace, fabric(settings), settings.labels, on_cluster)
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
        fabric=fabric(settings),
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
        before_operators=(cluster.system_nodes,),
        before_workloads=(cluster.gpu_nodes, namespace, storage, registry, *tcpx),
    )


class Apis(pulumi.ComponentResource):
    """The services of the project that this stack uses.

    They stay on after `pulumi destroy`: other stacks of the project use them, and one that is on costs nothing.
    """

    def __init__(
        self, name: str, project: str, opts: pulumi.ResourceOptions | None = None, services: Sequence[str] = _APIS
    ) -> None:
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
    """The pool as the contract states it; GKE brings driver, device plugin and DCGM itself."""
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


def _say_who_can_reach_it(settings: Settings) -> None:
    """A private control plane is the default, and a person outside the VPC should learn of it before the first wait."""
    if not settings.is_private:
        return
    by_address = fix_by_setting("network.authorized_cidrs[0]", "<your address>/32")
    by_name = fix_by_setting("network.dns_endpoint", "true")
    pulumi.log.warn(
        "network.authorized_cidrs is empty: only machines inside the VPC reach the Kubernetes API, this one included "
        f"if `pulumi up` runs here. To reach it from outside: {by_address}, or for whoever IAM admits: {by_name}"
    )
