"""Simulated Azure: identifiers, refused requests, replacements and deletion rules of the types in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import simulated_aks
import simulated_registry
from engine_world import ACTIVE, Inputs, Refused, Resource, Rules, World
from simulated_aks import CLUSTER as _CLUSTER
from simulated_aks import POOL as _AGENTS

_A = "azure-native:"
_TIB = 2**40
_SUBNET, _NSG = f"{_A}network:Subnet", f"{_A}network:NetworkSecurityGroup"
_POOL, _VOLUME = f"{_A}netapp:CapacityPool", f"{_A}netapp:CapacityPoolVolume"
_GROUP, _ACCOUNT = f"{_A}resources:ResourceGroup", f"{_A}netapp:Account"
#: The status of an account or pool that has not noticed yet that what it contained is gone, and how long that takes.
_BUSY, _BUSY_MINUTES = "BUSY", 1.0
_LEVELS = ("Standard", "Premium", "Ultra", "Flexible")

#: Inputs that name the containers of a resource, outermost first. For types in `_OWN_NAME` the last is its own name.
_PATH = (
    "virtualNetworkName",
    "subnetName",
    "accountName",
    "poolName",
    "volumeName",
    "containerName",
    "managementPolicyName",
    "resourceName",
    "agentPoolName",
    "configName",
    "registryName",
    "workspaceName",
    "privateZoneName",
    "privateEndpointName",
)
#: Types whose own name is among `_PATH`.
_OWN_NAME = {
    _SUBNET,
    _POOL,
    _VOLUME,
    _AGENTS,
    f"{_A}containerregistry:Registry",
    f"{_A}containerservice:MaintenanceConfiguration",
    f"{_A}dashboard:Grafana",
    f"{_A}privatedns:PrivateZone",
    f"{_A}storage:BlobContainer",
    f"{_A}storage:ManagementPolicy",
    f"{_A}storage:StorageAccount",
}


def identity(token: str, name: str, inputs: Inputs) -> str:
    """Return the resource's path below the subscription."""
    if token == _GROUP:
        return f"/subscriptions/0/resourceGroups/{name}"
    parts = [str(inputs[key]) for key in _PATH if inputs.get(key)]
    own = [] if token in _OWN_NAME else [name]
    scope = inputs.get("scope") or inputs.get("resourceUri")
    group = scope or f"/subscriptions/0/resourceGroups/{inputs.get('resourceGroupName')}"
    kind = token.removeprefix(_A).replace(":", "/")
    return f"{group}/providers/Microsoft.{kind}/{'/'.join([*parts, *own])}"


def _pool_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    # https://learn.microsoft.com/en-us/azure/azure-netapp-files/azure-netapp-files-resource-limits
    size = inputs["size"]
    if not isinstance(size, (int, float)) or size < _TIB or size % _TIB:
        yield "size", "must be a whole number of TiB, in bytes, at least 1 TiB"
    if inputs.get("serviceLevel") not in _LEVELS:
        yield "serviceLevel", f"must be one of {_LEVELS}"
    if inputs.get("qosType", "Auto") not in ("Auto", "Manual"):
        yield "qosType", "must be Auto or Manual"


def _volume_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    size = inputs["usageThreshold"]
    if not isinstance(size, (int, float)) or not 50 * 2**30 <= size <= 100 * _TIB:
        yield "usageThreshold", "must be 50 GiB to 100 TiB, in bytes"
    if not set(inputs.get("protocolTypes", ["NFSv3"])) <= {"NFSv3", "NFSv4.1", "CIFS"}:
        yield "protocolTypes", "must be NFSv3, NFSv4.1 or CIFS"
    if inputs.get("networkFeatures", "Standard") not in ("Basic", "Standard"):
        yield "networkFeatures", "must be Basic or Standard"


def _pool_of(world: World, inputs: Inputs) -> Resource:
    for pool in world.of_type(_POOL):
        if all(pool.inputs[key] == inputs[key] for key in ("accountName", "poolName")):
            return pool
    raise Refused(f"ResourceNotFound: no capacity pool {inputs['accountName']}/{inputs['poolName']}")


