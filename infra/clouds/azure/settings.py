"""What a stack configures on Azure, what the services refuse, and what an hour costs; no SDK here."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from infra import catalog
from infra.config import checks
from infra.config.problems import Problem, fix_by_removing, fix_by_setting
from infra.config.settings import (
    Cidr,
    ManagedGpuSettings,
    ManagedStackSettings,
    ManagedStorageSettings,
    NetworkSettings,
    Section,
)
from infra.cost import CostLine

Tier = Literal["Standard", "Premium", "Ultra"]
Driver = Literal["aks", "operator"]

#: What one TiB of a NetApp pool gives its volumes (Azure NetApp Files, service levels).
MIBPS_PER_TIB: Mapping[str, int] = {"Standard": 16, "Premium": 64, "Ultra": 128}
#: A pool grows in whole TiB; a volume that is not a "large volume" ends at 100 TiB.
_TIB_IN_GIB, _MAX_VOLUME_GIB = 1024, 100 * 1024

#: Regions without availability zones; others, later ones included, are taken to have three.
_WITHOUT_ZONES = frozenset(
    {
        *("australiacentral", "australiacentral2", "australiasoutheast", "brazilsoutheast", "canadaeast"),
        *("francesouth", "germanynorth", "jioindiacentral", "jioindiawest", "koreasouth", "northcentralus"),
        *("norwaywest", "southafricawest", "southindia", "swedensouth", "switzerlandwest", "uaecentral"),
        *("ukwest", "westcentralus", "westindia", "westus"),
    }
)
#: AKS refuses these for nodes, pods and services alike (its network documentation).
_RESERVED = ("169.254.0.0/16", "172.30.0.0/16", "172.31.0.0/16", "192.0.2.0/24")
#: Addresses that never come in from the internet.
_PRIVATE = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16")

_GRAFANA = "managed Grafana (Standard)"

_SUBSCRIPTION = r"^/subscriptions/[0-9a-fA-F-]{36}/resourceGroups/[^/]+/providers/"
_EXAMPLE_GROUP = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/<group>/providers/"


@cache
def prices(table: Literal["system", "netapp", "fixed"]) -> Mapping[str, float]:
    """USD per hour of one unit, from the rows of `prices.toml`, which say when and where each was read."""
    rows = tomllib.loads((Path(__file__).parent / "prices.toml").read_text())[table]
    return {what: float(row["usd_per_hour"]) for what, row in rows.items()}


def physical_name(stem: str, unique: str, max_length: int) -> str:
    """A name for a service that allows only small letters and digits and wants it unique in the whole world.

    `unique` is the resource group's id: its subscription and random suffix make two stacks of one name differ.
    """
    letters = re.sub("[^a-z0-9]", "", stem.lower())
    letters = letters if letters[:1].isalpha() else f"t{letters}"
    return letters[: max_length - 8] + hashlib.sha256(unique.encode()).hexdigest()[:8]


class Gpu(ManagedGpuSettings):
    """The GPU pool: one scale set, which is what puts its nodes on one InfiniBand network.

    `driver` is who installs the GPU driver: `aks` (with the device plugin's chart) or `operator` (the pool has no
    driver of its own); unset, the operator on InfiniBand, where GPUDirect needs the nvidia-peermem module that AKS does
    not load, and AKS elsewhere. `zone` is `1`, `2`, `3` or the node label's spelling `eastus-1`; unset, Azure's choice.
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
    """What `job.launcher azureml` reads: Azure Machine Learning runs the job, and there is no cluster.

    `idle_minutes` is how long machines stay after a job, in case another comes. `endpoint` is the resource manager's
    address, another one in Azure's sovereign clouds.
    """

    idle_minutes: int = Field(5, ge=1, le=24 * 60)
    endpoint: str = Field("https://management.azure.com", pattern=r"^https://[^/]+$")


class System(Section):
    """The pool that holds everything but training: operators, Prometheus, the cluster's own pods."""

    instance_type: str = Field("Standard_D4ds_v5", examples=["Standard_D4ds_v5"])
    num_nodes: int = Field(2, ge=1, le=100)


