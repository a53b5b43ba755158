"""Provisions a stack on AWS: from its settings to the cluster contract."""

from __future__ import annotations

import pulumi

from infra import catalog
from infra.addons.fabric import efa_device_plugin
from infra.addons.gpu import device_plugin
from infra.clouds.aws import live
from infra.clouds.aws.cluster import AUTOSCALER_ACCOUNT, EksCluster
from infra.clouds.aws.monitoring import Monitoring
from infra.clouds.aws.network import Network
from infra.clouds.aws.nodes import HUGE_PAGES_PER_POD
from infra.clouds.aws.registry import ImageRegistry
from infra.clouds.aws.settings import Settings
from infra.clouds.aws.storage import CHECKPOINTS, DATASETS, DISK_CLASS, TrainingStorage
from infra.clouds.aws.versions import AUTOSCALER_TAGS
from infra.components.namespace import training_namespace
from infra.contract import GPU_LABEL, GPU_TAINT, ChartRequest, Cluster, Fabric, GpuPool

#: The share of a node's memory that a pod may use; system pods, huge pages and kubelet need the rest.
_MEMORY_SHARE = 0.8

#: The plugin's image in GovCloud, whose nodes cannot pull from the commercial partition: `accountsByRegion` in
#: amazon-eks-ami, nodeadm/internal/aws/ecr/ecr.go.
_GOVCLOUD_EFA_PLUGINS = {
    "us-gov-east-1": "151742754352.dkr.ecr.us-gov-east-1.amazonaws.com/eks/aws-efa-k8s-device-plugin",
    "us-gov-west-1": "013241004608.dkr.ecr.us-gov-west-1.amazonaws.com/eks/aws-efa-k8s-device-plugin",
}


def provision(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
    """Register a VPC, an EKS cluster in it, its storage, registry and monitoring."""
    live.require_supported_zones(settings)
    network = Network(f"{name}-network", settings, opts)
    cluster = EksCluster(f"{name}-cluster", settings, network, opts)
    on_cluster = pulumi.ResourceOptions(parent=cluster, provider=cluster.provider)
    namespace = training_namespace(name, settings.namespace, fabric(settings), settings.labels, on_cluster)
    storage = TrainingStorage(f"{name}-storage", settings, network, cluster, namespace, opts)
    gpu_nodes = cluster.create_gpu_nodes(network, after=[storage.disk_class])
    registry = ImageRegistry(f"{name}-registry", settings, opts)
    monitoring = Monitoring(f"{name}-monitoring", settings, cluster, opts)
    bucket = pulumi.Output.concat("s3://", storage.bucket_name)
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
        charts=(autoscaler(cluster.eks_name, settings.region, settings.cluster.kubernetes_version),),
        commands={
            "registry_login": _registry_login(settings.region, registry),
            "upload_data": pulumi.Output.concat("aws s3 sync <folder> ", bucket, f"/{DATASETS}/"),
        },
        disk_class=DISK_CLASS,
        before_operators=(*cluster.ready, storage.disk_class),
        before_workloads=(gpu_nodes, namespace, storage, monitoring),
    )


def fabric(settings: Settings) -> Fabric:
    """Return EFA where the type has it; it needs no variables, because the plugin in the image detects the cards."""
    if not settings.num_efa_interfaces:
        return Fabric(name="tcp")
    return Fabric(
        name="efa",
        rdma=True,
        image_target="aws",
        expected_log="NET/OFI Selected provider is efa",
        chart=efa_device_plugin((GPU_TAINT,), _GOVCLOUD_EFA_PLUGINS.get(settings.region)),
    )


def gpu_pool(settings: Settings) -> GpuPool:
    """Return the GPU pool in the contract's form."""
    gpu, instance = settings.gpu, catalog.instance(settings.cloud, settings.gpu.instance_type)
    limits = {"nvidia.com/gpu": str(instance.num_gpus)}
    if settings.num_efa_interfaces:
        limits["vpc.amazonaws.com/efa"] = str(settings.num_efa_interfaces)
        limits["hugepages-2Mi"] = HUGE_PAGES_PER_POD
        # Kubernetes rejects a pod that requests huge pages but neither memory nor CPU.
        limits["memory"] = f"{int(instance.memory_gib * _MEMORY_SHARE)}Gi"
    return GpuPool(
        instance=instance,
        num_nodes_min=gpu.nodes.min,
        num_nodes_desired=gpu.nodes.desired,
        num_nodes_max=gpu.nodes.max,
        node_selector=GPU_LABEL,
        tolerations=(GPU_TAINT,),
        resource_limits=limits,
        shared_memory_gib=max(1, int(instance.memory_gib // 8)),
        chart=device_plugin((GPU_TAINT,)),
        interruptible=settings.interruptible,
    )


def autoscaler(cluster: pulumi.Input[str], region: str, kubernetes_version: str) -> ChartRequest:
    """Return the cluster-autoscaler, which finds this cluster's groups by the tags that EKS sets."""
    return ChartRequest(
        "cluster-autoscaler",
        {
            "autoDiscovery": {"clusterName": cluster},
            "awsRegion": region,
            "cloudProvider": "aws",
            "image": {"tag": AUTOSCALER_TAGS[kubernetes_version]},
            "rbac": {"serviceAccount": {"name": AUTOSCALER_ACCOUNT}},
        },
    )


def _registry_login(region: str, registry: ImageRegistry) -> pulumi.Output[str]:
    token = f"aws ecr get-login-password --region {region}"
    return pulumi.Output.concat(token, " | docker login --username AWS --password-stdin ", registry.server)
