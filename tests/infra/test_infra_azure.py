"""Azure: each promise of its cloud in a sentence, seen from what the program registers."""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from ipaddress import IPv4Network
from typing import Any

import pytest
import yaml
from provider_mocks.recording import PROJECT, ROOT, Recording, Registration, record

from infra import clouds
from infra.clouds.azure import settings as azure
from infra.config.problems import Problem, SettingsError
from infra.contract import Identity
from infra.stack import parse
from workloads.settings import SECTIONS

Stack = Callable[..., Recording]

AKS = "azure-native:containerservice:ManagedCluster"
POOL = "azure-native:containerservice:AgentPool"
SUBNET = "azure-native:network:Subnet"
FIREWALL = "azure-native:network:NetworkSecurityGroup"
ROLE = "azure-native:authorization:RoleAssignment"
ACCOUNT = "azure-native:storage:StorageAccount"
CONTAINER = "azure-native:storage:BlobContainer"
REGISTRY = "azure-native:containerregistry:Registry"
NETAPP_POOL = "azure-native:netapp:CapacityPool"
NETAPP_VOLUME = "azure-native:netapp:CapacityPoolVolume"
GRAFANA = "azure-native:dashboard:Grafana"
PLACEMENT = "azure-native:compute:ProximityPlacementGroup"
RELEASE = "kubernetes:helm.sh/v3:Release"

TRIAL = {"gpu.instance_type": "Standard_NC4as_T4_v3"}
SPOT = {"gpu.capacity": "spot"}
SUBSCRIPTION = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/capacity/providers"
RESERVATION = f"{SUBSCRIPTION}/Microsoft.Compute/capacityReservationGroups/nd"
RESERVED = TRIAL | {"gpu.capacity": "reservation", "gpu.reservation_id": RESERVATION}
OPEN = {"network.authorized_cidrs": ["203.0.113.0/24", "198.51.100.7/32"]}

VAULT = f"{SUBSCRIPTION}/Microsoft.KeyVault/vaults/keys"
GROUP = "01234567-89ab-cdef-0123-456789abcdef"
#: Choices that do not touch each other, in one run: every run registers eighty resources.
CHOSEN: dict[str, object] = {
    "kubernetes.kms_key_id": "https://keys.vault.azure.net/keys/etcd/0123456789abcdef",
    "kubernetes.kms_vault_id": VAULT,
    "kubernetes.admin_group_ids": [GROUP],
    "monitoring.public_grafana": True,
    "namespace": "jobs",
    "storage.size_gib": 4096,
    "storage.tier": "Ultra",
    "gpu.zone": 2,
}
KEPT = {"storage.on_destroy": "keep", "storage.expire_checkpoints_after_days": 30}
DELETED = {"storage.on_destroy": "delete", "storage.expire_checkpoints_after_days": 30}

#: Built-in roles that reach far; each may be given on one resource only, never on a group or a subscription.
CONTRIBUTOR = "b24988ac-6180-42a0-ab88-20f7382dd24c"
OWNER = "8e3af657-a8ff-443c-a75c-2fe8c4bcb635"


def _releases(recording: Recording) -> dict[str, Any]:
    return {item.inputs["name"]: item.inputs["values"] for item in recording.of_type(RELEASE)}


def _subnet(recording: Recording, what: str) -> Registration:
    return recording.one(SUBNET, f"azure-network-{what}-subnet")


def _roles(recording: Recording) -> dict[str, Mapping[str, Any]]:
    return {item.name: item.inputs for item in recording.of_type(ROLE)}


# Network


def test_one_subnet_is_delegated_to_netapp_and_no_other(stack: Stack) -> None:
    recording = stack("azure")
    delegated = {
        item.name: [one["serviceName"] for one in item.inputs.get("delegations", [])]
        for item in recording.of_type(SUBNET)
    }
    assert delegated == {
        "azure-network-nodes-subnet": [],
        "azure-network-netapp-subnet": ["Microsoft.NetApp/volumes"],
        "azure-network-endpoints-subnet": [],
    }
    assert recording.one(NETAPP_VOLUME).inputs["subnetId"] == "azure-network-netapp-subnet-id"


def test_the_subnets_of_an_existing_stack_keep_their_ranges(stack: Stack) -> None:
    found = {item.name: item.inputs["addressPrefix"] for item in stack("azure").of_type(SUBNET)}
    assert found == {
        "azure-network-nodes-subnet": "10.0.0.0/17",
        "azure-network-netapp-subnet": "10.0.128.0/19",
        "azure-network-endpoints-subnet": "10.0.160.0/19",
    }, "a range that moves replaces its subnet, and everything in it"


def test_every_subnet_has_a_firewall_and_none_lets_the_internet_in(stack: Stack) -> None:
    recording = stack("azure")
    assert all(item.inputs["networkSecurityGroup"] for item in recording.of_type(SUBNET))
    rules = [rule for item in recording.of_type(FIREWALL) for rule in item.inputs["securityRules"]]
    inward = [rule for rule in rules if rule["access"] == "Allow" and rule["direction"] == "Inbound"]
    sources = {
        source
        for rule in inward
        for source in [rule.get("sourceAddressPrefix"), *rule.get("sourceAddressPrefixes", [])]
        if source
    }
    assert sources == {"10.0.0.0/17", "10.244.0.0/16", "VirtualNetwork"}


def test_pods_on_different_nodes_reach_each_other(stack: Stack) -> None:
    (rule,) = stack("azure").one(FIREWALL, "azure-network-nodes-nsg").inputs["securityRules"]
    assert "10.244.0.0/16" in rule["sourceAddressPrefixes"], (
        "the overlay's addresses are not part of the VNet, which is all that Azure's own rule admits"
    )