class Kubernetes(Section):
    """The control plane: its version, who administers it and how they log in.

    `admin_group_ids` are Entra groups; without any, whoever runs `pulumi up` administers the cluster. A minor version
    follows its patches. `login` is how kubelogin gets a token. A key (`kms_key_id`, its full address with the version)
    of a vault (`kms_vault_id`) encrypts secrets in etcd; without one, Azure's own key does. `host_encryption` covers
    the nodes' disks and caches and needs the feature EncryptionAtHost in the subscription.
    """

    version: str = Field("1.35", pattern=r"^1\.\d+(\.\d+)?$", examples=["1.35"])
    admin_group_ids: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")], ...] = ()
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
        """A key and its vault come together."""
        for key, other in (("kms_key_id", "kms_vault_id"), ("kms_vault_id", "kms_key_id")):
            if getattr(self, other) and not getattr(self, key):
                example = str((type(self).model_fields[key].examples or [""])[0])
                full = f"kubernetes.{key}"
                yield Problem(
                    full, f"missing beside kubernetes.{other}", f"for example {example}", fix_by_setting(full, example)
                )


class Network(NetworkSettings):
    """The VNet and its three subnets, the overlay's ranges, and who may come in.

    Unset subnets are carved from `cidr`: half for nodes, an eighth each for NetApp and private endpoints. Without
    `authorized_cidrs` the API server, the registry and the storage account have private addresses only, and `pulumi up`
    must run where the VNet is reached; AKS cannot turn a private cluster into a public one later. `proximity_placement`
    puts the GPU nodes into one data centre; unset, it does so for sizes without InfiniBand, whose nodes talk TCP. One
    InfiniBand network already is one data centre, and a reservation, which refuses the group, has chosen its own.
    """

    nodes_cidr: Cidr | None = Field(None, examples=["10.0.0.0/17"])
    netapp_cidr: Cidr | None = Field(None, examples=["10.0.128.0/19"])
    endpoints_cidr: Cidr | None = Field(None, examples=["10.0.160.0/19"])
    pods_cidr: Cidr = "10.244.0.0/16"
    services_cidr: Cidr = "10.245.0.0/16"
    proximity_placement: bool | None = None

    @property
    def subnets(self) -> dict[str, str]:
        """Each subnet's range by its key, given or carved."""
        outer = IPv4Network(self.cidr)
        half, eighths = next(outer.subnets()), list(outer.subnets(prefixlen_diff=3))
        return {
            "network.nodes_cidr": self.nodes_cidr or str(half),
            "network.netapp_cidr": self.netapp_cidr or str(eighths[4]),
            "network.endpoints_cidr": self.endpoints_cidr or str(eighths[5]),
        }

    def problems(self, num_nodes: int) -> Iterable[Problem]:
        """Ranges that Azure or AKS would refuse, for a cluster of at most `num_nodes`."""
        # One part in eight must hold NetApp's subnet (/28), half of it the nodes with Azure's five addresses.
        least = 128 if self.nodes_cidr else max(128, 2 * (num_nodes + 5))
        small = checks.holds("network.cidr", self.cidr, least, f"{num_nodes} nodes, NetApp and private endpoints", 0)
        yield from small
        if not small:
            yield from _subnet_problems(self, num_nodes)
        yield from _range_problems(self, num_nodes)
        yield from _unreachable(self.authorized_cidrs)


def _subnet_problems(network: Network, num_nodes: int) -> Iterable[Problem]:
    """What is wrong with each subnet that was given; the range proposed instead is free and within the VNet."""
    ranges = network.subnets
    needs = {
        "network.nodes_cidr": (num_nodes, "the nodes"),
        "network.netapp_cidr": (8, "NetApp, which wants a /28 at least"),
        "network.endpoints_cidr": (8, "the private endpoints"),
    }
    given = {key: cidr for key, cidr in ranges.items() if getattr(network, key.removeprefix("network."))}
    for key, cidr in given.items():
        others = {name: other for name, other in ranges.items() if name != key}
        found = [*checks.inside(key, cidr, "network.cidr", network.cidr), *checks.holds(key, cidr, *needs[key])]
        found += _overlaps(key, cidr, others)
        if found:
            prefix = min(IPv4Network(cidr).prefixlen, _prefix(needs[key][0] + 5))
            ranges[key], problem = _moved(found[0], prefix, network.cidr, others.values())
            yield problem


def _range_problems(network: Network, num_nodes: int) -> Iterable[Problem]:
    """What is wrong with the VNet's, the pods' and the services' ranges beside each other."""
    pods, services = "network.pods_cidr", "network.services_cidr"
    ranges = {"network.cidr": network.cidr, pods: network.pods_cidr, services: network.services_cidr}
    sized = {pods: checks.holds(pods, network.pods_cidr, 256 * num_nodes, f"a /24 for each of {num_nodes} nodes", 0)}
    for number, (key, cidr) in enumerate(list(ranges.items())):
        before = dict(list(ranges.items())[:number])
        found = [*_reserved(key, cidr), *_overlaps(key, cidr, before), *sized.get(key, ())]
        if found:
            prefix = min(IPv4Network(cidr).prefixlen, _prefix(256 * num_nodes) if key == pods else 32)
            others = [other for name, other in ranges.items() if name != key]
            ranges[key], problem = _moved(found[0], prefix, "10.0.0.0/8", others)
            yield problem


