"""The settings of a stack on Azure, their validation, and the costs of everything except its GPU nodes."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from infra import catalog
from infra.clouds.azure import versions
from infra.clouds.azure.addresses import Network
from infra.config import checks
from infra.config.maintenance import Maintenance
from infra.config.problems import Problem, fix_by_removing, fix_by_setting
from infra.config.settings import (
    ManagedGpuSettings,
    ManagedStackSettings,
    ManagedStorageSettings,
    Section,
)
from infra.cost import CostLine

Tier = Literal["Standard", "Premium", "Ultra"]
Driver = Literal["aks", "operator"]

#: The throughput of one TiB of a NetApp pool (Azure NetApp Files, service levels).
MIBPS_PER_TIB: Mapping[str, int] = {"Standard": 16, "Premium": 64, "Ultra": 128}
#: A pool grows in whole TiB; a volume that is not a "large volume" has at most 100 TiB.
_TIB_IN_GIB, _MAX_VOLUME_GIB = 1024, 100 * 1024

#: Regions without availability zones; all others, including new ones, are assumed to have three.
_WITHOUT_ZONES = frozenset(
    {
        *("australiacentral", "australiacentral2", "australiasoutheast", "brazilsoutheast", "canadaeast"),
        *("francesouth", "germanynorth", "jioindiacentral", "jioindiawest", "koreasouth", "northcentralus"),
        *("norwaywest", "southafricawest", "southindia", "swedensouth", "switzerlandwest", "uaecentral"),
        *("ukwest", "westcentralus", "westindia", "westus"),
    }
)
_GRAFANA = "managed Grafana (Standard)"

_SUBSCRIPTION = r"^/subscriptions/[0-9a-fA-F-]{36}/resourceGroups/[^/]+/providers/"
_EXAMPLE_GROUP = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/<group>/providers/"


@cache
def prices(table: Literal["system", "netapp", "fixed"]) -> Mapping[str, float]:
    """Return USD per hour and unit from `prices.toml`, which has the date and source of each price."""
    rows = tomllib.loads((Path(__file__).parent / "prices.toml").read_text())[table]
    return {what: float(row["usd_per_hour"]) for what, row in rows.items()}


#: What the provider appends to the names that it generates: eight hexadecimal digits.
GENERATED_SUFFIX = "0" * 8


def physical_name(stem: str, unique: str, max_length: int) -> str:
    """Return a globally unique name of lowercase letters and digits, starting with a letter.

    `unique` is the resource group's id, whose subscription and random suffix distinguish stacks of the same name.
    """
    letters = re.sub("[^a-z0-9]", "", stem.lower())
    letters = letters if letters[:1].isalpha() else f"t{letters}"
    return letters[: max_length - 8] + hashlib.sha256(unique.encode()).hexdigest()[:8]


class Gpu(ManagedGpuSettings):
    """The GPU pool: one scale set, which puts its nodes on one InfiniBand network.

    `driver` is what installs the GPU driver: `aks` (with the device plugin's chart) or `operator` (the GPU operator).
    It defaults to the operator on InfiniBand, where GPUDirect needs the nvidia-peermem module that AKS does not load,
    and to AKS elsewhere. `zone` is `1`, `2`, `3` or the node label's spelling `eastus-1`; by default Azure chooses.
    """

    instance_type: str = Field(examples=["Standard_ND96asr_v4"])
    capacity: Literal["on_demand", "spot", "reservation"] = "on_demand"
    reservation_id: str | None = Field(
        None,
        pattern=_SUBSCRIPTION + r"Microsoft\.Compute/capacityReservationGroups/[^/]+$",
        examples=[_EXAMPLE_GROUP + "Microsoft.Compute/capacityReservationGroups/<group>"],
    )
    driver: Driver | None = None
    # `pulumi config set --path gpu.zone 1` stores a number.
    zone: Annotated[str, BeforeValidator(str)] | None = Field(None, examples=["1"])


class AzureML(Section):
    """The keys for `job.launcher azureml`, with which Azure Machine Learning runs the job instead of a cluster.

    Machines are deleted `idle_minutes` after a job. `endpoint` is the address of Azure Resource Manager, which differs
    in Azure's sovereign clouds.
    """

    idle_minutes: int = Field(5, ge=1, le=24 * 60)
    endpoint: str = Field("https://management.azure.com", pattern=r"^https://[^/]+$")


class System(Section):
    """The nodes for everything except training: operators, Prometheus, the cluster's own pods."""

    instance_type: str = Field("Standard_D4ds_v5", examples=["Standard_D4ds_v5"])
    num_nodes: int = Field(2, ge=1, le=100)


class KubernetesCluster(Section):
    """The version of the control plane and of all nodes; a minor version receives its patches."""

    # YAML reads an unquoted 1.35 as a number.
    kubernetes_version: Annotated[str, BeforeValidator(str)] = Field(
        "1.35", pattern=r"^1\.\d+(\.\d+)?$", examples=["1.35"]
    )


class Kubernetes(Section):
    """Access to the control plane, and encryption.

    `admin_group_ids` are the Entra groups that administer the cluster, by default the caller of `pulumi up`. `login` is
    how kubelogin gets a token. The key `kms_key_id`, a URL with a version, of the vault `kms_vault_id` encrypts secrets
    in etcd, by default Azure's own key. `host_encryption` covers the nodes' disks and caches and needs the feature
    EncryptionAtHost in the subscription.
    """

    renamed: ClassVar[Mapping[str, str]] = {"version": "cluster.kubernetes_version"}

    admin_group_ids: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")], ...] = Field(
        (), examples=["01234567-89ab-cdef-0123-456789abcdef"]
    )
    login: Literal["azurecli", "devicecode", "msi", "spn", "workloadidentity"] = "azurecli"
    host_encryption: bool = True
    kms_key_id: str | None = Field(
        None,
        pattern=r"^https://[^/]+/keys/[^/]+/[0-9a-f]+$",
        examples=["https://<vault>.vault.azure.net/keys/<key>/<version>"],
    )
    kms_vault_id: str | None = Field(
        None,
        pattern=_SUBSCRIPTION + r"Microsoft\.KeyVault/vaults/[^/]+$",
        examples=[_EXAMPLE_GROUP + "Microsoft.KeyVault/vaults/<vault>"],
    )

    def problems(self) -> Iterable[Problem]:
        """Check that a key and its vault are set together."""
        for key, other in (("kms_key_id", "kms_vault_id"), ("kms_vault_id", "kms_key_id")):
            if getattr(self, other) and not getattr(self, key):
                example = str((type(self).model_fields[key].examples or [""])[0])
                full = f"kubernetes.{key}"
                yield Problem(
                    full, f"missing, and {other} is set", f"for example {example}", fix_by_setting(full, example)
                )