def test_only_the_nodes_reach_netapp_and_only_by_nfs(stack: Stack) -> None:
    recording = stack("azure")
    allowed, denied = recording.one(FIREWALL, "azure-network-netapp-nsg").inputs["securityRules"]
    assert (allowed["sourceAddressPrefix"], allowed["destinationPortRange"]) == ("10.0.0.0/17", "2049")
    assert (denied["access"], denied["sourceAddressPrefix"], denied["priority"]) == ("Deny", "*", 4096)
    (export,) = recording.one(NETAPP_VOLUME).inputs["exportPolicy"]["rules"]
    assert export["allowedClients"] == "10.0.0.0/17"
    assert export["hasRootAccess"] is False


def test_nodes_have_no_public_address_and_leave_through_the_nat_gateway(stack: Stack) -> None:
    recording = stack("azure")
    cluster = recording.one(AKS).inputs
    pools = [cluster["agentPoolProfiles"][0], recording.one(POOL).inputs]
    assert [pool["enableNodePublicIP"] for pool in pools] == [False, False]
    assert cluster["networkProfile"]["outboundType"] == "userAssignedNATGateway"
    assert _subnet(recording, "nodes").inputs["natGateway"]["id"] == "azure-network-nat-id"
    assert all(item.inputs["defaultOutboundAccess"] is False for item in recording.of_type(SUBNET))


def test_subnets_of_one_vnet_are_made_one_after_the_other(stack: Stack) -> None:
    recording = stack("azure")
    assert recording.needs(_subnet(recording, "netapp"), _subnet(recording, "nodes")), "Azure refuses two at a time"
    assert recording.needs(_subnet(recording, "endpoints"), _subnet(recording, "netapp"))


@pytest.mark.parametrize(("overrides", "groups"), [({}, 0), (TRIAL, 1), (RESERVED, 0)])
def test_a_placement_group_is_made_where_nodes_talk_tcp_and_never_beside_a_reservation(
    stack: Stack, overrides: Mapping[str, object], groups: int
) -> None:
    recording = stack("azure", overrides)
    assert len(recording.of_type(PLACEMENT)) == groups
    assert ("proximityPlacementGroupID" in recording.one(POOL).inputs) is bool(groups)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("size", ["Standard_ND96asr_v4", "Standard_NC4as_T4_v3"])
def test_a_placement_group_can_be_chosen_or_declined(size: str, chosen: bool) -> None:
    settings = _settings({"gpu": {"instance_type": size}, "network": {"proximity_placement": chosen}})
    assert settings.proximity_placement is chosen


# Cluster


def test_nobody_logs_in_without_entra(stack: Stack) -> None:
    cluster = stack("azure").one(AKS).inputs
    assert cluster["disableLocalAccounts"] is True
    assert cluster["enableRBAC"] is True
    assert cluster["aadProfile"]["managed"] is True
    assert cluster["aadProfile"]["enableAzureRBAC"] is True


def test_pods_get_identities_from_the_clusters_own_issuer(stack: Stack) -> None:
    cluster = stack("azure").one(AKS).inputs
    assert cluster["oidcIssuerProfile"]["enabled"] is True
    assert cluster["securityProfile"]["workloadIdentity"]["enabled"] is True


def test_the_api_server_is_private_unless_ranges_are_authorised(stack: Stack) -> None:
    private = stack("azure").one(AKS).inputs["apiServerAccessProfile"]
    assert (private["enablePrivateCluster"], private["enablePrivateClusterPublicFQDN"]) == (True, False)
    assert "authorizedIPRanges" not in private, "AKS refuses ranges on a private cluster"
    public = stack("azure", OPEN).one(AKS).inputs["apiServerAccessProfile"]
    assert public["authorizedIPRanges"] == ["203.0.113.0/24", "198.51.100.7/32"]
    assert public["enablePrivateCluster"] is False


def test_the_control_plane_has_an_identity_of_its_own_that_may_join_its_subnet(stack: Stack) -> None:
    recording = stack("azure")
    cluster = recording.one(AKS)
    assert cluster.inputs["identity"] == {
        "type": "UserAssigned",
        "userAssignedIdentities": ["azure-identity-id"],
    }
    joins = recording.one(ROLE, "azure-network")
    assert joins.inputs["scope"] == "azure-network-nodes-subnet-id"
    assert recording.needs(cluster, joins), "AKS checks the role when it makes the cluster"


def test_disks_and_caches_of_all_nodes_are_encrypted_on_their_host(stack: Stack) -> None:
    recording = stack("azure")
    pools = [recording.one(AKS).inputs["agentPoolProfiles"][0], recording.one(POOL).inputs]
    assert [pool["enableEncryptionAtHost"] for pool in pools] == [True, True]


