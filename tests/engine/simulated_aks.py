"""Simulated AKS: who reaches the API server and from when on, versions of control plane and pools, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network

from engine_values import at
from engine_world import ACTIVE, Inputs, PartlyCreated, Refused, Resource, World

_A = "azure-native:"
CLUSTER, POOL = f"{_A}containerservice:ManagedCluster", f"{_A}containerservice:AgentPool"
_ROLE, _GROUP = f"{_A}authorization:RoleAssignment", f"{_A}resources:ResourceGroup"
_ADMIN = "b1ff04bb-8a4e-4dc4-8eb5-8693973ce19b"
#: "New role assignments can take up to five minutes to propagate and be updated by the authorization server":
#: https://learn.microsoft.com/azure/aks/manage-azure-rbac
_ROLE_MINUTES = 5
#: https://learn.microsoft.com/azure/aks/supported-kubernetes-versions
_VERSIONS = ("1.34", "1.35", "1.36")
_RELEASE = "kubernetes:helm.sh/v3:Release"


def check_rights(world: World) -> None:
    """Refuse a caller whose role on the cluster, its group or its subscription has not reached the API server yet."""
    for cluster in world.of_type(CLUSTER):
        grants = [one for one in world.of_type(_ROLE) if _administers(one, cluster)]
        if not grants:
            raise Refused("Forbidden: the user has no role on the cluster")
        if min(one.created_at for one in grants) + _ROLE_MINUTES > world.now:
            raise Refused("Forbidden: User does not have access to the resource in Azure. Update role assignment")


def _administers(grant: Resource, cluster: Resource) -> bool:
    scope = str(grant.inputs["scope"])
    within = cluster.id == scope or cluster.id.startswith(f"{scope}/")
    return within and str(grant.inputs["roleDefinitionId"]).endswith(_ADMIN)


def cluster_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Refuse versions that no region has."""
    version = str(inputs.get("kubernetesVersion") or _VERSIONS[-1])
    if _minor(version) not in [_minor(one) for one in _VERSIONS]:
        yield "kubernetesVersion", f"K8sVersionNotSupported: Managed cluster is on version {version}"


def cluster_created(world: World, cluster: Resource) -> None:
    """Refuse a derived name that is too long, and fail after the cluster exists if its nodes cannot reach it."""
    _check_group_name(world, cluster)
    _check_nodes(world, cluster)


def cluster_updated(world: World, cluster: Resource, old: Inputs) -> None:
    """Upgrade by one minor version at most, and repair a cluster whose nodes can reach it now."""
    steps = _minor(str(cluster.inputs["kubernetesVersion"])) - _minor(str(old["kubernetesVersion"]))
    if not 0 <= steps <= 1:
        # https://learn.microsoft.com/azure/aks/upgrade-aks-cluster
        versions = f"from {old['kubernetesVersion']} to {cluster.inputs['kubernetesVersion']}"
        raise Refused(f"OperationNotAllowed: Upgrading Kubernetes version {versions} is not allowed")
    _check_pool_versions(world, cluster)
    _check_nodes(world, cluster)
    cluster.status = ACTIVE


def _check_pool_versions(world: World, cluster: Resource) -> None:
    """Refuse a request that names the versions of some pools and not of the others, whose own resources name them.

    hashicorp/terraform-provider-azurerm#23436, Azure/ARO-HCP#662, pulumi-azure-native#2094. Without any version AKS
    upgrades the control plane and no pool: Azure/AKS#2889.
    """
    profiles = {one["name"]: one.get("orchestratorVersion") for one in cluster.inputs["agentPoolProfiles"]}
    for pool in world.of_type(POOL):
        if pool.inputs["resourceName"] == cluster.computed["name"]:
            profiles.setdefault(pool.inputs["agentPoolName"], None)
    if any(profiles.values()) and not all(profiles.values()):
        message = "all Agent pools' OrchestratorVersion must be all specified or all unspecified"
        raise Refused(f"NotAllAgentPoolOrchestratorVersionSpecifiedAndUnchanged: Using managed cluster api, {message}")


def _check_group_name(world: World, cluster: Resource) -> None:
    """Refuse a name of the nodes' resource group of more than 80 characters; AKS derives it unless it is given.

    https://learn.microsoft.com/azure/aks/faq, naming restrictions
    """
    name = cluster.inputs.get("nodeResourceGroup")
    for group in world.of_type(_GROUP):
        if group.computed["name"] == cluster.inputs["resourceGroupName"]:
            name = name or f"MC_{group.computed['name']}_{cluster.computed['name']}_{group.inputs['location']}"
    if len(name or "") > 80:
        raise Refused(f"InvalidParameter: The length of the node resource group name is too long: {name}")


def _check_nodes(world: World, cluster: Resource) -> None:
    """Fail unless the authorized ranges include the addresses of the nodes' NAT gateway.

    MicrosoftDocs/azure-docs#111834. The nodes' extension ends with exit status 51:
    https://learn.microsoft.com/troubleshoot/azure/azure-kubernetes/error-codes/vmextensionerror-k8sapiserverconnfail
    """
    access = cluster.inputs.get("apiServerAccessProfile") or {}
    ranges = [IPv4Network(cidr) for cidr in access.get("authorizedIPRanges") or ()]
    if access.get("enablePrivateCluster") or not ranges:
        return
    for pool in cluster.inputs["agentPoolProfiles"]:
        for address in _outbound_addresses(world, pool.get("vnetSubnetID")):
            if not any(IPv4Address(address) in cidr for cidr in ranges):
                message = "CSE failed with 'VMExtensionError_K8SAPIServerConnFail', exit status 51: agents are unable"
                raise PartlyCreated(f"VMExtensionProvisioningError: {message} to establish connection", "Failed")


