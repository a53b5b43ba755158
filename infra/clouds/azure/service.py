"""Azure Machine Learning instead of a cluster: a private network, a container, a registry and a workspace."""

from __future__ import annotations

import pulumi

from infra.clouds.azure.azureml.jobs import DATA_INPUT
from infra.clouds.azure.azureml.workspace import Workspace
from infra.clouds.azure.identity import Principals, administrators
from infra.clouds.azure.network import EndpointNetwork
from infra.clouds.azure.provision import node_fabric
from infra.clouds.azure.registry import ContainerRegistry
from infra.clouds.azure.running import CLIENTS
from infra.clouds.azure.settings import Settings
from infra.clouds.azure.storage import ServiceStore
from infra.components import optional_packages as packages
from infra.contract import GpuPool, TrainingService


def serve(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> TrainingService:
    """Create what a command job needs; machines exist only while a job runs."""
    for client in CLIENTS:
        if not packages.installed(client):
            raise pulumi.RunError(
                f"job.launcher {settings.service} needs the package {client}. Fix: {packages.INSTALL}"
            )
    network = EndpointNetwork(f"{name}-network", settings, opts)
    callers = administrators((), pulumi.ResourceOptions(parent=network))
    store = ServiceStore(f"{name}-objects", settings, network, callers, opts)
    principals = Principals(store.trainer.principal_id, callers)
    registry = ContainerRegistry(f"{name}-registry", settings, network, principals, opts)
    workspace = Workspace(f"{name}-ml", settings, network, store, registry, opts)
    return TrainingService(
        name=workspace.workspace.name,
        gpu=machine_pool(settings),
        fabric=node_fabric(settings),
        bucket_uri=store.container_uri,
        checkpoint_uri=store.checkpoint_uri,
        data_path=DATA_INPUT,
        registry=registry.facts,
        labels=settings.labels,
        submit=workspace.submit,
        commands={"registry_login": registry.login, "upload_data": store.upload},
    )


def machine_pool(settings: Settings) -> GpuPool:
    """Return the compute cluster as the contract's pool, without what only pods need."""
    return GpuPool(
        instance=settings.instance,
        num_nodes_min=settings.gpu.nodes.min,
        num_nodes_desired=settings.gpu.nodes.desired,
        num_nodes_max=settings.gpu.nodes.max,
        node_selector={},
        tolerations=(),
        resource_limits={},
        shared_memory_gib=int(settings.instance.memory_gib) // 4,
        interruptible=settings.interruptible,
    )
