"""Builds the contract's Cluster from the settings of a stack on Azure."""

from __future__ import annotations

import pulumi

from infra.addons import fabric as fabric_charts
from infra.addons import gpu as gpu_charts
from infra.clouds.azure.cluster import AksCluster, taints
from infra.clouds.azure.monitoring import ManagedMonitoring
from infra.clouds.azure.network import PrivateNetwork
from infra.clouds.azure.registry import ContainerRegistry
from infra.clouds.azure.settings import Settings
from infra.clouds.azure.storage import ObjectStore, SharedStorage
from infra.components.namespace import training_namespace
from infra.contract import GPU_LABEL, ChartRequest, Cluster, Fabric, GpuPool

#: AKS creates this class in every cluster, for standard SSDs that are deleted with their claim.
_DISK_CLASS = "managed-csi"


def provision(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
    """Create network, cluster, storage, registry and monitoring, each after what it depends on."""
    network = PrivateNetwork(f"{name}-network", settings, opts)
    cluster = AksCluster(name, settings, network, opts)
    fabric = node_fabric(settings)
    on_cluster = pulumi.ResourceOptions(parent=cluster, provider=cluster.provider)
    namespace = training_namespace(name, settings.namespace, fabric, settings.labels, on_cluster)
    shared = SharedStorage(f"{name}-storage", settings, network, cluster, namespace, opts)
    objects = ObjectStore(f"{name}-objects", settings, network, cluster, opts)
    registry = ContainerRegistry(f"{name}-registry", settings, network, cluster.principals, opts)
    commands: dict[str, pulumi.Input[str]] = preflight(settings) | {
        "registry_login": registry.login,
        "upload_data": objects.upload,
    }
    if settings.monitoring.managed:
        commands["open_grafana"] = ManagedMonitoring(f"{name}-monitoring", settings, network, cluster, opts).url
    warn_of_missing_peermem(settings)
    return Cluster(
        name=cluster.managed.name,
        kubeconfig=cluster.kubeconfig,
        provider=cluster.provider,
        namespace=settings.namespace,
        gpu=gpu_pool(settings),
        fabric=fabric,
        storage=shared.facts,
        identity=objects.identity,
        bucket_uri=objects.container_uri,
        checkpoint_uri=objects.checkpoint_uri,
        registry=registry.facts,
        labels=settings.labels,
        commands=commands,
        disk_class=_DISK_CLASS,
        before_operators=(cluster.managed, cluster.provider),
        before_workloads=(cluster.gpu_pool, namespace, *shared.ready, *objects.ready, *registry.ready),
    )


def preflight(settings: Settings) -> dict[str, pulumi.Input[str]]:
    """Return the commands that must print `Registered` before nodes can start; only an owner can register features."""
    return {
        f"feature_{name.lower()}": f"az feature show --namespace {namespace} --name {name} --query properties.state"
        for namespace, name in (feature.split("/") for feature in settings.required_features)
    }


def warn_of_missing_peermem(settings: Settings) -> None:
    """Log a warning if the chosen driver may disable GPUDirect RDMA."""
    if settings.infiniband and settings.driver == "aks":
        pulumi.log.warn(
            "gpu.driver aks on InfiniBand: AKS does not load nvidia-peermem, so NCCL may copy through host memory; "
            "look for GDRDMA in its log, or: pulumi config set --path gpu.driver operator"
        )


def gpu_pool(settings: Settings) -> GpuPool:
    """Return the GPU pool of the contract; a pod that owns a node requests one InfiniBand function per GPU."""
    instance = settings.instance
    devices = {name: str(count) for name, count in settings.devices.items()}
    return GpuPool(
        instance=instance,
        num_nodes_min=settings.gpu.nodes.min,
        num_nodes_desired=settings.gpu.nodes.desired,
        num_nodes_max=settings.gpu.nodes.max,
        node_selector=GPU_LABEL,
        tolerations=taints(settings),
        resource_limits={"nvidia.com/gpu": str(instance.num_gpus)} | devices,
        # A quarter of the node's memory: tmpfs uses memory only for what it holds, and its default limit is half.
        shared_memory_gib=int(instance.memory_gib) // 4,
        chart=gpu_software(settings),
        interruptible=settings.interruptible,
    )


def gpu_software(settings: Settings) -> ChartRequest:
    """Return the device plugin for AKS's driver, or the GPU operator, which installs both; never a mix."""
    on_pool = taints(settings)
    if settings.driver == "aks":
        return gpu_charts.device_plugin(on_pool)
    return gpu_charts.gpu_operator(
        on_pool, installs_driver=True, finds_features=not settings.infiniband, rdma=settings.infiniband
    )


def node_fabric(settings: Settings) -> Fabric:
    """Return InfiniBand through the network operator, or plain TCP if the size has no InfiniBand cards.

    The virtual machine hides which card is near which GPU. NCCL reads it from the topology file, which is part of the
    image's InfiniBand target. Pods run as root with the one capability IPC_LOCK: AKS has no setting for containerd's
    limit of locked memory (Azure/AKS#4893), and a daemon that raises it acts after the first pods have started.
    """
    if not settings.infiniband:
        return Fabric(name="tcp", env={"NCCL_SOCKET_IFNAME": "eth0"}, expected_log="NET/Socket : Using")
    generation = "v5" if settings.instance.fabric == "InfiniBand NDR" else "v4"
    return Fabric(
        name="infiniband",
        env={
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "NCCL_IB_PCI_RELAXED_ORDERING": "1",
            "NCCL_SOCKET_IFNAME": "eth0",
            "NCCL_TOPO_FILE": f"/opt/microsoft/nd{generation}-topo.xml",
        },
        rdma=True,
        as_root=True,
        capabilities=("IPC_LOCK",),
        image_target="infiniband",
        expected_log="NET/IB : Using",
        chart=fabric_charts.network_operator(tolerations=taints(settings)),
    )
