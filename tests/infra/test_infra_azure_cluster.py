"""Azure: the AKS control plane, its encryption, its upgrades and access to it."""

from __future__ import annotations

import base64

import pytest
import yaml
from azure_stack import (
    AKS,
    CHOSEN,
    GROUP,
    MAINTENANCE,
    OPEN,
    POOL,
    ROLE,
    VAULT,
    Stack,
    find_problems,
    parse_settings,
    roles_of,
)
from provider_mocks.recording import record


def test_every_login_uses_entra(stack: Stack) -> None:
    cluster = stack("azure").one(AKS).inputs
    assert cluster["disableLocalAccounts"] is True
    assert cluster["enableRBAC"] is True
    assert cluster["aadProfile"]["managed"] is True
    assert cluster["aadProfile"]["enableAzureRBAC"] is True


def test_pods_get_identities_from_the_clusters_own_issuer(stack: Stack) -> None:
    cluster = stack("azure").one(AKS).inputs
    assert cluster["oidcIssuerProfile"]["enabled"] is True
    assert cluster["securityProfile"]["workloadIdentity"]["enabled"] is True


def test_the_api_server_is_private_unless_ranges_are_authorized(stack: Stack) -> None:
    private = stack("azure").one(AKS).inputs["apiServerAccessProfile"]
    assert (private["enablePrivateCluster"], private["enablePrivateClusterPublicFQDN"]) == (True, False)
    assert "authorizedIPRanges" not in private, "AKS rejects ranges on a private cluster"
    public = stack("azure", OPEN).one(AKS).inputs["apiServerAccessProfile"]
    assert public["authorizedIPRanges"] == ["203.0.113.0/24", "198.51.100.7/32", "20.0.0.4/32"], (
        "nodes reach the API server from the address of their NAT gateway"
    )
    assert public["enablePrivateCluster"] is False


def test_the_control_planes_identity_may_join_its_subnet(stack: Stack) -> None:
    recording = stack("azure")
    cluster = recording.one(AKS)
    assert cluster.inputs["identity"] == {
        "type": "UserAssigned",
        "userAssignedIdentities": ["azure-identity-id"],
    }
    joins = recording.one(ROLE, "azure-network")
    assert joins.inputs["scope"] == "azure-network-nodes-subnet-id"
    assert recording.needs(cluster, joins), "AKS checks the role when it creates the cluster"


def test_disks_and_caches_of_all_nodes_are_encrypted_on_their_host(stack: Stack) -> None:
    recording = stack("azure")
    pools = [recording.one(AKS).inputs["agentPoolProfiles"][0], recording.one(POOL).inputs]
    assert [pool["enableEncryptionAtHost"] for pool in pools] == [True, True]