def _prefix(num_addresses: int) -> int:
    """The longest prefix that holds so many addresses."""
    return 32 - (num_addresses - 1).bit_length()


def _overlaps(key: str, cidr: str, others: Mapping[str, str]) -> list[Problem]:
    return [problem for name, other in others.items() for problem in checks.disjoint({name: other, key: cidr})]


def _moved(problem: Problem, prefix: int, outer: str, taken: Iterable[str]) -> tuple[str, Problem]:
    """The range to use instead, the first of this size within `outer` that is free, and the problem with its fix.

    Ranges are moved one after the other, each seeing where the one before went, or two fixes would meet.
    """
    used = [IPv4Network(cidr) for cidr in taken]
    within = IPv4Network(outer)
    candidates = within.subnets(new_prefix=prefix) if prefix >= within.prefixlen else iter(())
    free = next((one for one in candidates if not any(one.overlaps(network) for network in used)), None)
    if free is None:
        return str(problem.value), dataclasses.replace(problem, fix=fix_by_removing(problem.key))
    return str(free), dataclasses.replace(problem, fix=fix_by_setting(problem.key, free))


def _reserved(key: str, cidr: str) -> list[Problem]:
    """Ranges that AKS keeps for itself; the fix is the caller's."""
    met = [kept for kept in _RESERVED if IPv4Network(kept).overlaps(IPv4Network(cidr))]
    return [Problem(key, f"meets {kept}, which AKS keeps for itself", "another range", "", cidr) for kept in met]


def _unreachable(authorized: Sequence[str]) -> Iterable[Problem]:
    """Private ranges never reach a public address; the storage account refuses them."""
    for index, cidr in enumerate(authorized):
        if any(IPv4Network(cidr).subnet_of(IPv4Network(private)) for private in _PRIVATE):
            key = f"network.authorized_cidrs[{index}]"
            wrong = "a private range, which never comes in from the internet"
            yield Problem(
                key, wrong, "a public range; private networks are peered with the VNet", fix_by_removing(key), cidr
            )


