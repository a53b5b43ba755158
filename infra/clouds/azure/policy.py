"""What the policy pack must know about Azure resource types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infra.policy_facts import (
    CloudPolicy,
    NodePool,
    Props,
    Resource,
    dicts,
    listed,
    number,
    open_ranges,
    require_flag,
)

_CLUSTER = "azure-native:containerservice:ManagedCluster"
_POOL = "azure-native:containerservice:AgentPool"

#: https://learn.microsoft.com/azure/role-based-access-control/built-in-roles
_ADMIN_ROLES = {
    "8e3af657-a8ff-443c-a75c-2fe8c4bcb635": "Owner",
    "b24988ac-6180-42a0-ab88-20f7382dd24c": "Contributor",
    "18d7d88d-d35e-4fb5-a5c3-7773c20a72d9": "User Access Administrator",
    "f58310d9-a9f6-439a-9e8d-f62e7b41a168": "Role Based Access Control Administrator",
}


def _encrypted_cluster(props: Props) -> Iterable[str]:
    for pool in dicts(props.get("agentPoolProfiles")):
        yield from require_flag("enableEncryptionAtHost", f"disks of pool {pool.get('name')}")(pool)


def _open_group(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("securityRules")) or [props]:
        if str(rule.get("access")) == "Allow" and str(rule.get("direction")) == "Inbound":
            sources = listed(rule.get("sourceAddressPrefix")) + listed(rule.get("sourceAddressPrefixes"))
            yield from open_ranges(sources, f"rule {rule.get('name')} lets in")


def _open_cluster(props: Props) -> Iterable[str]:
    access = props.get("apiServerAccessProfile") or {}
    if not access.get("enablePrivateCluster") and "authorizedIPRanges" not in access:
        yield "the API server is open to the internet: set enablePrivateCluster, or authorizedIPRanges"
    yield from open_ranges(listed(access.get("authorizedIPRanges")), "the API server is open to")
    for pool in dicts(props.get("agentPoolProfiles")):
        yield from _public_pool(pool)


def _public_pool(props: Props) -> Iterable[str]:
    if props.get("enableNodePublicIP"):
        yield "nodes get public addresses: set enableNodePublicIP to false"


def _open_service(props: Props) -> Iterable[str]:
    config = props.get("properties") or props
    rules = config.get("networkRuleSet") or config.get("networkAcls") or {}
    if config.get("publicNetworkAccess", "Enabled") != "Disabled" and rules.get("defaultAction") != "Deny":
        yield "open to the internet: set publicNetworkAccess to Disabled, or the rules' defaultAction to Deny"
    if config.get("allowBlobPublicAccess"):
        yield "blobs may be made public: set allowBlobPublicAccess to false"
    ranges = [rule.get("value") or rule.get("iPAddressOrRange") for rule in dicts(rules.get("ipRules"))]
    yield from open_ranges(ranges, "lets in")


def _assignment(props: Props) -> Iterable[str]:
    name = _ADMIN_ROLES.get(str(props.get("roleDefinitionId")).rpartition("/")[2].lower())
    if name:
        yield f"role {name}: assign a narrower one"


def _definition(props: Props) -> Iterable[str]:
    for permission in dicts(props.get("permissions")):
        for action in listed(permission.get("actions")) + listed(permission.get("dataActions")):
            if str(action) == "*" or (str(action).endswith("/*") and str(action).count("/") < 2):
                yield f"action {action}: name the actions that are needed"


def _agent_pool(props: Props, _: Sequence[Resource] = ()) -> Iterable[NodePool]:
    count = props.get("maxCount") if props.get("enableAutoScaling") else props.get("count")
    yield NodePool(str(props.get("vmSize")), number(count))


def _cluster_pools(props: Props, _: Sequence[Resource]) -> Iterable[NodePool]:
    for pool in dicts(props.get("agentPoolProfiles")):
        yield from _agent_pool(pool)


def _machine_learning(props: Props, _: Sequence[Resource]) -> Iterable[NodePool]:
    compute = (props.get("properties") or {}).get("properties") or {}
    yield NodePool(str(compute.get("vmSize")), number((compute.get("scaleSettings") or {}).get("maxNodeCount")))


POLICY = CloudPolicy(
    types=("azure-native:*",),
    encryption={
        _POOL: require_flag("enableEncryptionAtHost", "disks of the nodes"),
        _CLUSTER: _encrypted_cluster,
    },
    exposure={
        _POOL: _public_pool,
        _CLUSTER: _open_cluster,
        "azure-native:containerregistry:Registry": _open_service,
        "azure-native:dashboard:Grafana": _open_service,
        "azure-native:keyvault:Vault": _open_service,
        "azure-native:network:NetworkSecurityGroup": _open_group,
        "azure-native:network:SecurityRule": _open_group,
        "azure-native:storage:StorageAccount": _open_service,
    },
    rights={
        "azure-native:authorization:RoleAssignment": _assignment,
        "azure-native:authorization:RoleDefinition": _definition,
    },
    node_pools={
        _POOL: _agent_pool,
        _CLUSTER: _cluster_pools,
        "azure-native:machinelearningservices:Compute": _machine_learning,
    },
    untaggable=(
        "azure-native:authorization:*",
        "azure-native:containerservice:MaintenanceConfiguration",
        "azure-native:managedidentity:FederatedIdentityCredential",
        "azure-native:monitor:DataCollectionRuleAssociation",
        "azure-native:monitor:DiagnosticSetting",
        "azure-native:network:PrivateDnsZoneGroup",
        "azure-native:network:SecurityRule",
        "azure-native:network:Subnet",
        "azure-native:storage:BlobContainer",
        "azure-native:storage:ManagementPolicy",
    ),
    tags_within={
        f"azure-native:machinelearningservices:{kind}": "properties"
        for kind in ("Datastore", "EnvironmentContainer", "EnvironmentVersion", "Job")
    },
    internal_load_balancers=("service.beta.kubernetes.io/azure-load-balancer-internal",),
)
