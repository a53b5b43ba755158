"""Tests of simulated AKS and of the services around it: what they refuse, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_clouds
import pytest
from engine_world import ACTIVE, PartlyCreated, Refused, Resource, World
from simulated_aks import CLUSTER, POOL

A = "azure-native:"
GROUP, SUBNET, ROLE = f"{A}resources:ResourceGroup", f"{A}network:Subnet", f"{A}authorization:RoleAssignment"
ADMIN = "/providers/Microsoft.Authorization/roleDefinitions/b1ff04bb-8a4e-4dc4-8eb5-8693973ce19b"
NAMESPACE, RELEASE = "kubernetes:core/v1:Namespace", "kubernetes:helm.sh/v3:Release"
LAPTOP, NAT = "203.0.113.7/32", "20.0.0.4/32"


@pytest.fixture
def world() -> World:
    """Return a world with a resource group and the subnet of the nodes behind a NAT gateway."""
    return _with_network("stack-network-group")


def _with_network(group: str, location: str = "eastus") -> World:
    empty = World(engine_clouds.rules_of)
    empty.kubeconfig = "server: https://of.a.cloud"
    owner = empty.create(GROUP, group, {"location": location}).computed["name"]
    here = {"resourceGroupName": owner}
    address = empty.create(f"{A}network:PublicIPAddress", "address", here)
    nat = empty.create(f"{A}network:NatGateway", "nat", {**here, "publicIpAddresses": [{"id": address.id}]})
    subnet = {**here, "subnetName": "nodes", "virtualNetworkName": "vnet", "natGateway": {"id": nat.id}}
    empty.create(SUBNET, "nodes", subnet)
    return empty


def _cluster(world: World, *ranges: str, version: str = "1.35", **changed: Any) -> dict[str, Any]:
    (subnet,), group = world.of_type(SUBNET), world.of_type(GROUP)[0]
    access = {"authorizedIPRanges": list(ranges)} if ranges else {"enablePrivateCluster": True}
    return {
        "resourceGroupName": group.computed["name"],
        "kubernetesVersion": version,
        "identity": {"type": "UserAssigned", "userAssignedIdentities": ["identity"]},
        "apiServerAccessProfile": access,
        "agentPoolProfiles": [{"name": "system", "vnetSubnetID": subnet.id}],
        **changed,
    }


def _pool(cluster: Resource, **changed: Any) -> dict[str, Any]:
    scaling = {"enableAutoScaling": True, "minCount": 0, "count": 0, "maxCount": 4}
    group, name = cluster.inputs["resourceGroupName"], cluster.computed["name"]
    return {"resourceGroupName": group, "resourceName": name, "agentPoolName": "gpu", **scaling, **changed}


def test_nodes_cannot_reach_an_api_server_that_does_not_authorize_their_nat_gateway(world: World) -> None:
    with pytest.raises(PartlyCreated, match="K8SAPIServerConnFail"):
        world.create(CLUSTER, "stack-aks", _cluster(world, LAPTOP))
    (cluster,) = world.of_type(CLUSTER)
    assert cluster.status == "Failed"
    world.update(CLUSTER, cluster.id, _cluster(world, LAPTOP, NAT))
    assert cluster.status == ACTIVE, "AKS repairs it as soon as the ranges allow it"


def test_a_private_cluster_needs_no_ranges(world: World) -> None:
    assert world.create(CLUSTER, "stack-aks", _cluster(world)).status == ACTIVE


@pytest.mark.parametrize(("scope_of", "allowed"), [(GROUP, True), (CLUSTER, False)])
def test_a_role_takes_five_minutes_to_reach_the_api_server(world: World, scope_of: str, allowed: bool) -> None:
    world.machine = "10.0.0.4"

    def grant() -> None:
        scope = world.of_type(scope_of)[0].id
        world.create(ROLE, "admin", {"scope": scope, "principalId": "me", "roleDefinitionId": ADMIN})

    steps: list[Callable[[], object]] = [grant, lambda: world.create(CLUSTER, "stack-aks", _cluster(world))]
    for step in steps if scope_of == GROUP else reversed(steps):
        step()
    namespace = {"metadata": {"name": "training"}}
    if not allowed:
        with pytest.raises(Refused, match="Forbidden"):
            world.create(NAMESPACE, "training", namespace)
        world.clock.advance(5)
    world.create(NAMESPACE, "training", namespace)


def test_a_role_on_another_group_gives_no_access(world: World) -> None:
    world.machine = "10.0.0.4"
    other = world.create(GROUP, "other", {"location": "eastus"})
    world.create(ROLE, "admin", {"scope": other.id, "principalId": "me", "roleDefinitionId": ADMIN})
    world.create(CLUSTER, "stack-aks", _cluster(world))
    with pytest.raises(Refused, match="no role on the cluster"):
        world.create(NAMESPACE, "training", {"metadata": {"name": "training"}})


def test_an_upgrade_takes_one_minor_version_and_the_control_plane_first(world: World) -> None:
    cluster = world.create(CLUSTER, "stack-aks", _cluster(world, version="1.34"))
    pool = world.create(POOL, "gpu", _pool(cluster, orchestratorVersion="1.34"))
    with pytest.raises(Refused, match=r"from 1\.34 to 1\.36 is not allowed"):
        world.update(CLUSTER, cluster.id, _cluster(world, version="1.36"))
    with pytest.raises(Refused, match="NodePoolMcVersionIncompatible"):
        world.update(POOL, pool.id, _pool(cluster, orchestratorVersion="1.35"))
    world.update(CLUSTER, cluster.id, _cluster(world, version="1.35"))
    world.update(POOL, pool.id, _pool(cluster, orchestratorVersion="1.35"))


@pytest.mark.parametrize(("system", "gpu"), [("1.35", None), (None, "1.35")])
def test_a_request_for_the_cluster_names_the_versions_of_all_pools_or_of_none(
    world: World, system: str | None, gpu: str | None
) -> None:
    cluster = world.create(CLUSTER, "stack-aks", _cluster(world, version="1.35"))
    world.create(POOL, "gpu", _pool(cluster, orchestratorVersion="1.35"))
    versions = {"system": system} | ({"gpu": gpu} if gpu else {})
    profiles = [{"name": name, "orchestratorVersion": version} for name, version in versions.items()]
    with pytest.raises(Refused, match="must be all specified or all unspecified"):
        world.update(CLUSTER, cluster.id, _cluster(world, agentPoolProfiles=profiles))
    world.update(CLUSTER, cluster.id, _cluster(world, version="1.36"))


def test_a_version_that_no_region_has_is_refused(world: World) -> None:
    problems = engine_clouds.rules_of(CLUSTER).problems
    assert "K8sVersionNotSupported" in str(list(problems(_cluster(world, version="1.30"))))
    assert not list(problems(_cluster(world, version="1.36.2")))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"count": None}, "count is missing"),
        ({"count": None, "enableAutoScaling": False}, "count is missing"),
        ({"count": 5}, "within minCount and maxCount"),
        ({"count": 0, "minCount": 1}, "within minCount and maxCount"),
    ],
)
def test_a_pool_needs_a_size_within_its_limits(world: World, changed: dict[str, Any], error: str) -> None:
    cluster = world.create(CLUSTER, "stack-aks", _cluster(world))
    with pytest.raises(Refused, match=error):
        world.create(POOL, "gpu", _pool(cluster, **changed))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({}, "Cannot manually scale"),
        ({"count": None}, "count is missing"),
        ({"count": 2, "maxCount": 1}, "at most maxCount"),
        ({"count": 2, "maxCount": 8}, None),
        ({"count": 2, "minCount": 3}, None),
    ],
)
def test_an_update_of_an_autoscaled_pool_names_the_running_number_of_nodes(
    world: World, changed: dict[str, Any], error: str | None
) -> None:
    cluster = world.create(CLUSTER, "stack-aks", _cluster(world))
    pool = world.create(POOL, "gpu", _pool(cluster))
    pool.inputs = {**pool.inputs, "count": 2}
    if error is None:
        world.update(POOL, pool.id, _pool(cluster, **changed))
        return
    with pytest.raises(Refused, match=error):
        world.update(POOL, pool.id, _pool(cluster, **changed))


def test_the_derived_name_of_the_nodes_group_has_at_most_80_characters() -> None:
    name = "recommendation-prod"
    world = _with_network(f"{name}-network-group", "westeurope")
    with pytest.raises(Refused, match="node resource group name is too long"):
        world.create(CLUSTER, f"{name}-aks", _cluster(world))
    world.create(CLUSTER, f"{name}-aks", _cluster(world, nodeResourceGroup="short"))


def test_an_account_accepts_one_private_endpoint_at_a_time(world: World) -> None:
    lock = engine_clouds.rules_of(f"{A}network:PrivateEndpoint").lock_key
    account = world.create(f"{A}storage:StorageAccount", "account", {"accountName": "account"})

    def connection(target: str, kind: str) -> dict[str, Any]:
        return {"privateLinkServiceConnections": [{"privateLinkServiceId": target, "groupIds": [kind]}]}

    keys = {lock(connection(account.id, kind)) for kind in ("blob", "dfs")}
    assert len(keys) == 1
    assert None not in keys
    assert lock(connection("/registry", "registry")) is None


def test_netapp_refuses_for_a_while_to_delete_what_was_just_emptied(world: World) -> None:
    (group,) = world.of_type(GROUP)
    here = {"resourceGroupName": group.computed["name"]}
    account = world.create(f"{A}netapp:Account", "netapp", here)
    inside = {**here, "accountName": account.computed["name"], "poolName": "datasets"}
    pool = world.create(f"{A}netapp:CapacityPool", "pool", {**inside, "size": 2**40, "serviceLevel": "Premium"})
    delegated = {**here, "subnetName": "netapp", "virtualNetworkName": "vnet"}
    delegations = [{"serviceName": "Microsoft.NetApp/volumes"}]
    subnet = world.create(SUBNET, "netapp", {**delegated, "delegations": delegations})
    volume = {**inside, "volumeName": "datasets", "usageThreshold": 2**40, "subnetId": subnet.id}
    world.delete(f"{A}netapp:CapacityPoolVolume", world.create(f"{A}netapp:CapacityPoolVolume", "v", volume).id)
    for resource in (pool, account):
        with pytest.raises(Refused, match="before nested resources are deleted"):
            world.delete(resource.type, resource.id)
        world.clock.advance(1)
        world.delete(resource.type, resource.id)


@pytest.mark.parametrize(
    ("runtime", "operator", "error"),
    [(None, True, "CrashLoopBackOff"), ("nvidia", False, "not found"), ("nvidia", True, None)],
)
def test_the_gpu_exporter_starts_only_with_the_operators_runtime(
    world: World, runtime: str | None, operator: bool, error: str | None
) -> None:
    world.machine = "10.0.0.4"
    group = world.of_type(GROUP)[0]
    world.create(ROLE, "admin", {"scope": group.id, "principalId": "me", "roleDefinitionId": ADMIN})
    cluster = world.create(CLUSTER, "stack-aks", _cluster(world))
    world.create(POOL, "gpu", _pool(cluster, count=2, gpuProfile={"driver": "None"}))
    release = {"namespace": "default"}
    if operator:
        toolkit = {"toolkit": {"enabled": True}}
        world.create(RELEASE, "o", {**release, "chart": "gpu-operator", "name": "gpu-operator", "values": toolkit})
    values = {"runtimeClassName": runtime} if runtime else {}
    exporter = {**release, "chart": "dcgm-exporter", "name": "dcgm-exporter", "values": values}
    if error is None:
        world.create(RELEASE, "exporter", exporter)
        return
    with pytest.raises(Refused, match=error):
        world.create(RELEASE, "exporter", exporter)