def _outbound_addresses(world: World, subnet: str | None) -> Iterator[str]:
    """Yield the public addresses of a subnet's NAT gateway; none for a subnet that this world does not know."""
    found = world.find(f"{_A}network:Subnet", subnet or "")
    gateway = at(found.inputs, "natGateway.id") if found else None
    for nat in world.of_type(f"{_A}network:NatGateway"):
        for address in nat.inputs["publicIpAddresses"] if nat.id == gateway else ():
            public = world.find(f"{_A}network:PublicIPAddress", address["id"])
            if public:
                yield public.computed["ipAddress"]


def pool_created(world: World, inputs: Inputs) -> None:
    """Refuse a pool without a number of nodes, outside its limits, or newer than the control plane.

    kubernetes-sigs/cluster-api-provider-azure#5947 has the message about the limits.
    """
    count = _require_count(inputs)
    if inputs.get("enableAutoScaling") and not inputs["minCount"] <= count <= inputs["maxCount"]:
        raise Refused(f"InvalidParameter: agentPoolProfile.count was {count}. It must be within minCount and maxCount")
    _check_version(world, inputs)


def pool_updated(world: World, pool: Resource, inputs: Inputs) -> None:
    """Refuse another number than the running one for a pool that the autoscaler owns, and a version above the cluster.

    terraform-provider-azurerm#4543, Azure/AKS#1627. A minimum may exceed the running number, a maximum may not be below
    it: azure-cli-extensions#1606.
    """
    count = _require_count(inputs)
    if inputs.get("enableAutoScaling") and pool.inputs.get("enableAutoScaling"):
        if count != pool.inputs.get("count", pool.inputs["minCount"]):
            message = "Please disable cluster autoscaler in the cluster to manually scale"
            raise Refused(
                f"Cannot manually scale AgentPool of an AKS cluster with cluster autoscaler enabled. {message}"
            )
        if count > inputs["maxCount"]:
            raise Refused(f"InvalidParameter: agentPoolProfile.count was {count}. It must be at most maxCount")
    _check_version(world, inputs)


def _require_count(inputs: Inputs) -> int:
    """Return the number of nodes, which every request needs, autoscaled or not.

    Azure/azure-service-operator#3220, pulumi-azure-native#2943; azurerm always sends it (#6094).
    """
    if inputs.get("count") is None:
        raise Refused("InvalidParameter: Required parameter properties.count is missing (null)")
    return int(inputs["count"])


def describe_cluster(world: World, arguments: Inputs) -> Inputs:
    """Return the pools of a cluster with the numbers of their nodes, as getManagedCluster does."""
    pools = [one.inputs for one in world.of_type(POOL) if one.inputs["resourceName"] == arguments["resourceName"]]
    profiles = [{**pool, "name": pool["agentPoolName"]} for pool in pools]
    for cluster in world.of_type(CLUSTER):
        if cluster.computed["name"] == arguments["resourceName"]:
            return {**arguments, "agentPoolProfiles": [*cluster.inputs["agentPoolProfiles"], *profiles]}
    raise Refused(f"ResourceNotFound: {arguments['resourceName']}")


#: The functions that read from this cloud.
CALLS: Mapping[str, Callable[[World, Inputs], Inputs]] = {
    "azure-native:containerservice:getManagedCluster": describe_cluster,
}


def _check_version(world: World, inputs: Inputs) -> None:
    """Refuse a pool that is newer than its control plane.

    https://learn.microsoft.com/azure/aks/manage-node-pools, validation rules for upgrades
    """
    version = inputs.get("orchestratorVersion")
    for cluster in world.of_type(CLUSTER):
        if cluster.computed["name"] != inputs["resourceName"] or not version:
            continue
        control_plane = str(cluster.inputs["kubernetesVersion"])
        if _minor(str(version)) > _minor(control_plane):
            versions = f"Node pool version {version} and control plane version {control_plane}"
            raise Refused(f"NodePoolMcVersionIncompatible: {versions} are incompatible")


def check_exporter(world: World, release: Resource) -> None:
    """Let Helm wait in vain for a GPU exporter whose pods cannot start on the pool's nodes.

    gpu-operator `transformToolkitCtrForCDI`: the NVIDIA runtime is not the default; dcgm-exporter#612.
    """
    operators = [one for one in world.of_type(_RELEASE) if one.inputs.get("chart") == "gpu-operator"]
    with_runtime = [one for one in operators if at(one.inputs, "values.toolkit.enabled")]
    without_driver = [one for one in world.of_type(POOL) if at(one.inputs, "gpuProfile.driver") == "None"]
    class_name = at(release.inputs, "values.runtimeClassName")
    if release.inputs.get("chart") != "dcgm-exporter" or not any(
        one.inputs.get("count", one.inputs["minCount"]) for one in without_driver
    ):
        return
    if not class_name:
        raise Refused("context deadline exceeded: DaemonSet dcgm-exporter: CrashLoopBackOff, ERROR_LIBRARY_NOT_FOUND")
    if not with_runtime:
        raise Refused(f'context deadline exceeded: pod rejected: RuntimeClass "{class_name}" not found')


def _minor(version: str) -> int:
    return int(version.split(".")[1])
