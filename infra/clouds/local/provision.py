"""Provisions a stack on an existing cluster: from its settings to the cluster contract."""

from __future__ import annotations

import pulumi

from infra.catalog import InstanceType
from infra.clouds.local.cluster import ExistingCluster
from infra.clouds.local.settings import Gpu, Settings
from infra.clouds.local.storage import LocalStorage
from infra.components.namespace import training_namespace
from infra.contract import GPU_LABEL, GPU_TAINT, ChartRequest, Cluster, Fabric, GpuPool, Identity, Registry


def provision(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
    """Register a namespace and a volume claim on the existing cluster, and change nothing else there."""
    cluster = ExistingCluster(name, settings.kubeconfig, opts)
    fabric = Fabric(name="tcp")
    on_cluster = pulumi.ResourceOptions(parent=cluster, provider=cluster.provider)
    kept = pulumi.ResourceOptions(retain_on_delete=settings.storage.keeps_claim)
    namespace = training_namespace(
        name, settings.namespace, fabric, settings.labels, pulumi.ResourceOptions.merge(on_cluster, kept)
    )
    storage = LocalStorage(f"{name}-storage", settings, namespace, on_cluster)
    return Cluster(
        name=cluster.context,
        kubeconfig=cluster.kubeconfig,
        provider=cluster.provider,
        namespace=settings.namespace,
        gpu=gpu_pool(settings.gpu),
        fabric=fabric,
        storage=storage.facts,
        identity=Identity(secret_name=settings.storage.credentials_secret),
        bucket_uri=settings.storage.bucket_uri,
        checkpoint_uri=settings.storage.bucket_uri.rstrip("/") + "/checkpoints",
        registry=Registry(settings.registry.repository),
        labels=settings.labels,
        before_workloads=(namespace, storage),
    )


def gpu_pool(gpu: Gpu) -> GpuPool:
    """Return the pool in the contract's form; without GPUs it has no tolerations and no limits."""
    instance = InstanceType(
        cloud="local",
        name="existing",
        gpu_model=gpu.model,
        num_gpus=gpu.gpus_per_node,
        hbm_gib_per_gpu=gpu.hbm_gib_per_gpu,
        hbm_gb_per_second=0,
        nvlink_gb_per_second=0,
        num_vcpus=gpu.num_vcpus,
        memory_gib=gpu.memory_gib,
        network_gbps=0,
        num_network_cards=0,
        fabric="TCP",
        on_demand_usd_per_hour=0.0,
        as_of="",
        source="settings of the stack",
    )
    has_gpus = gpu.gpus_per_node > 0
    return GpuPool(
        instance=instance,
        num_nodes_min=gpu.nodes.min,
        num_nodes_desired=gpu.nodes.desired,
        num_nodes_max=gpu.nodes.max,
        node_selector=(GPU_LABEL if has_gpus else {}) | gpu.node_selector,
        tolerations=(GPU_TAINT,) if has_gpus and gpu.tolerate_taint else (),
        resource_limits={"nvidia.com/gpu": str(gpu.gpus_per_node)} if has_gpus else {},
        shared_memory_gib=gpu.shared_memory_gib,
        chart=None if gpu.chart == "present" else ChartRequest(gpu.chart),
        exports_metrics=not has_gpus,
    )
