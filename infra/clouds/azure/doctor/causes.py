"""Known problems on Azure: symptom, cause and fix of each. The table in the guide is generated from this list."""

from __future__ import annotations

from infra.findings.model import Cause

CREDENTIALS = Cause(
    "azure-credentials",
    "`Please run 'az login'`, `AADSTS...`",
    "this shell has no Azure login, or it has expired",
    "{login}",
    guide="az login",
)
SUBSCRIPTION = Cause(
    "azure-subscription",
    "`SubscriptionNotFound`, or resources appear in an unexpected subscription",
    "no subscription is chosen, it is not enabled, or these credentials do not reach it",
    "az account list --output table, then: az account set --subscription <id>",
    errors=("SubscriptionNotFound",),
)
ACCOUNT = Cause(
    "azure-account",
    "`stack ... was created in ..., and the credentials in use reach ...`",
    "another subscription is active than when the stack was created",
    "az account set --subscription {account}",
)
DENIED = Cause(
    "azure-denied",
    "a check ends with `AuthorizationFailed`",
    "these credentials may not read this; the role Reader on the subscription is enough",
    "az role assignment create --role Reader --assignee <you> --scope /subscriptions/{subscription}",
)
ROLES = Cause(
    "azure-roles",
    "`does not have authorization to perform action 'Microsoft.Authorization/roleAssignments/write'`",
    "`up` assigns roles, which Contributor may not do",
    "ask an owner of the subscription for: az role assignment create --assignee <you> --scope"
    " /subscriptions/{subscription} --role 'Role Based Access Control Administrator'",
    errors=("Microsoft.Authorization/roleAssignments/write",),
)
UNREACHABLE = Cause(
    "azure-unreachable",
    "a check ends with a time-out of management.azure.com",
    "this machine has no internet access",
    "behind a proxy set HTTPS_PROXY",
)
PROVIDER = Cause(
    "azure-provider",
    "`MissingSubscriptionRegistration`",
    "the subscription has never used this service: its resource provider is not registered",
    "az provider register --namespace {namespace} --wait",
    errors=("MissingSubscriptionRegistration",),
)
FEATURE = Cause(
    "azure-feature",
    "nodes without `rdma/ib`, or `SubscriptionNotEnabledEncryptionAtHost`",
    "a preview feature that the nodes need is not registered; it takes up to half an hour",
    "az feature register --namespace {namespace} --name {name}, then: az provider register --namespace {namespace}",
    errors=("SubscriptionNotEnabledEncryptionAtHost",),
)
OFFER = Cause(
    "azure-offer",
    "`SkuNotAvailable`",
    "the location, or the zone, does not offer this size to the subscription",
    "{fix}",
    guide="pulumi config set --path gpu.zone <zone>, or another location: az vm list-skus --size <size> --all",
    errors=("SkuNotAvailable",),
)
QUOTA = Cause(
    "azure-quota",
    "`QuotaExceeded` or `ErrCode_InsufficientVCPUQuota`, often with 0 as the limit",
    "the subscription's quota of cores for this family is too small; spot has one quota for all families",
    "request {value} cores of {family} in {location}: https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade"
    " (days for ND sizes), or fewer nodes: pulumi config set --path gpu.nodes.max {nodes}",
    errors=("QuotaExceeded", "InsufficientVCPUQuota"),
)
CAPACITY = Cause(
    "azure-capacity",
    "`AllocationFailed` or `OverconstrainedAllocationRequest` although the quota is large enough",
    "no such machine is free at present; a quota does not guarantee capacity",
    "another location, or a capacity reservation (gpu.capacity reservation)",
    errors=("AllocationFailed", "OverconstrainedAllocationRequest"),
)
RESERVATION = Cause(
    "azure-reservation",
    "`CapacityReservationGroup...` errors at the node pool",
    "the group was deleted, or has too few machines of this size in this location",
    "{fix}",
    guide="az capacity reservation group list, then set gpu.reservation_id and gpu.nodes.desired to match",
    errors=("CapacityReservationGroup",),
)
OVERLAP = Cause(
    "azure-overlap",
    "a peering between the VNets is rejected",
    "another VNet overlaps network.cidr; that is harmless until the two are connected",
    "before the first `up`: pulumi config set --path network.cidr {free}",
)
PRIVATE = Cause(
    "azure-private",
    "`up` waits at the first Kubernetes object and fails with `no such host`",
    "network.api_access is inside, so the API server has only a private address, and this machine is not in the VNet",
    "run in the VNet; or destroy, pulumi config rm --path network.api_access, and up, which asks for your address",
    errors=("no such host",),
)
NODES_BLOCKED = Cause(
    "azure-nodes-blocked",
    "AKS ends with `VMExtensionError_K8SAPIServerConnFail` or `exit status 51`",
    "the nodes cannot reach the API server: its authorized ranges lack the address of their NAT gateway, or a firewall"
    " blocks port 443",
    "pulumi up, which authorizes the address of the stack's own NAT gateway",
    errors=("K8SAPIServerConnFail",),
)
FORBIDDEN = Cause(
    "azure-forbidden",
    "the first Kubernetes objects fail with `Forbidden`",
    "a new role takes up to five minutes to reach the API server",
    "pulumi up, five minutes later",
    errors=("User does not have access to the resource in Azure",),
)
BUSY = Cause(
    "azure-busy",
    "`StorageAccountOperationInProgress`, or `CannotDeleteResource` with nested resources",
    "the service has not finished an earlier change of the same account",
    "the same command again",
    errors=("StorageAccountOperationInProgress", "before nested resources are deleted"),
)
DRAIN = Cause(
    "azure-drain",
    "`UpgradeFailed` with `PodDrainFailure`",
    "pods did not leave a node within 30 minutes of the start of its upgrade",
    "python -m workloads stop, then: az aks nodepool upgrade --name gpu --node-image-only, then: "
    "python -m workloads resume",
    errors=("PodDrainFailure",),
)
VERSION = Cause(
    "azure-version",
    "`K8sVersionNotSupported`, or an upgrade `is not allowed`",
    "the location does not offer the version, or the upgrade skips a minor version",
    "az aks get-versions --location {location} --output table, then: "
    "pulumi config set --path cluster.kubernetes_version {version}",
    errors=("K8sVersionNotSupported",),
)
PUSH = Cause(
    "azure-push",
    "the image's build ends with `failed to fetch oauth token` and 401 or 403",
    "the account of `up` may not push to the registry, or this machine's address is not in network.authorized_cidrs",
    "az role assignment create --role AcrPush --assignee <you> --scope <registry>, then: pulumi up",
    errors=("failed to fetch oauth token",),
)
EXISTING_NETWORK = Cause(
    "azure-existing-network",
    "with `network.existing`: `SubnetIsDelegated`, `InsufficientSubnetSize`, or zones with `overlapping namespaces`",
    "a subnet lacks a NAT gateway, a delegation, a rule or free addresses, or the VNet has a zone of the same name",
    "{fix}",
    guide="python -m infra doctor names the subnet and the `az` command for each",
    errors=("SubnetIsDelegated", "InsufficientSubnetSize", "overlapping namespaces"),
)
CAUSES = (
    CREDENTIALS, SUBSCRIPTION, ACCOUNT, DENIED, ROLES, UNREACHABLE, PROVIDER, FEATURE, OFFER, QUOTA, CAPACITY,
    RESERVATION, OVERLAP, PRIVATE, NODES_BLOCKED, FORBIDDEN, BUSY, DRAIN, VERSION,
    PUSH, EXISTING_NETWORK,
)  # fmt: skip