class Storage(ManagedStorageSettings):
    """A NetApp pool with one volume of the same size, and the container of checkpoints.

    The pool is always deleted with the stack; `on_destroy` is about the container. `size_gib` comes in whole TiB, and
    with `tier` decides the speed: 16, 64 or 128 MiB/s for each TiB.
    """

    size_gib: int = Field(2048, gt=0)
    tier: Tier = "Premium"

    @property
    def size_bytes(self) -> int:
        """What the API takes: bytes, for the pool and for the volume."""
        return self.size_gib * 2**30

    @property
    def throughput_mibps(self) -> int:
        """What the volume really gives."""
        return self.size_gib * MIBPS_PER_TIB[self.tier] // _TIB_IN_GIB

    def problems(self) -> Iterable[Problem]:
        """Sizes that no pool has."""
        whole = -(-self.size_gib // _TIB_IN_GIB) * _TIB_IN_GIB
        legal = f"{_TIB_IN_GIB}, {2 * _TIB_IN_GIB}, {3 * _TIB_IN_GIB} ... {_MAX_VOLUME_GIB} (whole TiB, 1 to 100)"
        nearest = min(whole, _MAX_VOLUME_GIB)
        yield from checks.size_step(
            "storage.size_gib", self.size_gib, legal, None if nearest == self.size_gib else nearest
        )


class Monitoring(Section):
    """Azure's own Prometheus and Grafana, beside what `addons.monitoring` installs in the cluster.

    Grafana has a private endpoint; `public_grafana` opens its address to the internet, behind Entra's log-in.
    """

    managed: bool = True
    public_grafana: bool = False


class Settings(ManagedStackSettings):
    """All keys of a stack on Azure."""

    provider_keys: ClassVar[Mapping[str, str]] = {"location": "azure-native:location"}
    services: ClassVar[tuple[str, ...]] = ("azureml",)
    of_clusters: ClassVar[tuple[str, ...]] = (
        *ManagedStackSettings.of_clusters,
        *("kubernetes", "system", "monitoring", "storage.tier", "gpu.driver", "gpu.zone"),
        *(f"network.{key}" for key in ("nodes_cidr", "netapp_cidr", "pods_cidr", "services_cidr")),
        "network.proximity_placement",
    )
    for_services: ClassVar[tuple[str, ...]] = ("azureml",)

    location: str = Field(pattern=r"^[a-z][a-z0-9]+$", examples=["eastus"])
    gpu: Gpu
    system: System = System()
    kubernetes: Kubernetes = Kubernetes()
    network: Network = Network()
    storage: Storage = Storage()
    monitoring: Monitoring = Monitoring()
    azureml: AzureML = AzureML()

    @property
    def instance(self) -> catalog.InstanceType:
        """The GPU nodes' row of the catalog."""
        return catalog.instance(self.cloud, self.gpu.instance_type)

    @property
    def infiniband(self) -> bool:
        """Whether the GPU nodes have InfiniBand cards."""
        return self.instance.num_network_cards > 0

    @property
    def driver(self) -> Driver:
        """Who installs the GPU driver."""
        return self.gpu.driver or ("operator" if self.infiniband else "aks")

    @property
    def zones(self) -> list[str] | None:
        """The zone of the GPU nodes and of the volume, as Azure counts; None leaves it to Azure."""
        return [self.gpu.zone.rpartition("-")[2]] if self.gpu.zone else None

    @property
    def has_zones(self) -> bool:
        """Whether the region is made of availability zones."""
        return self.location not in _WITHOUT_ZONES

    @property
    def proximity_placement(self) -> bool:
        """Whether the GPU nodes share a placement group."""
        chosen = self.network.proximity_placement
        return chosen if chosen is not None else not self.infiniband and self.gpu.capacity != "reservation"

    @property
    def required_features(self) -> tuple[str, ...]:
        """Features that the subscription must have registered before `pulumi up`."""
        if self.service:
            return ()
        fabric = ("Microsoft.ContainerService/AKSInfinibandSupport",) if self.infiniband else ()
        return fabric + (("Microsoft.Compute/EncryptionAtHost",) if self.kubernetes.host_encryption else ())

    @property
    def num_private_endpoints(self) -> int:
        """Blob, DFS and the registry; Grafana where it is managed."""
        return 4 if self.monitoring.managed else 3

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections."""
        yield from super().problems()
        if self.service:
            yield from self._service_problems()
            return
        # The system pool's upgrade brings one node more.
        most = max(self.gpu.nodes.desired, self.gpu.nodes.max)
        yield from self.network.problems(most + self.system.num_nodes + 1)
        yield from self.storage.problems()
        yield from self.kubernetes.problems()
        yield from checks.one_of("system.instance_type", self.system.instance_type, prices("system"))
        yield from self._zone_problems()
        if self.network.proximity_placement and self.gpu.capacity == "reservation":
            key = "network.proximity_placement"
            yield Problem(
                key, "beside a capacity reservation, which refuses it", "false or unset", fix_by_removing(key), True
            )

    def _service_problems(self) -> Iterable[Problem]:
        """What Azure Machine Learning's machines cannot be, and addresses that the firewalls would refuse."""
        yield from self.network.problems(num_nodes=0)
        if self.gpu.capacity == "reservation":
            key, wrong = "gpu.capacity", f"{self.service} takes no machines from a capacity reservation"
            yield Problem(key, wrong, "on_demand | spot", fix_by_setting(key, "on_demand"), "reservation")

    def _zone_problems(self) -> Iterable[Problem]:
        """A zone is a number from 1 to 3 of the stack's own region."""
        zone, key = self.gpu.zone, "gpu.zone"
        if zone is None:
            return
        if not self.has_zones:
            yield Problem(key, f"{self.location} has no availability zones", "no zone", fix_by_removing(key), zone)
        elif zone not in {f"{prefix}{number}" for prefix in ("", f"{self.location}-") for number in "123"}:
            wrong, legal = f"not a zone of {self.location}", f"1 | 2 | 3 (or {self.location}-1 ...)"
            yield Problem(key, wrong, legal, fix_by_setting(key, 1), zone)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[CostLine]:
        """GPU nodes, control plane, system nodes, NetApp, and what the private network costs even when idle."""
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
    """What is billed beside Azure Machine Learning whether a job runs or not: the registry, and private addresses."""
    counts = {"container registry (Premium)": 1, "private endpoint": 3}
    return [CostLine(what, count, fixed[what]) for what, count in counts.items()]