def _volume_fits(world: World, inputs: Inputs) -> None:
    if inputs["usageThreshold"] > _pool_of(world, inputs).inputs["size"]:
        raise Refused("PoolSizeTooSmall: the volume is larger than its pool")
    subnet = world.find(_SUBNET, inputs["subnetId"])
    services = [one.get("serviceName") for one in (subnet.inputs.get("delegations") or [])] if subnet else []
    if "Microsoft.NetApp/volumes" not in services:
        raise Refused("NoDelegatedSubnet: the subnet is not delegated to Microsoft.NetApp/volumes")


def _volumes_of(world: World, pool: Inputs) -> list[Resource]:
    keys = ("accountName", "poolName")
    return [one for one in world.of_type(_VOLUME) if all(one.inputs[key] == pool[key] for key in keys)]


def _pool_updated(world: World, resource: Resource, inputs: Inputs) -> None:
    used = sum(volume.inputs["usageThreshold"] for volume in _volumes_of(world, inputs))
    if inputs["size"] < used:
        raise Refused(f"PoolSizeTooSmall: the pool holds volumes of {used} bytes, its size cannot be {inputs['size']}")


def _pool_deleted(world: World, resource: Resource) -> None:
    for volume in _volumes_of(world, resource.inputs):
        raise Refused(f"CannotDeleteResource: {resource.id} has nested resources, {volume.name}")
    _check_idle(resource)


def _check_idle(resource: Resource) -> None:
    if resource.status == _BUSY:
        raise Refused(
            f"CannotDeleteResource: Can not delete resource before nested resources are deleted: {resource.id}"
        )


def _busy_after_a_deletion(parents: str, keys: tuple[str, ...]) -> Callable[[World, Resource], None]:
    """Keep what contained a deleted resource busy for a moment: azure-sdk-for-go#6485, #6374."""

    def deleted(world: World, resource: Resource) -> None:
        for parent in world.of_type(parents):
            names = {parent.computed["name"], *(parent.inputs.get(key) for key in keys)}
            if resource.inputs[keys[-1]] in names:
                parent.status = _BUSY
                world.later(_BUSY_MINUTES, partial(setattr, parent, "status", ACTIVE))

    return deleted


def _account_of_endpoint(inputs: Inputs) -> str | None:
    """Return the lock of a storage account, which accepts one private endpoint at a time.

    StorageAccountOperationInProgress, Azure/bicep-registry-modules#6001. The provider retries a conflict only with the
    code AnotherOperationInProgress (pulumi-azure-native, client_azcore.go, shouldRetryConflict).
    """
    targets = [str(one["privateLinkServiceId"]) for one in inputs["privateLinkServiceConnections"]]
    return next((f"endpoints of {one}" for one in targets if ".storage/StorageAccount/" in one), None)


def _group_deleted(world: World, resource: Resource) -> None:
    """Remove everything in the resource group."""
    for inside in [one for one in world.resources.values() if one.id.startswith(f"{resource.id}/")]:
        world.remove(inside)


def _cluster_deleted(world: World, resource: Resource) -> None:
    for pool in world.of_type(_AGENTS):
        if pool.inputs["resourceName"] in resource.identifiers:
            world.remove(pool)


def _nested(*types: str) -> dict[str, str]:
    return dict.fromkeys(types, "CannotDeleteResource: nested resources exist")


def _subnets_lock(inputs: Inputs) -> str:
    """Return the lock of the VNet: it allows one change of its subnets at a time."""
    return f"subnets of {inputs['virtualNetworkName']}"


_IN_USE = "InUseSubnetCannotBeDeleted"

