"""The folder of a fourth cloud, as a user of this project would write it."""

from __future__ import annotations

from pathlib import Path

SETTINGS = '''
"""Settings of a cloud that exists only in tests."""
from collections.abc import Iterable
from typing import Literal
from pydantic import Field
from infra.config import checks
from infra.config.problems import Problem
from infra.config.settings import Cidr, ManagedGpuSettings, ManagedStackSettings, NetworkSettings


class Gpu(ManagedGpuSettings):
    instance_type: str = Field("f1.large", examples=["f1.large"])
    capacity: Literal["on_demand", "spot", "reservation"] = "on_demand"


class Network(NetworkSettings):
    nodes_cidr: Cidr = "10.0.0.0/20"
    pods_cidr: Cidr = "10.64.0.0/14"


class Settings(ManagedStackSettings):
    provider_keys = {"region": "fourth:region", "zone": "fourth:zone"}
    region: str = Field("north-1", examples=["north-1"])
    zone: str = Field("north-1a", examples=["north-1a"])
    gpu: Gpu = Gpu()
    network: Network = Network()

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        net = self.network
        yield from checks.zone_in_region("fourth:zone", self.zone, self.region)
        yield from checks.disjoint({"network.cidr": net.cidr, "network.pods_cidr": net.pods_cidr})
        yield from checks.inside("network.nodes_cidr", net.nodes_cidr, "network.cidr", net.cidr)
        yield from checks.holds("network.nodes_cidr", net.nodes_cidr, 2 * self.gpu.nodes.max, "the GPU nodes")
'''

PROVISION = '''
"""The cluster of a cloud that exists only in tests."""
import pulumi
import pulumi_kubernetes as k8s
from infra import catalog
from infra.contract import GPU_LABEL, GPU_TAINT, Cluster, Fabric, GpuPool, Identity, Registry, Storage
from infra.components.namespace import training_namespace
from infra.components.volume import static_volume


class FourthCluster(pulumi.ComponentResource):
    def __init__(self, name, opts=None):
        super().__init__("torchrec-cloud:fourth:Cluster", name, None, opts)
        self.kubeconfig = KUBECONFIG
        child = pulumi.ResourceOptions(parent=self)
        self.provider = k8s.Provider(f"{name}-k8s", kubeconfig=self.kubeconfig, opts=child)
        self.register_outputs({})


def provision(name, settings, opts=None):
    cluster = FourthCluster(name, opts)
    child = pulumi.ResourceOptions(parent=cluster, provider=cluster.provider)
    fabric = Fabric(name="tcp")
    instance = catalog.instance("CLOUD", settings.gpu.instance_type)
    namespace = training_namespace(name, settings.namespace, fabric, settings.labels, child)
    facts = Storage("datasets", settings.storage.mount_path, settings.storage.size_gib, "ReadWriteMany")
    source = k8s.core.v1.NFSVolumeSourceArgs(server="192.0.2.1", path="/")
    volume, claim = static_volume(name, facts, namespace.metadata.name, settings.labels, child, nfs=source)
    return Cluster(
        name=name, kubeconfig=cluster.kubeconfig, provider=cluster.provider, namespace=settings.namespace,
        gpu=GpuPool(
            instance=instance, num_nodes_min=settings.gpu.nodes.min, num_nodes_desired=settings.gpu.nodes.desired,
            num_nodes_max=settings.gpu.nodes.max, node_selector=GPU_LABEL, tolerations=(GPU_TAINT,),
            resource_limits={"nvidia.com/gpu": str(instance.num_gpus)}, shared_memory_gib=8,
        ),
        fabric=fabric, storage=facts, identity=Identity(), bucket_uri="s3://bucket",
        checkpoint_uri="s3://bucket/checkpoints", registry=Registry("registry.example/trainer"),
        labels=settings.labels, disk_class="disks", before_operators=(cluster.provider,),
        before_workloads=(namespace, volume, claim),
    )
'''

CREDENTIALS = '''
"""Credentials of a cloud that exists only in tests."""
import pulumi

ASKS = True
LOGIN = "fourth login"
REFUSED = ("fourth denies access",)


def account(settings):
    return pulumi.Output.from_input("fourth-account")
'''

CATALOG = """
[CLOUD."f1.large"]
gpu_model = "A100 40GB"
num_gpus = 4
hbm_gib_per_gpu = 40
hbm_gb_per_second = 1555
nvlink_gb_per_second = 600
num_vcpus = 48
memory_gib = 512
network_gbps = 100
num_network_cards = 1
fabric = "TCP"
on_demand_usd_per_hour = 10.0
spot_usd_per_hour = 4.0
as_of = "2026-11-21"
source = "example"
"""


def write(root: Path, name: str = "fourth", kubeconfig: str = 'pulumi.Output.secret("{}")') -> Path:
    """Write the cloud's folder under `root`, for `infra.clouds.__path__` and `infra.catalog.search_path`."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('"""A cloud that exists only in tests."""\n')
    (folder / "settings.py").write_text(SETTINGS)
    (folder / "credentials.py").write_text(CREDENTIALS)
    (folder / "provision.py").write_text(PROVISION.replace("KUBECONFIG", kubeconfig).replace('"CLOUD"', repr(name)))
    (folder / "catalog.toml").write_text(CATALOG.replace("CLOUD", name))
    return root