def test_the_stacks_own_key_encrypts_secrets(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    cluster = recording.one(AKS)
    assert cluster.inputs["securityProfile"]["azureKeyVaultKms"]["keyId"] == CHOSEN["kubernetes.kms_key_id"]
    unwraps = recording.one(ROLE, "azure-key")
    assert unwraps.inputs["scope"] == f"{VAULT}/keys/etcd", "the key, not the vault"
    assert recording.needs(cluster, unwraps)


def test_upgrades_wait_for_the_maintenance_window(stack: Stack) -> None:
    recording = stack("azure", MAINTENANCE)
    assert recording.one(AKS).inputs["autoUpgradeProfile"] == {
        "upgradeChannel": "patch",
        "nodeOSUpgradeChannel": "NodeImage",
    }
    windows = recording.of_type("azure-native:containerservice:MaintenanceConfiguration")
    found = {one.inputs["configName"]: one.inputs["maintenanceWindow"] for one in windows}
    assert set(found) == {"aksManagedAutoUpgradeSchedule", "aksManagedNodeOSUpgradeSchedule", "default"}
    for window in found.values():
        assert window["schedule"]["weekly"] == {"dayOfWeek": "Tuesday", "intervalWeeks": 1}
        assert (window["startTime"], window["durationHours"], window["utcOffset"]) == ("22:00", 6, "+00:00")
        assert window["notAllowedDates"] == [{"start": "2026-12-01", "end": "2026-12-20"}]


def test_without_exclusions_upgrades_have_a_weekly_window(stack: Stack) -> None:
    windows = stack("azure").of_type("azure-native:containerservice:MaintenanceConfiguration")
    assert all("notAllowedDates" not in one.inputs["maintenanceWindow"] for one in windows)
    assert {one.inputs["maintenanceWindow"]["schedule"]["weekly"]["dayOfWeek"] for one in windows} == {"Saturday"}


def test_the_gpu_pool_follows_the_version_of_the_control_plane(stack: Stack) -> None:
    recording = stack("azure", {"cluster.kubernetes_version": "1.36"})
    cluster, pool = recording.one(AKS), recording.one(POOL)
    (system,) = cluster.inputs["agentPoolProfiles"]
    versions = (cluster.inputs["kubernetesVersion"], pool.inputs["orchestratorVersion"])
    assert versions == ("1.36", "1.36"), "AKS upgrades no pool together with the control plane"
    assert "orchestratorVersion" not in system, "AKS refuses a request that names the versions of some pools only"
    assert recording.needs(pool, cluster), "a pool must not be newer than the control plane"


@pytest.mark.parametrize(("version", "nearest"), [("1.33", "1.34"), ("1.99.2", "1.36")])
def test_a_version_that_aks_does_not_offer_is_refused(version: str, nearest: str) -> None:
    (problem,) = find_problems({"cluster": {"kubernetes_version": version}}).values()
    assert problem.fix == f"pulumi config set --path cluster.kubernetes_version {nearest}"
    assert parse_settings({"cluster": {"kubernetes_version": "1.36.2"}}).cluster.kubernetes_version == "1.36.2"


def test_the_kubeconfig_is_secret_and_contains_a_login_command_instead_of_a_token(stack: Stack) -> None:
    recording = stack("azure")
    assert "kubeconfig" in recording.secret_exports
    document = yaml.safe_load(recording.exports["kubeconfig"])
    (user,) = document["users"]
    assert user["user"]["exec"]["command"] == "kubelogin"
    assert "a-token-that-must-not-survive" not in recording.exports["kubeconfig"]
    assert document["clusters"][0]["cluster"]["server"].startswith("https://aks.privatelink")
    calls = [token for token, _ in recording.calls]
    assert "azure-native:containerservice:listManagedClusterUserCredentials" in calls
    assert not any("Admin" in token for token in calls), "the admin's credentials never expire"


def test_kubernetes_objects_are_created_after_an_administrators_role(stack: Stack) -> None:
    recording = stack("azure")
    role = recording.one(ROLE, "azure-admin-caller")
    assert role.inputs["principalId"] == "caller-object"
    assert role.inputs["scope"] == "azure-network-group-id", "a role on the cluster can exist only after the cluster"
    assert recording.needs(recording.one(AKS), role), "the role takes effect while AKS creates the cluster"
    assert recording.needs(recording.one("pulumi:providers:kubernetes"), role), (
        "without the role the first object is forbidden"
    )


def test_configured_groups_administer_the_cluster_instead_of_the_caller(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    assert recording.one(AKS).inputs["aadProfile"]["adminGroupObjectIDs"] == [GROUP]
    administrators = {role["principalId"] for name, role in roles_of(recording).items() if name.endswith("-01234567")}
    assert administrators == {GROUP}
    assert "caller-object" not in {role["principalId"] for role in roles_of(recording).values()}


def test_only_the_users_credentials_of_the_kubeconfig_are_replaced() -> None:
    from infra.clouds.azure.cluster import keyless

    document = {"clusters": [{"name": "c"}], "users": [{"name": "u", "user": {"client-key-data": "secret"}}]}
    after = yaml.safe_load(keyless(base64.b64encode(yaml.safe_dump(document).encode()).decode(), "msi"))
    assert after["clusters"] == document["clusters"]
    assert after["users"][0]["user"]["exec"]["args"][:3] == ["get-token", "--login", "msi"]
    assert "client-key-data" not in after["users"][0]["user"]


@pytest.mark.parametrize("version", ["1.34", 1.34])
def test_the_kubernetes_version_has_the_same_key_as_on_aws(stack: Stack, version: object) -> None:
    assert parse_settings({"cluster": {"kubernetes_version": version}}).cluster.kubernetes_version == "1.34"
    assert stack("azure").one(AKS).inputs["kubernetesVersion"] == "1.35"


@pytest.mark.parametrize(
    ("stack_name", "location", "given"),
    [("azure", "eastus", False), ("recsys-prod", "eastus", False), ("recommendation-prod", "westeurope", True)],
)
def test_the_nodes_resource_group_has_a_name_of_its_own_only_where_the_derived_one_is_too_long(
    stack_name: str, location: str, given: bool
) -> None:
    from infra import clouds

    settings = parse_settings({}, location)
    recording = record(lambda: clouds.load("azure").provision(stack_name, settings), {}, stack_name)
    assert recording.error is None
    cluster = recording.one(AKS)
    assert ("nodeResourceGroup" in cluster.inputs) is given, "AKS derives MC_<group>_<cluster>_<location>, at most 80"
    assert len(cluster.inputs.get("nodeResourceGroup", "")) <= 80
    assert cluster.ignored == ("nodeResourceGroup",), "another name would replace a running cluster"
