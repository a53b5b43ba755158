"""Google Cloud: the GKE control plane, access to it, labels, services, and the order of destroy."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping

import pytest
import yaml
from gcp_stack import BUCKET, CLUSTER, FILESTORE, NETWORK, POOL, Stack, parse_settings
from provider_mocks.recording import Recording


def test_nothing_is_protected_against_destroy(stack: Stack) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["deletionProtection"] is False, "the provider's default prevents destroy"
    assert recording.one(FILESTORE).inputs["deletionProtectionEnabled"] is False
    assert not [item.name for item in recording.registrations if item.protected]


def test_the_cluster_follows_the_regular_channel_from_its_lowest_version_on(stack: Stack) -> None:
    inputs = stack("gcp", {"cluster.kubernetes_version": "1.36"}).one(CLUSTER).inputs
    assert inputs["releaseChannel"] == {"channel": "REGULAR"}
    assert inputs["minMasterVersion"] == "1.36"


def test_only_gke_sets_the_version_of_nodes(stack: Stack) -> None:
    # resource_container_node_pool.go: `version` and auto_upgrade "will fight each other", and a version without a
    # patch is a difference at each `up`.
    for pool in stack("gcp").of_type(POOL):
        assert "version" not in pool.inputs
        assert pool.inputs["management"]["autoUpgrade"] is True, "GKE refuses false in a release channel"


def test_gke_upgrades_in_the_weekly_window_and_not_during_an_exclusion(stack: Stack) -> None:
    exclusion = {"name": "long-run", "start": "2026-12-01", "end": "2026-12-20"}
    policy = stack("gcp", {"maintenance.exclusions": [exclusion]}).one(CLUSTER).inputs["maintenancePolicy"]
    assert policy == {
        "recurringWindow": {
            "startTime": "2024-01-06T02:00:00Z",
            "endTime": "2024-01-06T14:00:00Z",
            "recurrence": "FREQ=WEEKLY;BYDAY=SA",
        },
        "maintenanceExclusions": [
            {
                "exclusionName": "long-run",
                "startTime": "2026-12-01T00:00:00Z",
                "endTime": "2026-12-21T00:00:00Z",
                "exclusionOptions": {"scope": "NO_MINOR_OR_NODE_UPGRADES"},
            }
        ],
    }


def test_a_window_may_end_on_the_next_day(stack: Stack) -> None:
    overrides = {"maintenance.day": "sunday", "maintenance.start": "22:30", "maintenance.hours": 24}
    window = stack("gcp", overrides).one(CLUSTER).inputs["maintenancePolicy"]["recurringWindow"]
    assert (window["startTime"], window["endTime"]) == ("2024-01-07T22:30:00Z", "2024-01-08T22:30:00Z")
    assert window["recurrence"] == "FREQ=WEEKLY;BYDAY=SU"


def test_upgrades_of_nodes_can_wait_for_the_end_of_support(stack: Stack) -> None:
    # cluster-toolkit's blueprint of A3 High has the same exclusion; it has either an end or a behaviour at its end.
    policy = stack("gcp", {"maintenance.automatic": False}).one(CLUSTER).inputs["maintenancePolicy"]
    (exclusion,) = policy["maintenanceExclusions"]
    assert "endTime" not in exclusion
    assert exclusion["exclusionOptions"] == {
        "scope": "NO_MINOR_OR_NODE_UPGRADES",
        "endTimeBehavior": "UNTIL_END_OF_SUPPORT",
    }


def test_nodes_have_no_public_address(stack: Stack) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["privateClusterConfig"]["enablePrivateNodes"] is True
    assert all(pool.inputs["networkConfig"]["enablePrivateNodes"] for pool in recording.of_type(POOL))


def test_the_api_is_private_unless_ranges_are_authorized(stack: Stack) -> None:
    private = stack("gcp").one(CLUSTER).inputs
    assert private["privateClusterConfig"]["enablePrivateEndpoint"] is True
    assert private["masterAuthorizedNetworksConfig"].get("cidrBlocks", []) == []
    opened = stack("gcp", {"network.authorized_cidrs": ["198.51.100.0/24"]}).one(CLUSTER).inputs
    assert opened["privateClusterConfig"]["enablePrivateEndpoint"] is False
    allowed = opened["masterAuthorizedNetworksConfig"]
    assert [block["cidrBlock"] for block in allowed["cidrBlocks"]] == ["198.51.100.0/24"]
    assert allowed["gcpPublicCidrsAccessEnabled"] is False, "every customer of Google Cloud can get such an address"


def test_the_api_has_a_public_name_only_if_configured(stack: Stack) -> None:
    def by_name(recording: Recording) -> object:
        """Return whether the DNS endpoint is open."""
        return recording.one(CLUSTER).inputs["controlPlaneEndpointsConfig"]["dnsEndpointConfig"]["allowExternalTraffic"]

    assert by_name(stack("gcp")) is False
    assert by_name(stack("gcp", {"network.dns_endpoint": True})) is True


@pytest.mark.parametrize(
    ("overrides", "server", "authority"),
    [
        ({}, "https://172.16.0.2", "Q0E="),
        ({"network.authorized_cidrs": ["198.51.100.0/24"]}, "https://192.0.2.10", "Q0E="),
        ({"network.dns_endpoint": True}, "https://gke-gcp-cluster.gke.goog", None),
    ],
)
def test_the_kubeconfig_uses_the_endpoint_that_is_open(
    stack: Stack, overrides: Mapping[str, object], server: str, authority: str | None
) -> None:
    recording = stack("gcp", overrides)
    (cluster,) = yaml.safe_load(recording.exports["kubeconfig"])["clusters"]
    assert cluster["cluster"]["server"] == server
    assert cluster["cluster"].get("certificate-authority-data") == authority


def test_the_kubeconfig_runs_a_plugin_for_a_token_and_contains_none(stack: Stack) -> None:
    recording = stack("gcp")
    (user,) = yaml.safe_load(recording.exports["kubeconfig"])["users"]
    assert set(user["user"]) == {"exec"}, "a token or a certificate would be a credential that does not expire"
    assert user["user"]["exec"]["command"] == "gke-gcloud-auth-plugin"
    assert "kubeconfig" in recording.secret_exports


def test_pods_use_workload_identity_instead_of_the_nodes_credentials(stack: Stack) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["workloadIdentityConfig"] == {"workloadPool": "my-project.svc.id.goog"}
    modes = {pool.inputs["nodeConfig"]["workloadMetadataConfig"]["mode"] for pool in recording.of_type(POOL)}
    assert modes == {"GKE_METADATA"}


def test_nodes_boot_only_verified_images(stack: Stack) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["enableShieldedNodes"] is True
    for pool in recording.of_type(POOL):
        shielded = pool.inputs["nodeConfig"]["shieldedInstanceConfig"]
        assert shielded == {"enableSecureBoot": True, "enableIntegrityMonitoring": True}


def test_a_key_that_only_gke_may_use_encrypts_kubernetes_secrets(stack: Stack) -> None:
    recording = stack("gcp")
    cluster = recording.one(CLUSTER)
    assert cluster.inputs["databaseEncryption"] == {"state": "ENCRYPTED", "keyName": "gcp-cluster-secrets-id"}
    grant = recording.one("gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember")
    assert grant.inputs["member"].endswith("@container-engine-robot.iam.gserviceaccount.com")
    assert recording.needs(cluster, grant), "the creation fails while GKE may not use the key"
    for kind in ("keyRing:KeyRing", "cryptoKey:CryptoKey"):
        assert "name" not in recording.one(f"gcp:kms/{kind}").inputs, "no deletion frees a name: `up` again gets 409"


def test_the_data_plane_enforces_network_policies_and_the_filestore_driver_is_on(stack: Stack) -> None:
    inputs = stack("gcp").one(CLUSTER).inputs
    assert inputs["datapathProvider"] == "ADVANCED_DATAPATH"
    assert inputs["addonsConfig"]["gcpFilestoreCsiDriverConfig"] == {"enabled": True}


def test_managed_prometheus_collects_gpu_metrics(stack: Stack) -> None:
    recording = stack("gcp")
    monitoring = recording.one(CLUSTER).inputs["monitoringConfig"]
    assert {"DCGM", "JOBSET"} <= set(monitoring["enableComponents"])
    assert monitoring["managedPrometheus"]["enabled"] is True
    dashboard = json.loads(recording.one("gcp:monitoring/dashboard:Dashboard").inputs["dashboardJson"])
    queries = [
        data["timeSeriesQuery"]["prometheusQuery"]
        for tile in dashboard["mosaicLayout"]["tiles"]
        for data in tile["widget"]["xyChart"]["dataSets"]
    ]
    assert queries
    assert all('cluster="gcp-cluster"' in query for query in queries), "a project has other clusters"


@pytest.mark.parametrize(("location", "where"), [("regional", "us-central1"), ("zonal", "us-central1-a")])
def test_the_control_plane_is_regional_or_zonal_and_its_nodes_are_in_one_zone(
    stack: Stack, location: str, where: str
) -> None:
    recording = stack("gcp", {"cluster.location": location})
    cluster = recording.one(CLUSTER).inputs
    assert cluster["location"] == where
    assert cluster.get("nodeLocations") == (["us-central1-a"] if location == "regional" else None), (
        "a zonal cluster's own zone must not be listed again"
    )
    assert all(pool.inputs["location"] == where for pool in recording.of_type(POOL))
    assert all(pool.inputs["nodeLocations"] == ["us-central1-a"] for pool in recording.of_type(POOL))


def test_every_resource_that_supports_labels_has_the_stacks_labels(a3: Recording) -> None:
    import pulumi_gcp

    expected = parse_settings().labels
    checked = set()
    for item in a3.registrations:
        if not item.type.startswith("gcp:"):
            continue
        module, kind = item.type.split(":")[1].split("/")[0], item.type.rpartition(":")[2]
        parameters = inspect.signature(getattr(getattr(pulumi_gcp, module), kind)._internal_init).parameters
        keys = {"labels": "labels", "resource_labels": "resourceLabels", "user_labels": "userLabels"}
        for parameter in keys.keys() & parameters.keys():
            assert expected.items() <= item.inputs.get(keys[parameter], {}).items(), f"{item.type} {item.name}"
            checked.add(kind)
    assert checked == {"Bucket", "Cluster", "CryptoKey", "Instance", "Repository"}
    assert all(pool.inputs["nodeConfig"]["resourceLabels"] == expected for pool in a3.of_type(POOL)), "machines, disks"


def test_the_projects_services_are_enabled_first_and_stay_enabled(stack: Stack) -> None:
    recording = stack("gcp")
    services = recording.of_type("gcp:projects/service:Service")
    assert all(item.inputs["disableOnDestroy"] is False for item in services), "other stacks of the project use them"
    names = {item.inputs["service"] for item in services}
    assert {"compute.googleapis.com", "container.googleapis.com", "file.googleapis.com"} <= names
    for token in (NETWORK, CLUSTER, BUCKET, FILESTORE):
        assert all(recording.needs(recording.one(token), service) for service in services)


def test_destroy_deletes_kubernetes_objects_before_the_system_nodes(stack: Stack) -> None:
    recording = stack("gcp")
    provider, system = recording.one("pulumi:providers:kubernetes"), recording.one(POOL, "gcp-cluster-system")
    assert recording.needs(provider, system), "without its metrics server a cluster cannot delete a namespace"


def test_destroy_deletes_volume_file_system_and_network_in_this_order(stack: Stack) -> None:
    recording = stack("gcp")
    volume, filestore = recording.one("kubernetes:core/v1:PersistentVolume"), recording.one(FILESTORE)
    assert recording.needs(volume, filestore)
    assert recording.needs(filestore, recording.one(NETWORK))


def test_destroy_deletes_operators_before_the_system_nodes(stack: Stack) -> None:
    recording = stack("gcp")
    release = recording.one("kubernetes:helm.sh/v3:Release")
    assert recording.needs(release, recording.one(POOL, "gcp-cluster-system"))
    assert not recording.needs(release, recording.one(POOL, "gcp-cluster-gpu")), "operators need no GPU"