def test_a_key_of_the_stacks_own_encrypts_secrets(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    cluster = recording.one(AKS)
    assert cluster.inputs["securityProfile"]["azureKeyVaultKms"]["keyId"] == CHOSEN["kubernetes.kms_key_id"]
    unwraps = recording.one(ROLE, "azure-key")
    assert unwraps.inputs["scope"] == f"{VAULT}/keys/etcd", "the key, not the vault"
    assert recording.needs(cluster, unwraps)


def test_upgrades_wait_for_sunday_night(stack: Stack) -> None:
    recording = stack("azure")
    assert recording.one(AKS).inputs["autoUpgradeProfile"] == {
        "upgradeChannel": "patch",
        "nodeOSUpgradeChannel": "NodeImage",
    }
    windows = recording.of_type("azure-native:containerservice:MaintenanceConfiguration")
    days = {one.inputs["configName"]: one.inputs["maintenanceWindow"]["schedule"]["weekly"] for one in windows}
    assert set(days) == {"aksManagedAutoUpgradeSchedule", "aksManagedNodeOSUpgradeSchedule"}
    assert {day["dayOfWeek"] for day in days.values()} == {"Sunday"}


def test_the_kubeconfig_is_secret_and_holds_a_log_in_instead_of_a_token(stack: Stack) -> None:
    recording = stack("azure")
    assert "kubeconfig" in recording.secret_exports
    document = yaml.safe_load(recording.exports["kubeconfig"])
    (user,) = document["users"]
    assert user["user"]["exec"]["command"] == "kubelogin"
    assert "a-token-that-must-not-survive" not in recording.exports["kubeconfig"]
    assert document["clusters"][0]["cluster"]["server"].startswith("https://aks.privatelink")
    asked = [token for token, _ in recording.calls]
    assert "azure-native:containerservice:listManagedClusterUserCredentials" in asked
    assert not any("Admin" in token for token in asked), "the admin's credentials never expire"


def test_kubernetes_objects_wait_for_an_administrators_role(stack: Stack) -> None:
    recording = stack("azure")
    role = recording.one(ROLE, "azure-admin-caller")
    assert role.inputs["principalId"] == "caller-object"
    assert recording.needs(recording.one("pulumi:providers:kubernetes"), role), "else the first object is forbidden"


def test_named_groups_administer_the_cluster_instead_of_whoever_runs_the_program(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    assert recording.one(AKS).inputs["aadProfile"]["adminGroupObjectIDs"] == [GROUP]
    people = {role["principalId"] for name, role in _roles(recording).items() if name.endswith("-01234567")}
    assert people == {GROUP}
    assert "caller-object" not in {role["principalId"] for role in _roles(recording).values()}


# GPU pool


def test_all_gpu_nodes_are_in_one_scale_set_with_the_bounds_that_were_asked_for(stack: Stack) -> None:
    (pool,) = stack("azure").of_type(POOL)
    assert pool.inputs["type"] == "VirtualMachineScaleSets"
    assert pool.inputs["vmSize"] == "Standard_ND96asr_v4"
    bounds = tuple(pool.inputs[key] for key in ("minCount", "count", "maxCount"))
    assert bounds == (0, 2, 2)
    assert pool.inputs["enableAutoScaling"] is True
    assert pool.inputs["nodeLabels"] == {"nvidia.com/gpu.present": "true"}


def test_the_spot_taint_of_aks_is_tolerated_by_the_job_and_by_everything_on_its_nodes(stack: Stack) -> None:
    recording = stack("azure", SPOT)
    pool = recording.one(POOL).inputs
    assert (pool["scaleSetPriority"], pool["scaleSetEvictionPolicy"], pool["spotMaxPrice"]) == ("Spot", "Delete", -1)
    taint = "kubernetes.azure.com/scalesetpriority=spot:NoSchedule"
    assert taint in pool["nodeTaints"]
    tolerated = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot"}
    toleration = tolerated | {"effect": "NoSchedule"}
    values = _releases(recording)
    assert toleration in values["gpu-operator"]["daemonsets"]["tolerations"]
    assert toleration in values["network-operator"]["node-feature-discovery"]["worker"]["tolerations"]
    assert toleration in values["dcgm-exporter"]["tolerations"]


def test_the_jobs_tolerations_are_the_pools_taints() -> None:
    from infra.clouds.azure.provision import gpu_pool

    for capacity, expected in (("on_demand", 1), ("spot", 2)):
        pool = gpu_pool(_settings({"gpu": {"instance_type": "Standard_ND96asr_v4", "capacity": capacity}}))
        assert len(pool.tolerations) == expected
        assert pool.interruptible is (capacity == "spot")


def test_an_on_demand_pool_is_not_marked_as_spot(stack: Stack) -> None:
    pool = stack("azure").one(POOL).inputs
    assert pool["scaleSetPriority"] == "Regular"
    assert pool["nodeTaints"] == ["nvidia.com/gpu=present:NoSchedule"]
    assert "spotMaxPrice" not in pool


def test_a_spot_pool_has_no_upgrade_settings_and_another_upgrades_without_a_spare_node(stack: Stack) -> None:
    assert "upgradeSettings" not in stack("azure", SPOT).one(POOL).inputs
    settings = stack("azure").one(POOL).inputs["upgradeSettings"]
    assert (settings["maxSurge"], settings["maxUnavailable"]) == ("0", "1"), "a spare ND node is quota few have"


def test_reserved_nodes_come_from_the_group_and_aks_may_use_it(stack: Stack) -> None:
    recording = stack("azure", RESERVED)
    pool = recording.one(POOL)
    assert pool.inputs["capacityReservationGroupID"] == RESERVATION
    role = recording.one(ROLE, "azure-reservation")
    assert role.inputs["scope"] == RESERVATION
    assert recording.needs(pool, role)


@pytest.mark.parametrize(
    ("overrides", "driver", "software"),
    [
        ({}, "None", "gpu-operator"),
        ({"gpu.driver": "aks"}, "Install", "nvidia-device-plugin"),
        (TRIAL, "Install", "nvidia-device-plugin"),
        ({**TRIAL, "gpu.driver": "operator"}, "None", "gpu-operator"),
    ],
)
def test_driver_of_aks_and_gpu_operator_are_never_both_there(
    stack: Stack, overrides: Mapping[str, object], driver: str, software: str
) -> None:
    recording = stack("azure", overrides)
    assert recording.one(POOL).inputs["gpuProfile"] == {"driver": driver}
    assert set(_releases(recording)) & {"gpu-operator", "nvidia-device-plugin"} == {software}


def test_the_operator_builds_the_driver_for_rdma_and_leaves_feature_discovery_to_the_network_operator(
    stack: Stack,
) -> None:
    values = _releases(stack("azure"))["gpu-operator"]
    assert values["driver"] == {"enabled": True, "rdma": {"enabled": True}}
    assert values["nfd"] == {"enabled": False}
    alone = _releases(stack("azure", {**TRIAL, "gpu.driver": "operator"}))["gpu-operator"]
    assert alone["nfd"] == {"enabled": True}, "no network operator brings it here"


@pytest.mark.parametrize("size", ["Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5"])
def test_a_pod_on_an_nd_node_takes_one_infiniband_function_for_each_gpu(size: str) -> None:
    from infra.clouds.azure.provision import gpu_pool, node_fabric

    settings = _settings({"gpu": {"instance_type": size}})
    assert gpu_pool(settings).resource_limits == {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    fabric = node_fabric(settings)
    assert fabric.chart
    assert fabric.chart.key == "network-operator"
    assert fabric.capabilities == ("IPC_LOCK",)
    generation = "v5" if "H100" in size else "v4"
    assert fabric.env["NCCL_TOPO_FILE"].endswith(f"nd{generation}-topo.xml")


def test_a_size_without_infiniband_gets_no_network_operator_and_asks_for_no_rdma(stack: Stack) -> None:
    from infra.clouds.azure.provision import gpu_pool, node_fabric

    settings = _settings({"gpu": {"instance_type": "Standard_NC4as_T4_v3"}})
    assert gpu_pool(settings).resource_limits == {"nvidia.com/gpu": "1"}
    assert node_fabric(settings).capabilities == ()
    recording = stack("azure", TRIAL)
    assert "network-operator" not in _releases(recording)
    assert not recording.of_type("kubernetes:mellanox.com/v1alpha1:NicClusterPolicy")


@pytest.mark.parametrize(("driver", "warned"), [("aks", True), ("operator", False), (None, False)])
def test_a_driver_that_costs_gpudirect_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, warned: bool
) -> None:
    from infra.clouds.azure import provision

    said: list[str] = []
    monkeypatch.setattr(provision.pulumi.log, "warn", said.append)
    provision.warn_of_missing_peermem(_settings({"gpu": {"instance_type": "Standard_ND96asr_v4", "driver": driver}}))
    assert bool(said) is warned


def test_features_that_the_subscription_must_have_are_named(stack: Stack) -> None:
    steps = "\n".join(stack("azure").exports["next_steps"])
    assert "--namespace Microsoft.ContainerService --name AKSInfinibandSupport" in steps
    assert "--namespace Microsoft.Compute --name EncryptionAtHost" in steps
    assert "AKSInfinibandSupport" not in "\n".join(stack("azure", TRIAL).exports["next_steps"])


def test_a_zone_holds_gpu_nodes_and_volume_alike(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    assert recording.one(POOL).inputs["availabilityZones"] == ["2"]
    assert recording.one(NETAPP_VOLUME).inputs["zones"] == ["2"]
    assert "availabilityZones" not in stack("azure").one(POOL).inputs


@pytest.mark.parametrize("spelling", [2, "2", "eastus-2"])
def test_a_zone_is_a_number_or_the_label_of_its_nodes(spelling: object) -> None:
    assert _settings({"gpu": {"instance_type": "Standard_ND96asr_v4", "zone": spelling}}).zones == ["2"]


# Storage


def test_netapp_sizes_are_bytes_and_the_volume_fills_its_pool(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    assert recording.one(NETAPP_POOL).inputs["size"] == 4096 * 1024**3 == 4398046511104
    assert recording.one(NETAPP_VOLUME).inputs["usageThreshold"] == 4398046511104
    claim = recording.one("kubernetes:core/v1:PersistentVolumeClaim").inputs
    assert claim["spec"]["resources"]["requests"]["storage"] == "4096Gi"


@pytest.mark.parametrize(("tier", "mibps"), [("Standard", 64), ("Premium", 256), ("Ultra", 512)])
def test_the_true_speed_of_a_tier_follows_from_its_size(tier: str, mibps: int) -> None:
    assert _settings({"storage": {"size_gib": 4096, "tier": tier}}).storage.throughput_mibps == mibps


def test_the_volume_has_the_tier_that_was_asked_for_and_states_its_speed(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    pool, volume = recording.one(NETAPP_POOL).inputs, recording.one(NETAPP_VOLUME).inputs
    assert (pool["serviceLevel"], volume["serviceLevel"]) == ("Ultra", "Ultra")
    assert volume["tags"]["throughput-mibps"] == "512"
    assert "throughputMibps" not in volume, "a pool of automatic quality refuses it"


def test_the_volume_is_mounted_by_its_own_address_and_path(stack: Stack) -> None:
    recording = stack("azure")
    spec = recording.one("kubernetes:core/v1:PersistentVolume").inputs["spec"]
    path = "/" + recording.one(NETAPP_VOLUME).inputs["creationToken"]
    assert spec["nfs"] == {"server": "10.0.128.4", "path": path}
    assert "nfsvers=4.1" in spec["mountOptions"]
    assert recording.one(NETAPP_VOLUME).inputs["protocolTypes"] == ["NFSv4.1"]


def test_names_that_netapps_api_answers_with_slashes_are_never_sent_back(stack: Stack) -> None:
    inputs = stack("azure").one(NETAPP_VOLUME).inputs
    assert (inputs["accountName"], inputs["poolName"], inputs["volumeName"]) == (
        "azure-storage-netapp",
        "datasets",
        "datasets",
    )


def test_on_destroy_the_volume_goes_before_its_pool_its_subnet_and_after_its_claim(stack: Stack) -> None:
    recording = stack("azure")
    volume = recording.one(NETAPP_VOLUME)
    assert recording.needs(volume, _subnet(recording, "netapp"))
    assert recording.needs(volume, recording.one(NETAPP_POOL))
    assert recording.needs(recording.one("kubernetes:core/v1:PersistentVolume"), volume)
    assert not recording.needs(_subnet(recording, "netapp"), volume), "the test would pass whatever the order"


def test_the_network_policy_goes_before_its_operator_and_operators_before_the_cluster(stack: Stack) -> None:
    recording = stack("azure")
    operator = recording.one(RELEASE, "azure-addons-network-operator")
    policy = recording.one("kubernetes:mellanox.com/v1alpha1:NicClusterPolicy")
    assert recording.needs(policy, operator)
    assert all(recording.needs(item, recording.one(AKS)) for item in recording.of_type(RELEASE))


def test_the_account_knows_no_keys_no_public_blobs_and_no_old_tls(stack: Stack) -> None:
    account = stack("azure").one(ACCOUNT).inputs
    assert account["allowSharedKeyAccess"] is False
    assert account["allowBlobPublicAccess"] is False
    assert account["isLocalUserEnabled"] is False
    assert account["enableHttpsTrafficOnly"] is True
    assert account["minimumTlsVersion"] == "TLS1_2"
    assert account["isHnsEnabled"] is True
    assert stack("azure").one(CONTAINER).inputs["publicAccess"] == "None"


@pytest.mark.parametrize("token", [ACCOUNT, REGISTRY])
def test_bucket_and_registry_are_private_unless_ranges_are_authorised(stack: Stack, token: str) -> None:
    closed = stack("azure").one(token).inputs
    assert (closed["publicNetworkAccess"], closed["networkRuleSet"]["defaultAction"]) == ("Disabled", "Deny")
    opened = stack("azure", OPEN).one(token).inputs
    assert (opened["publicNetworkAccess"], opened["networkRuleSet"]["defaultAction"]) == ("Enabled", "Deny")
    allowed = [rule.get("iPAddressOrRange", rule.get("value")) for rule in opened["networkRuleSet"]["ipRules"]]
    assert allowed == ["203.0.113.0/24", "198.51.100.7"], "Azure refuses a range of one address"


def test_services_are_reached_by_private_addresses_under_their_usual_names(stack: Stack) -> None:
    recording = stack("azure")
    endpoints = recording.of_type("azure-native:network:PrivateEndpoint")
    reached = {
        (connection["privateLinkServiceId"], *connection["groupIds"])
        for item in endpoints
        for connection in item.inputs["privateLinkServiceConnections"]
    }
    assert reached == {
        ("azure-objects-account-id", "blob"),
        ("azure-objects-account-id", "dfs"),
        ("azure-registry-acr-id", "registry"),
        ("azure-monitoring-grafana-id", "grafana"),
    }
    assert {item.inputs["subnet"]["id"] for item in endpoints} == {"azure-network-endpoints-subnet-id"}
    linked = recording.of_type("azure-native:privatedns:VirtualNetworkLink")
    zones = {item.inputs["privateZoneName"] for item in linked}
    assert "privatelink.dfs.core.windows.net" in zones
    assert len(recording.of_type("azure-native:network:PrivateDnsZoneGroup")) == len(endpoints) == len(linked)


@pytest.mark.parametrize(("overrides", "kept"), [(KEPT, True), (DELETED, False)])
def test_checkpoints_that_are_kept_keep_their_account_and_its_resource_group(
    stack: Stack, overrides: Mapping[str, object], kept: bool
) -> None:
    recording = stack("azure", overrides)
    retained = {item.type.rpartition(":")[2] for item in recording.registrations if item.retained}
    expected = {"ResourceGroup", "StorageAccount", "BlobContainer", "ManagementPolicy"}
    assert retained == (expected if kept else set()), "nothing else may stay behind with a bill"
    group = recording.one("azure-native:resources:ResourceGroup", "azure-objects-group")
    assert group.retained is kept, "deleting the group would delete the account in it"
    assert recording.one(ACCOUNT).inputs["resourceGroupName"] == group.inputs.get("resourceGroupName", group.name)
    assert not recording.one("azure-native:resources:ResourceGroup", "azure-network-group").retained


def test_old_checkpoints_expire_when_asked_and_nothing_else_does(stack: Stack) -> None:
    token = "azure-native:storage:ManagementPolicy"
    assert not stack("azure").of_type(token)
    policy = stack("azure", KEPT).one(token).inputs["policy"]
    (rule,) = policy["rules"]
    assert rule["definition"]["filters"]["prefixMatch"] == ["training/checkpoints/"]
    assert rule["definition"]["actions"]["baseBlob"]["delete"] == {"daysAfterModificationGreaterThan": 30}


# Identity and roles


def test_the_trainers_service_account_and_no_other_becomes_its_identity(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    federation = recording.one("azure-native:managedidentity:FederatedIdentityCredential").inputs
    assert federation["subject"] == "system:serviceaccount:jobs:trainer"
    assert federation["audiences"] == ["api://AzureADTokenExchange"]
    assert federation["issuer"] == "https://eastus.oic.prod-aks.azure.com/tenant/cluster/"


def test_a_pod_carries_what_workload_identity_and_the_buckets_client_look_for() -> None:
    made: list[Identity] = []

    def program() -> None:
        made.append(clouds.load("azure").provision("identity", _settings({})).identity)

    recording = record(program, {}, "azure")
    assert recording.error is None
    (identity,) = made
    assert set(identity.annotations) == {"azure.workload.identity/client-id"}
    assert identity.pod_labels == {"azure.workload.identity/use": "true"}
    assert identity.env == {"AZURE_STORAGE_ANON": "false"}, "adlfs would try anonymously first"
    assert identity.service_account == "trainer", "the federated credential names it"


def test_the_trainer_may_use_the_container_and_nothing_else(stack: Stack) -> None:
    roles = [
        role for role in _roles(stack("azure")).values() if role["principalId"] == "azure-objects-trainer-principal"
    ]
    (role,) = roles
    assert role["scope"] == "azure-objects-container-id", "not the account"
    assert role["roleDefinitionId"].endswith("ba92f5b4-2d11-453d-a403-e96b0029c9fe")


def test_nodes_may_pull_images_and_not_push_them(stack: Stack) -> None:
    roles = [role for role in _roles(stack("azure")).values() if role["principalId"] == "kubelet-object"]
    (role,) = roles
    assert role["scope"] == "azure-registry-acr-id"
    assert role["roleDefinitionId"].endswith("7f951dda-4ed3-4680-a7ca-43fe172d538d")


def test_the_registry_has_no_admin_user_and_no_anonymous_pulls(stack: Stack) -> None:
    registry = stack("azure").one(REGISTRY).inputs
    assert registry["adminUserEnabled"] is False
    assert registry["anonymousPullEnabled"] is False


@pytest.mark.parametrize("overrides", [{}, CHOSEN, TRIAL, RESERVED])
def test_no_role_is_given_on_more_than_one_resource(stack: Stack, overrides: Mapping[str, object]) -> None:
    recording = stack("azure", overrides)
    groups = {f"{item.name}-id" for item in recording.of_type("azure-native:resources:ResourceGroup")}
    own = {f"{item.name}-id" for item in recording.registrations} - groups
    for name, role in _roles(recording).items():
        assert role["scope"] in own | {RESERVATION, f"{VAULT}/keys/etcd"}, f"{name} reaches {role['scope']}"
        assert not role["roleDefinitionId"].endswith(OWNER)
    broad = {name for name, role in _roles(recording).items() if role["roleDefinitionId"].endswith(CONTRIBUTOR)}
    assert broad <= {"azure-reservation", "azure-placement"}, "AKS asks for it there, on that one resource"


# Monitoring, tags, cost


def test_the_clusters_metrics_reach_the_workspace_and_grafana_reads_them(stack: Stack) -> None:
    recording = stack("azure")
    assert recording.one(AKS).inputs["azureMonitorProfile"]["metrics"]["enabled"] is True
    rule = recording.one("azure-native:monitor:DataCollectionRule").inputs
    workspace = "azure-monitoring-workspace-id"
    assert rule["destinations"]["monitoringAccounts"][0]["accountResourceId"] == workspace
    assert rule["dataFlows"][0]["streams"] == ["Microsoft-PrometheusMetrics"]
    association = recording.one("azure-native:monitor:DataCollectionRuleAssociation").inputs
    assert association["resourceUri"] == "azure-aks-id"
    assert association["dataCollectionRuleId"] == "azure-monitoring-dcr-id"
    reads = recording.one(ROLE, "azure-monitoring-read").inputs
    assert (reads["scope"], reads["principalId"]) == (workspace, "grafana-principal")


def test_grafana_is_private_unless_it_is_asked_to_be_public(stack: Stack) -> None:
    assert stack("azure").one(GRAFANA).inputs["properties"]["publicNetworkAccess"] == "Disabled"
    public = stack("azure", CHOSEN).one(GRAFANA).inputs["properties"]
    assert public["publicNetworkAccess"] == "Enabled"
    assert public["apiKey"] == "Disabled"


def test_managed_monitoring_can_be_left_out(stack: Stack) -> None:
    recording = stack("azure", {"monitoring.managed": False})
    assert not [item for item in recording.registrations if "monitor" in item.name and "azure-native" in item.type]
    assert recording.one(AKS).inputs["azureMonitorProfile"]["metrics"]["enabled"] is False


def _taggable(token: str) -> bool:
    """Whether the SDK's class of this type takes tags."""
    _, module, name = token.split(":")
    made = getattr(importlib.import_module(f"pulumi_azure_native.{module}"), name)
    return "tags" in inspect.signature(made._internal_init).parameters


@pytest.mark.parametrize("overrides", [{}, TRIAL])
def test_every_taggable_resource_is_tagged(stack: Stack, overrides: Mapping[str, object]) -> None:
    expected = {"project": PROJECT, "stack": "azure", "owner": "ml-platform", "cost-centre": "recommendation"}
    taggable = [
        item
        for item in stack("azure", overrides).registrations
        if item.type.startswith("azure-native:") and _taggable(item.type)
    ]
    assert len(taggable) >= 30
    untagged = [item.name for item in taggable if not expected.items() <= item.inputs.get("tags", {}).items()]
    assert not untagged
    system = stack("azure").one(AKS).inputs["agentPoolProfiles"][0]
    assert expected.items() <= system["tags"].items(), "the system nodes are the cluster's property"


def test_the_bill_counts_what_runs_even_when_no_gpu_does() -> None:
    lines = {line.what: line for line in _settings({}).cost_lines(0)}
    assert lines["Standard_ND96asr_v4"].count == 0
    assert lines["AKS control plane (Standard tier)"].on_demand_usd_per_hour == 0.10
    assert lines["Standard_D4ds_v5"].count == 2
    netapp = lines["GiB of NetApp Premium (128 MiB/s)"]
    assert netapp.count * netapp.on_demand_usd_per_hour == pytest.approx(0.8253, abs=1e-4)
    assert lines["private endpoint"].count == 4
    assert "managed Grafana (Standard)" in lines
    alone = {line.what: line for line in _settings({"monitoring": {"managed": False}}).cost_lines(0)}
    assert alone["private endpoint"].count == 3
    assert "managed Grafana (Standard)" not in alone


def test_every_price_has_a_day_and_a_source() -> None:
    tables = tomllib.loads((ROOT / "infra/clouds/azure/prices.toml").read_text())
    rows = [row for table in tables.values() for row in table.values()]
    assert len(rows) == sum(len(azure.prices(table)) for table in ("system", "netapp", "fixed"))
    assert all(row["usd_per_hour"] > 0 and row["as_of"].startswith("20") and row["source"] for row in rows)


@pytest.mark.parametrize("limit", [23, 24, 50, 54])
def test_a_physical_name_is_legal_everywhere_and_differs_between_two_groups(limit: int) -> None:
    names = {azure.physical_name("3-My_very-long_stack-name-of-the-team", group, limit) for group in ("a", "b")}
    assert len(names) == 2
    for name in names:
        assert len(name) <= limit
        assert name.isalnum()
        assert name == name.lower()
        assert name[0].isalpha()


def test_credentials_without_a_log_in_plugin_are_replaced_and_nothing_else_is() -> None:
    from infra.clouds.azure.cluster import keyless

    document = {"clusters": [{"name": "c"}], "users": [{"name": "u", "user": {"client-key-data": "secret"}}]}
    after = yaml.safe_load(keyless(base64.b64encode(yaml.safe_dump(document).encode()).decode(), "msi"))
    assert after["clusters"] == document["clusters"]
    assert after["users"][0]["user"]["exec"]["args"][:3] == ["get-token", "--login", "msi"]
    assert "client-key-data" not in after["users"][0]["user"]


# Bad input


def _settings(settings: Mapping[str, Any], location: str = "eastus") -> azure.Settings:
    keys = {
        "cloud": "azure",
        "tags": {"owner": "me", "cost_centre": "tests"},
        "gpu": {"instance_type": "Standard_ND96asr_v4"},
        **settings,
    }
    config = {f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    parsed = parse(config | {"azure-native:location": location}, PROJECT, "test", SECTIONS).settings
    assert isinstance(parsed, azure.Settings)
    return parsed


def _problems(settings: Mapping[str, Any], location: str = "eastus") -> dict[str, Problem]:
    with pytest.raises(SettingsError) as caught:
        _settings(settings, location)
    return {problem.key: problem for problem in caught.value.problems}


def _fixed(settings: dict[str, Any], problems: Mapping[str, Problem]) -> dict[str, Any]:
    """The settings after a person ran every command; keys in brackets are indices, from the last to the first."""
    for problem in reversed(list(problems.values())):
        _, _, verb, *rest = problem.fix.replace("'", "").split()
        key, value = rest[1], rest[2] if verb == "set" else None
        *parents, last = key.split(".")
        owner = settings
        for part in parents:
            owner = owner.setdefault(part, {})
        name, _, index = last.partition("[")
        if index:
            del owner[name][int(index.rstrip("]"))]
        elif value is None:
            del owner[last]
        else:
            owner[last] = value
    return settings


BROKEN: dict[str, Any] = {
    "gpu": {
        "instance_type": "p5.48xlarge",
        "capacity": "spot",
        "reservation_id": RESERVATION,
        "zone": "westus-9",
        "nodes": {"desired": 30, "max": 20},
    },
    "network": {
        "cidr": "10.7.0.0/24",
        "netapp_cidr": "10.7.0.0/29",
        "endpoints_cidr": "10.9.0.0/26",
        "pods_cidr": "10.7.0.0/22",
        "services_cidr": "172.30.0.0/16",
        "authorized_cidrs": ["203.0.113.0/24", "10.0.0.0/8"],
    },
    "storage": {"size_gib": 1200, "tier": "Gold"},
    "system": {"instance_type": "Standard_A1"},
    "kubernetes": {"kms_key_id": "https://keys.vault.azure.net/keys/etcd/0123456789abcdef"},
}


def test_all_mistakes_are_told_at_once_each_with_what_is_wrong() -> None:
    expected = {
        "gpu.instance_type": "an instance type of aws, and cloud is 'azure'",
        "gpu.reservation_id": "capacity 'spot' does not come from a reservation",
        "gpu.zone": "not a zone of eastus",
        "gpu.nodes.desired": "more than gpu.nodes.max (20)",
        "network.netapp_cidr": "3 usable addresses, 8 needed for NetApp, which wants a /28 at least",
        "network.endpoints_cidr": "outside network.cidr (10.7.0.0/24)",
        "network.pods_cidr": "overlaps network.cidr (10.7.0.0/24)",
        "network.services_cidr": "meets 172.30.0.0/16, which AKS keeps for itself",
        "network.authorized_cidrs[1]": "a private range, which never comes in from the internet",
        "storage.size_gib": "a size that the service refuses",
        "storage.tier": "input should be 'Standard', 'Premium' or 'Ultra'",
        "system.instance_type": "unknown value",
        "kubernetes.kms_vault_id": "missing beside kubernetes.kms_key_id",
    }
    found = {key: problem.message for key, problem in _problems(BROKEN).items()}
    assert found == expected


def test_running_every_command_mends_every_mistake() -> None:
    broken: dict[str, Any] = json.loads(json.dumps(BROKEN))
    broken["kubernetes"] = {}
    settings = _settings(_fixed(broken, _problems(broken)))
    assert settings.storage.size_gib == 2048
    network = settings.network
    ranges = [IPv4Network(cidr) for cidr in [*network.subnets.values(), network.pods_cidr, network.services_cidr]]
    assert not any(one.overlaps(two) for one in ranges for two in ranges if one is not two)


def test_nothing_is_registered_when_a_setting_is_wrong(stack: Stack) -> None:
    recording = stack("azure", {"storage.size_gib": 1200, "gpu.zone": "9"}, fails=True)
    assert "storage.size_gib" in str(recording.error)
    assert "gpu.zone" in str(recording.error)
    assert recording.registrations == []


@pytest.mark.parametrize(("size", "nearest"), [(100, 1024), (1500, 2048), (200_000, 102_400)])
def test_a_netapp_size_that_is_refused_prints_the_legal_steps_and_the_nearest(size: int, nearest: int) -> None:
    problem = _problems({"storage": {"size_gib": size}})["storage.size_gib"]
    assert "1024, 2048, 3072 ... 102400" in problem.allowed
    assert problem.fix == f"pulumi config set --path storage.size_gib {nearest}"


@pytest.mark.parametrize("size", [1024, 5120, 102_400])
def test_whole_tebibytes_are_legal(size: int) -> None:
    assert _settings({"storage": {"size_gib": size}}).storage.size_gib == size


@pytest.mark.parametrize("zone", ["4", "westus-1", "a", "eastus1", "eastus-4"])
def test_a_zone_outside_the_region_is_refused(zone: str) -> None:
    assert _problems({"gpu": {"instance_type": "Standard_ND96asr_v4", "zone": zone}})["gpu.zone"].fix.endswith(" 1")


def test_a_region_without_zones_has_none_to_choose() -> None:
    problem = _problems({"gpu": {"instance_type": "Standard_ND96asr_v4", "zone": "1"}}, "westus")["gpu.zone"]
    assert problem.fix == "pulumi config rm --path gpu.zone"


def test_a_vnet_too_small_for_its_nodes_is_refused_with_one_that_is_wide_enough() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "nodes": {"desired": 2, "max": 100}}
    network: dict[str, Any] = {"cidr": "10.0.0.0/25"}
    problem = _problems({"gpu": gpu, "network": network})["network.cidr"]
    network["cidr"] = problem.fix.split()[-1]
    assert _settings({"gpu": gpu, "network": network})


def test_two_subnets_that_overlap_are_moved_apart_within_the_vnet() -> None:
    network = {"cidr": "192.168.0.0/16", "netapp_cidr": "192.168.0.0/24", "endpoints_cidr": "192.168.0.0/24"}
    problems = _problems({"network": network})
    assert set(problems) == {"network.netapp_cidr", "network.endpoints_cidr"}, "the carved subnet stays where it is"
    fixed = _settings(_fixed({"network": dict(network)}, problems)).network
    ranges = [IPv4Network(cidr) for cidr in fixed.subnets.values()]
    assert not any(one.overlaps(two) for one in ranges for two in ranges if one is not two)
    assert all(cidr.subnet_of(IPv4Network("192.168.0.0/16")) for cidr in ranges)


def test_the_overlay_has_a_range_for_every_node() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "nodes": {"desired": 2, "max": 20}}
    problem = _problems({"gpu": gpu, "network": {"pods_cidr": "10.244.0.0/20"}})["network.pods_cidr"]
    assert "4096 usable addresses, 5888 needed for a /24 for each of 23 nodes" in problem.message


def test_a_placement_group_beside_a_reservation_is_refused() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "capacity": "reservation", "reservation_id": RESERVATION}
    problem = _problems({"gpu": gpu, "network": {"proximity_placement": True}})["network.proximity_placement"]
    assert problem.fix == "pulumi config rm --path network.proximity_placement"


def test_a_reservation_that_is_no_group_is_refused_with_an_example() -> None:
    gpu = {"instance_type": "Standard_ND96asr_v4", "capacity": "reservation", "reservation_id": "cr-123"}
    assert "capacityReservationGroups" in _problems({"gpu": gpu})["gpu.reservation_id"].allowed


def test_a_missing_location_names_the_providers_key() -> None:
    config = {
        f"{PROJECT}:cloud": "azure",
        f"{PROJECT}:tags": '{"owner": "me", "cost_centre": "tests"}',
        f"{PROJECT}:gpu": '{"instance_type": "Standard_ND96asr_v4"}',
    }
    with pytest.raises(SettingsError, match="pulumi config set azure-native:location eastus"):
        parse(config, PROJECT, "test", SECTIONS)


def test_the_former_key_of_the_version_is_refused_with_the_command_for_the_new_one() -> None:
    problem = _problems({"kubernetes": {"version": "1.34"}})["kubernetes.version"]
    assert problem.message == "renamed to cluster.kubernetes_version"
    assert problem.fix.startswith("pulumi config set --path cluster.kubernetes_version 1.34; ")
    assert problem.fix.endswith("pulumi config rm --path kubernetes.version")


@pytest.mark.parametrize("version", ["1.34", 1.34])
def test_the_kubernetes_version_has_the_same_key_as_on_aws(stack: Stack, version: object) -> None:
    assert _settings({"cluster": {"kubernetes_version": version}}).cluster.kubernetes_version == "1.34"
    assert stack("azure").one(AKS).inputs["kubernetesVersion"] == "1.35"