RULES: Mapping[str, Rules] = {
    _GROUP: Rules(("location", "resourceGroupName"), on_delete=_group_deleted),
    f"{_A}network:VirtualNetwork": Rules(
        ("location", "virtualNetworkName"), _nested(_SUBNET, f"{_A}privatedns:VirtualNetworkLink")
    ),
    _SUBNET: Rules(
        ("subnetName", "virtualNetworkName"),
        dict.fromkeys((_CLUSTER, _AGENTS, _VOLUME, f"{_A}network:PrivateEndpoint"), _IN_USE),
        lock_key=_subnets_lock,
    ),
    _NSG: Rules(("location",), {_SUBNET: "InUseNetworkSecurityGroupCannotBeDeleted"}),
    f"{_A}network:NatGateway": Rules(("location", "sku"), {_SUBNET: "NatGatewayInUseBySubnet"}),
    f"{_A}network:PublicIPAddress": Rules(
        ("location", "sku", "publicIPAllocationMethod"), {f"{_A}network:NatGateway": "PublicIPAddressCannotBeDeleted"}
    ),
    f"{_A}network:PrivateEndpoint": Rules(("subnet", "privateLinkServiceConnections"), lock_key=_account_of_endpoint),
    f"{_A}privatedns:PrivateZone": Rules(
        ("privateZoneName",), _nested(f"{_A}privatedns:VirtualNetworkLink", f"{_A}network:PrivateDnsZoneGroup")
    ),
    f"{_A}privatedns:VirtualNetworkLink": Rules(("privateZoneName", "virtualNetwork")),
    _ACCOUNT: Rules(
        ("accountName", "location"), _nested(_POOL), on_delete=lambda world, resource: _check_idle(resource)
    ),
    _POOL: Rules(
        ("accountName", "poolName", "serviceLevel"),
        problems=_pool_problems,
        on_update=_pool_updated,
        on_delete=_pool_deleted,
        on_deleted=_busy_after_a_deletion(_ACCOUNT, ("accountName",)),
    ),
    _VOLUME: Rules(
        (
            "accountName",
            "creationToken",
            "networkFeatures",
            "poolName",
            "protocolTypes",
            "securityStyle",
            "subnetId",
            "volumeName",
            "zones",
        ),
        problems=_volume_problems,
        on_create=_volume_fits,
        on_update=lambda world, resource, inputs: _volume_fits(world, inputs),
        on_deleted=_busy_after_a_deletion(_POOL, ("poolName",)),
    ),
    _CLUSTER: Rules(
        (
            "dnsPrefix",
            "location",
            "networkProfile.podCidr",
            "networkProfile.serviceCidr",
            "nodeResourceGroup",
            "resourceName",
        ),
        problems=simulated_aks.cluster_problems,
        on_created=simulated_aks.cluster_created,
        on_updated=simulated_aks.cluster_updated,
        on_delete=_cluster_deleted,
    ),
    _AGENTS: Rules(
        (
            "agentPoolName",
            "availabilityZones",
            "gpuProfile",
            "osDiskSizeGB",
            "proximityPlacementGroupID",
            "resourceName",
            "scaleSetPriority",
            "vmSize",
            "vnetSubnetID",
        ),
        on_create=simulated_aks.pool_created,
        on_update=simulated_aks.pool_updated,
    ),
    f"{_A}compute:ProximityPlacementGroup": Rules(
        ("location",), {_AGENTS: "OperationNotAllowed: used by virtual machines"}
    ),
    f"{_A}authorization:RoleAssignment": Rules(("principalId", "roleDefinitionId", "scope")),
    f"{_A}storage:StorageAccount": Rules(("accountName", "isHnsEnabled", "kind")),
    f"{_A}storage:BlobContainer": Rules(("accountName", "containerName")),
    f"{_A}containerregistry:Registry": Rules(
        ("registryName",), computed=lambda name, inputs: {"loginServer": simulated_registry.azure_host()}
    ),
    f"{_A}monitor:DataCollectionEndpoint": Rules(
        ("location",), {f"{_A}monitor:DataCollectionRule": "the endpoint is linked to a rule"}
    ),
    f"{_A}monitor:DataCollectionRule": Rules(
        ("location",), {f"{_A}monitor:DataCollectionRuleAssociation": "the rule has associations, delete them first"}
    ),
}
