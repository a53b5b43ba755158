"""Azure: the NetApp volume, the storage account and private endpoints."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from azure_stack import (
    ACCOUNT,
    AKS,
    CHOSEN,
    CONTAINER,
    DELETED,
    KEPT,
    NETAPP_POOL,
    NETAPP_VOLUME,
    OPEN,
    REGISTRY,
    RELEASE,
    Stack,
    parse_settings,
    subnet,
)


def test_netapp_sizes_are_in_bytes_and_the_volume_fills_its_pool(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    assert recording.one(NETAPP_POOL).inputs["size"] == 4096 * 1024**3 == 4398046511104
    assert recording.one(NETAPP_VOLUME).inputs["usageThreshold"] == 4398046511104
    claim = recording.one("kubernetes:core/v1:PersistentVolumeClaim").inputs
    assert claim["spec"]["resources"]["requests"]["storage"] == "4096Gi"


@pytest.mark.parametrize(("tier", "mibps"), [("Standard", 64), ("Premium", 256), ("Ultra", 512)])
def test_the_throughput_follows_from_tier_and_size(tier: str, mibps: int) -> None:
    assert parse_settings({"storage": {"size_gib": 4096, "tier": tier}}).storage.throughput_mibps == mibps


def test_the_volume_has_the_configured_tier_and_a_tag_with_its_throughput(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    pool, volume = recording.one(NETAPP_POOL).inputs, recording.one(NETAPP_VOLUME).inputs
    assert (pool["serviceLevel"], volume["serviceLevel"]) == ("Ultra", "Ultra")
    assert volume["tags"]["throughput-mibps"] == "512"
    assert "throughputMibps" not in volume, "a pool with automatic QoS rejects it"


def test_the_volume_is_mounted_by_its_address_and_path(stack: Stack) -> None:
    recording = stack("azure")
    spec = recording.one("kubernetes:core/v1:PersistentVolume").inputs["spec"]
    path = "/" + recording.one(NETAPP_VOLUME).inputs["creationToken"]
    assert spec["nfs"] == {"server": "10.0.128.4", "path": path}
    assert "nfsvers=4.1" in spec["mountOptions"]
    assert recording.one(NETAPP_VOLUME).inputs["protocolTypes"] == ["NFSv4.1"]


def test_netapp_requests_contain_plain_names_although_responses_contain_paths(stack: Stack) -> None:
    inputs = stack("azure").one(NETAPP_VOLUME).inputs
    assert (inputs["accountName"], inputs["poolName"], inputs["volumeName"]) == (
        "azure-storage-netapp",
        "datasets",
        "datasets",
    )


def test_destroy_deletes_the_volume_after_its_claim_and_before_its_pool_and_subnet(stack: Stack) -> None:
    recording = stack("azure")
    volume = recording.one(NETAPP_VOLUME)
    assert recording.needs(volume, subnet(recording, "netapp"))
    assert recording.needs(volume, recording.one(NETAPP_POOL))
    group = recording.one("azure-native:resources:ResourceGroup", "azure-network-group")
    assert recording.one(NETAPP_POOL).deleted_with == group.urn, (
        "a pool whose volume was deleted a moment ago cannot be deleted yet (azure-sdk-for-go#6485)"
    )
    assert recording.one("azure-native:netapp:Account").deleted_with == group.urn
    assert recording.needs(recording.one("kubernetes:core/v1:PersistentVolume"), volume)
    assert not recording.needs(subnet(recording, "netapp"), volume), "otherwise the test passes for any order"


def test_destroy_deletes_the_network_policy_before_its_operator_and_operators_before_the_cluster(stack: Stack) -> None:
    recording = stack("azure")
    operator = recording.one(RELEASE, "azure-addons-network-operator")
    policy = recording.one("kubernetes:mellanox.com/v1alpha1:NicClusterPolicy")
    assert recording.needs(policy, operator)
    assert all(recording.needs(item, recording.one(AKS)) for item in recording.of_type(RELEASE))


def test_the_storage_account_has_no_keys_no_public_blobs_and_no_old_tls(stack: Stack) -> None:
    account = stack("azure").one(ACCOUNT).inputs
    assert account["allowSharedKeyAccess"] is False
    assert account["allowBlobPublicAccess"] is False
    assert account["isLocalUserEnabled"] is False
    assert account["enableHttpsTrafficOnly"] is True
    assert account["minimumTlsVersion"] == "TLS1_2"
    assert account["isHnsEnabled"] is True
    assert stack("azure").one(CONTAINER).inputs["publicAccess"] == "None"


@pytest.mark.parametrize("token", [ACCOUNT, REGISTRY])
def test_storage_account_and_registry_are_private_unless_ranges_are_authorized(stack: Stack, token: str) -> None:
    closed = stack("azure").one(token).inputs
    assert (closed["publicNetworkAccess"], closed["networkRuleSet"]["defaultAction"]) == ("Disabled", "Deny")
    opened = stack("azure", OPEN).one(token).inputs
    assert (opened["publicNetworkAccess"], opened["networkRuleSet"]["defaultAction"]) == ("Enabled", "Deny")
    allowed = [rule.get("iPAddressOrRange", rule.get("value")) for rule in opened["networkRuleSet"]["ipRules"]]
    assert allowed == ["203.0.113.0/24", "198.51.100.7"], "Azure rejects a range of one address"


def test_services_have_private_endpoints_under_their_usual_names(stack: Stack) -> None:
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


def test_an_account_gets_one_private_endpoint_after_the_other(stack: Stack) -> None:
    recording = stack("azure")
    endpoint = "azure-native:network:PrivateEndpoint"
    blob, dfs = (recording.one(endpoint, f"azure-objects-{kind}-endpoint") for kind in ("blob", "dfs"))
    assert recording.needs(dfs, blob), "StorageAccountOperationInProgress (bicep-registry-modules#6001)"
    assert recording.needs(blob, recording.one(CONTAINER))


@pytest.mark.parametrize(("overrides", "kept"), [(KEPT, True), (DELETED, False)])
def test_kept_checkpoints_keep_their_account_and_its_resource_group(
    stack: Stack, overrides: Mapping[str, object], kept: bool
) -> None:
    recording = stack("azure", overrides)
    retained = {item.type.rpartition(":")[2] for item in recording.registrations if item.retained}
    expected = {"ResourceGroup", "StorageAccount", "BlobContainer", "ManagementPolicy"}
    assert retained == (expected if kept else set()), "nothing else may remain and be billed"
    group = recording.one("azure-native:resources:ResourceGroup", "azure-objects-group")
    assert group.retained is kept, "deleting the group would delete the account in it"
    assert recording.one(ACCOUNT).inputs["resourceGroupName"] == group.inputs.get("resourceGroupName", group.name)
    assert not recording.one("azure-native:resources:ResourceGroup", "azure-network-group").retained


def test_only_checkpoints_expire_and_only_if_configured(stack: Stack) -> None:
    token = "azure-native:storage:ManagementPolicy"
    assert not stack("azure").of_type(token)
    policy = stack("azure", KEPT).one(token).inputs["policy"]
    (rule,) = policy["rules"]
    assert rule["definition"]["filters"]["prefixMatch"] == ["training/checkpoints/"]
    assert rule["definition"]["actions"]["baseBlob"]["delete"] == {"daysAfterModificationGreaterThan": 30}