class Storage(ManagedStorageSettings):
    """A NetApp pool with one volume of the same size, and the container of checkpoints.

    The pool is always deleted with the stack; `on_destroy` applies to the container. `size_gib` is in whole TiB, and
    `tier` gives 16, 64 or 128 MiB/s for each TiB.
    """

    size_gib: int = Field(2048, gt=0)
    tier: Tier = "Premium"

    @property
    def size_bytes(self) -> int:
        """Return the size in bytes, the unit of the API for the pool and the volume."""
        return self.size_gib * 2**30

    @property
    def throughput_mibps(self) -> int:
        """Return the throughput of the volume."""
        return self.size_gib * MIBPS_PER_TIB[self.tier] // _TIB_IN_GIB

    def problems(self) -> Iterable[Problem]:
        """Check that the size is in whole TiB and suggest the nearest one."""
        whole = -(-self.size_gib // _TIB_IN_GIB) * _TIB_IN_GIB
        allowed = f"{_TIB_IN_GIB}, {2 * _TIB_IN_GIB}, {3 * _TIB_IN_GIB} ... {_MAX_VOLUME_GIB} (whole TiB, 1 to 100)"
        nearest = min(whole, _MAX_VOLUME_GIB)
        yield from checks.size_step(
            "storage.size_gib", self.size_gib, allowed, None if nearest == self.size_gib else nearest
        )


class Monitoring(Section):
    """Azure's managed Prometheus and Grafana, in addition to what `addons.monitoring` installs in the cluster.

    Grafana has a private endpoint; `public_grafana` makes it reachable from the internet, with an Entra login.
    """

    managed: bool = True
    public_grafana: bool = False


class Settings(ManagedStackSettings):
    """All keys of a stack on Azure."""

    provider_keys: ClassVar[Mapping[str, str]] = {"location": "azure-native:location"}
    services: ClassVar[tuple[str, ...]] = ("azureml",)
    of_clusters: ClassVar[tuple[str, ...]] = (
        *ManagedStackSettings.of_clusters,
        *("cluster", "kubernetes", "maintenance", "system", "monitoring", "storage.tier", "gpu.driver", "gpu.zone"),
        *(f"network.{key}" for key in ("nodes_cidr", "netapp_cidr", "pods_cidr", "services_cidr")),
        *("network.proximity_placement", "network.existing"),
    )
    for_services: ClassVar[tuple[str, ...]] = ("azureml",)

    location: str = Field(pattern=r"^[a-z][a-z0-9]+$", examples=["eastus"])
    gpu: Gpu
    system: System = System()
    cluster: KubernetesCluster = KubernetesCluster()
    kubernetes: Kubernetes = Kubernetes()
    maintenance: Maintenance = Maintenance()
    network: Network = Network()
    storage: Storage = Storage()
    monitoring: Monitoring = Monitoring()
    azureml: AzureML = AzureML()

    @property
    def instance(self) -> catalog.InstanceType:
        """Return the GPU nodes' row of the catalog."""
        return catalog.instance(self.cloud, self.gpu.instance_type)

    @property
    def infiniband(self) -> bool:
        """Return whether the GPU nodes have InfiniBand cards."""
        return self.instance.num_network_cards > 0

    @property
    def devices(self) -> Mapping[str, int]:
        """Return the devices of a GPU node besides its GPUs: one InfiniBand function for each network card."""
        return {"rdma/ib": self.instance.num_network_cards} if self.infiniband else {}

    @property
    def num_min_nodes(self) -> int:
        """Return the number of GPU nodes that always run: reserved machines are billed in any case."""
        nodes = self.gpu.nodes
        return max(nodes.min, nodes.desired) if self.gpu.capacity == "reservation" else nodes.min

    @property
    def driver(self) -> Driver:
        """Return what installs the GPU driver."""
        return self.gpu.driver or ("operator" if self.infiniband else "aks")

    @property
    def zones(self) -> list[str] | None:
        """Return the number of the GPU nodes' and the volume's zone; None if Azure chooses."""
        return [self.gpu.zone.rpartition("-")[2]] if self.gpu.zone else None

    @property
    def has_zones(self) -> bool:
        """Return whether the region has availability zones."""
        return self.location not in _WITHOUT_ZONES

    @property
    def proximity_placement(self) -> bool:
        """Return whether the GPU nodes are in a placement group."""
        chosen = self.network.proximity_placement
        return chosen if chosen is not None else not self.infiniband and self.gpu.capacity != "reservation"

    @property
    def required_features(self) -> tuple[str, ...]:
        """Return the features that must be registered in the subscription before `pulumi up`."""
        if self.service:
            return ()
        fabric = ("Microsoft.ContainerService/AKSInfinibandSupport",) if self.infiniband else ()
        return fabric + (("Microsoft.Compute/EncryptionAtHost",) if self.kubernetes.host_encryption else ())

    @property
    def num_private_endpoints(self) -> int:
        """Return the number of private endpoints: blob, DFS, the registry, and managed Grafana."""
        return 4 if self.monitoring.managed else 3

    def problems(self) -> Iterable[Problem]:
        """Yield problems across sections."""
        yield from super().problems()
        if self.service:
            yield from self._service_problems()
            return
        # An upgrade of the system pool adds one node.
        max_gpu_nodes = max(self.gpu.nodes.desired, self.gpu.nodes.max)
        yield from self.network.problems(max_gpu_nodes + self.system.num_nodes + 1)
        yield from self.storage.problems()
        yield from versions.problems(self.cluster.kubernetes_version)
        yield from self.kubernetes.problems()
        yield from self.maintenance.problems()
        yield from checks.one_of("system.instance_type", self.system.instance_type, prices("system"))
        yield from self._zone_problems()
        if self.network.proximity_placement and self.gpu.capacity == "reservation":
            key = "network.proximity_placement"
            yield Problem(
                key, "not supported with a capacity reservation", "false or unset", fix_by_removing(key), True
            )

    def _service_problems(self) -> Iterable[Problem]:
        """Check for capacity that Azure Machine Learning does not support, and for addresses that firewalls reject."""
        yield from self.network.problems(num_nodes=0)
        if self.gpu.capacity == "reservation":
            key, message = "gpu.capacity", f"{self.service} does not support capacity reservations"
            yield Problem(key, message, "on_demand | spot", fix_by_setting(key, "on_demand"), "reservation")

    def _zone_problems(self) -> Iterable[Problem]:
        """Check that the zone is 1, 2 or 3 of the stack's region."""
        zone, key = self.gpu.zone, "gpu.zone"
        if zone is None:
            return
        if not self.has_zones:
            yield Problem(key, f"{self.location} has no availability zones", "no zone", fix_by_removing(key), zone)
        elif zone not in {f"{prefix}{number}" for prefix in ("", f"{self.location}-") for number in "123"}:
            message, allowed = f"not a zone of {self.location}", f"1 | 2 | 3 (or {self.location}-1 ...)"
            yield Problem(key, message, allowed, fix_by_setting(key, 1), zone)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[CostLine]:
        """Return the costs of GPU nodes, control plane, system nodes, NetApp and private network, used or not."""
        if self.service:
            return (*super().cost_lines(num_gpu_nodes), *_service_lines(prices("fixed")))
        system = prices("system").get(self.system.instance_type, 0.0)
        netapp = f"GiB of NetApp {self.storage.tier} ({self.storage.throughput_mibps} MiB/s)"
        counts = {"private endpoint": self.num_private_endpoints} | {_GRAFANA: int(self.monitoring.managed)}
        fixed = prices("fixed")
        return (
            *super().cost_lines(num_gpu_nodes),
            CostLine(self.system.instance_type, self.system.num_nodes, system),
            CostLine(netapp, self.storage.size_gib, prices("netapp")[self.storage.tier]),
            *(CostLine(what, counts.get(what, 1), price) for what, price in fixed.items() if counts.get(what, 1)),
        )


def _service_lines(fixed: Mapping[str, float]) -> Sequence[CostLine]:
    """Return the costs of registry and private endpoints, which are billed even while no job runs."""
    counts = {"container registry (Premium)": 1, "private endpoint": 3}
    return [CostLine(what, count, fixed[what]) for what, count in counts.items()]
