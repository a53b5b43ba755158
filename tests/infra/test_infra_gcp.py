"""Google Cloud: what is registered for each kind of node and capacity, who may do what, and what destroy meets."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pulumi
import pytest
import yaml
from provider_mocks.recording import PROJECT, Recording, Registration, run_stack, stack_config

from infra.clouds.gcp.settings import Settings
from infra.config.problems import Problem, SettingsError
from infra.cost import HourlyCost
from infra.stack import parse
from workloads.settings import SECTIONS

Run = Callable[..., Recording]

CLUSTER = "gcp:container/cluster:Cluster"
POOL = "gcp:container/nodePool:NodePool"
NETWORK = "gcp:compute/network:Network"
FIREWALL = "gcp:compute/firewall:Firewall"
BUCKET = "gcp:storage/bucket:Bucket"
FILESTORE = "gcp:filestore/instance:Instance"
CUSTOM = "kubernetes:networking.gke.io/v1:"
DAEMONS = "kubernetes:apps/v1:DaemonSet"

A2, A2_ULTRA, A3, TRIAL = "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "g2-standard-4"
TYPES = (A2, A2_ULTRA, A3, TRIAL)
CAPACITIES: Mapping[str, Mapping[str, object]] = {
    "on_demand": {},
    "spot": {"gpu.capacity": "spot"},
    "reservation": {"gpu.capacity": "reservation", "gpu.reservation_id": "ours"},
    "flex_start": {"gpu.capacity": "flex_start"},
}


def _gpu_pool(recording: Recording) -> Mapping[str, Any]:
    return recording.one(POOL, "gcp-cluster-gpu").inputs


def _nodes(stack: Run, instance_type: str = A2, capacity: str = "on_demand") -> Mapping[str, Any]:
    inputs: Mapping[str, Any] = _pool(stack, instance_type, capacity)["nodeConfig"]
    return inputs


def _pool(stack: Run, instance_type: str = A2, capacity: str = "on_demand") -> Mapping[str, Any]:
    return _gpu_pool(stack("gcp", {"gpu.instance_type": instance_type, **CAPACITIES[capacity]}))


def _parse(overrides: Mapping[str, object] | None = None, name: str = "gcp") -> Settings:
    settings = parse(stack_config("gcp", overrides), PROJECT, name, SECTIONS).settings
    assert isinstance(settings, Settings)
    return settings


def _problems(overrides: Mapping[str, object], name: str = "gcp") -> dict[str, Problem]:
    with pytest.raises(SettingsError) as caught:
        _parse(overrides, name)
    return {problem.key: problem for problem in caught.value.problems}


# The cluster


def test_destroy_is_not_protected(stack: Run) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["deletionProtection"] is False, "the provider's default refuses to destroy"
    assert recording.one(FILESTORE).inputs["deletionProtectionEnabled"] is False
    assert not [item.name for item in recording.registrations if item.protected]


def test_the_cluster_follows_the_regular_channel(stack: Run) -> None:
    inputs = stack("gcp").one(CLUSTER).inputs
    assert inputs["releaseChannel"] == {"channel": "REGULAR"}
    assert "minMasterVersion" not in inputs, "a version written here would age"


def test_nodes_have_no_public_address(stack: Run) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["privateClusterConfig"]["enablePrivateNodes"] is True
    assert all(pool.inputs["networkConfig"]["enablePrivateNodes"] for pool in recording.of_type(POOL))


def test_the_api_is_private_until_ranges_are_authorised(stack: Run) -> None:
    private = stack("gcp").one(CLUSTER).inputs
    assert private["privateClusterConfig"]["enablePrivateEndpoint"] is True
    assert private["masterAuthorizedNetworksConfig"].get("cidrBlocks", []) == []
    opened = stack("gcp", {"network.authorized_cidrs": ["198.51.100.0/24"]}).one(CLUSTER).inputs
    assert opened["privateClusterConfig"]["enablePrivateEndpoint"] is False
    allowed = opened["masterAuthorizedNetworksConfig"]
    assert [block["cidrBlock"] for block in allowed["cidrBlocks"]] == ["198.51.100.0/24"]
    assert allowed["gcpPublicCidrsAccessEnabled"] is False, "every customer of Google Cloud has such an address"


def test_the_api_has_a_public_name_only_when_asked_for(stack: Run) -> None:
    def by_name(recording: Recording) -> object:
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
def test_the_kubeconfig_goes_the_way_that_is_open(
    stack: Run, overrides: Mapping[str, object], server: str, authority: str | None
) -> None:
    recording = stack("gcp", overrides)
    (cluster,) = yaml.safe_load(recording.exports["kubeconfig"])["clusters"]
    assert cluster["cluster"]["server"] == server
    assert cluster["cluster"].get("certificate-authority-data") == authority


def test_the_kubeconfig_asks_a_program_for_a_token_and_holds_none(stack: Run) -> None:
    recording = stack("gcp")
    (user,) = yaml.safe_load(recording.exports["kubeconfig"])["users"]
    assert set(user["user"]) == {"exec"}, "a token or a certificate would be a credential that does not expire"
    assert user["user"]["exec"]["command"] == "gke-gcloud-auth-plugin"
    assert "kubeconfig" in recording.secret_exports


def test_pods_have_identities_of_their_own_and_never_the_nodes(stack: Run) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["workloadIdentityConfig"] == {"workloadPool": "my-project.svc.id.goog"}
    modes = {pool.inputs["nodeConfig"]["workloadMetadataConfig"]["mode"] for pool in recording.of_type(POOL)}
    assert modes == {"GKE_METADATA"}


def test_nodes_boot_verified_images_only(stack: Run) -> None:
    recording = stack("gcp")
    assert recording.one(CLUSTER).inputs["enableShieldedNodes"] is True
    for pool in recording.of_type(POOL):
        shielded = pool.inputs["nodeConfig"]["shieldedInstanceConfig"]
        assert shielded == {"enableSecureBoot": True, "enableIntegrityMonitoring": True}


def test_kubernetes_secrets_are_encrypted_by_a_key_that_only_gke_may_use(stack: Run) -> None:
    recording = stack("gcp")
    cluster = recording.one(CLUSTER)
    assert cluster.inputs["databaseEncryption"] == {"state": "ENCRYPTED", "keyName": "gcp-cluster-secrets-id"}
    grant = recording.one("gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember")
    assert grant.inputs["member"].endswith("@container-engine-robot.iam.gserviceaccount.com")
    assert recording.needs(cluster, grant), "a cluster made before GKE may use the key is not made at all"


def test_the_data_plane_enforces_network_policies_and_the_filestore_driver_is_on(stack: Run) -> None:
    inputs = stack("gcp").one(CLUSTER).inputs
    assert inputs["datapathProvider"] == "ADVANCED_DATAPATH"
    assert inputs["addonsConfig"]["gcpFilestoreCsiDriverConfig"] == {"enabled": True}


def test_gpu_metrics_are_collected_by_managed_prometheus(stack: Run) -> None:
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
    stack: Run, location: str, where: str
) -> None:
    recording = stack("gcp", {"cluster.location": location})
    cluster = recording.one(CLUSTER).inputs
    assert cluster["location"] == where
    assert cluster.get("nodeLocations") == (["us-central1-a"] if location == "regional" else None), (
        "a zonal cluster's own zone must not be listed again"
    )
    assert all(pool.inputs["location"] == where for pool in recording.of_type(POOL))
    assert all(pool.inputs["nodeLocations"] == ["us-central1-a"] for pool in recording.of_type(POOL))


# The accelerator pool


@pytest.mark.parametrize(
    ("instance_type", "accelerator", "count"),
    [
        (A2, "nvidia-tesla-a100", 8),
        (A2_ULTRA, "nvidia-a100-80gb", 8),
        (A3, "nvidia-h100-80gb", 8),
        (TRIAL, "nvidia-l4", 1),
    ],
)
def test_gke_installs_the_driver_of_the_types_accelerators(
    stack: Run, instance_type: str, accelerator: str, count: int
) -> None:
    (found,) = _nodes(stack, instance_type)["guestAccelerators"]
    assert (found["type"], found["count"]) == (accelerator, count)
    assert found["gpuDriverInstallationConfig"] == {"gpuDriverVersion": "LATEST"}


def test_the_drivers_version_never_replaces_the_pool(stack: Run) -> None:
    pool = stack("gcp").one(POOL, "gcp-cluster-gpu")
    assert "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig" in pool.ignored
    assert "driver" not in json.dumps(Settings.model_json_schema()).lower(), "a key for it would invite the change"


def test_what_the_autoscaler_did_never_replaces_the_pool(stack: Run) -> None:
    assert "initialNodeCount" in stack("gcp").one(POOL, "gcp-cluster-gpu").ignored


def test_a_pool_that_is_replaced_goes_before_the_new_one_comes(stack: Run) -> None:
    assert stack("gcp").one(POOL, "gcp-cluster-gpu").deleted_first, "nobody has quota for twice the GPUs"


def test_a_cluster_that_is_replaced_goes_before_the_new_one_comes(stack: Run) -> None:
    assert stack("gcp").one(CLUSTER).deleted_first, "two control planes cannot have the same range"


def test_the_pool_that_gke_removes_at_once_never_replaces_the_cluster(stack: Run) -> None:
    cluster = stack("gcp").one(CLUSTER)
    assert cluster.inputs["removeDefaultNodePool"] is True
    assert cluster.ignored == ("nodeConfig",)


@pytest.mark.parametrize("instance_type", [A2, A2_ULTRA])
def test_a2_pools_have_gvnic_and_fast_socket(stack: Run, instance_type: str) -> None:
    nodes = _nodes(stack, instance_type)
    assert nodes["gvnic"] == {"enabled": True}
    assert nodes["fastSocket"] == {"enabled": True}
    assert nodes["imageType"] == "COS_CONTAINERD", "Fast Socket is made for no other image"


@pytest.mark.parametrize("instance_type", [A3, TRIAL])
def test_other_pools_have_no_fast_socket(stack: Run, instance_type: str) -> None:
    assert "fastSocket" not in _nodes(stack, instance_type)


@pytest.mark.parametrize(("instance_type", "count"), [(A2_ULTRA, 8), (A3, 16)])
def test_local_disks_that_come_with_a_type_are_used(stack: Run, instance_type: str, count: int) -> None:
    assert _nodes(stack, instance_type)["ephemeralStorageLocalSsdConfig"] == {"localSsdCount": count}


def test_the_trial_type_asks_for_neither_placement_nor_fabric(stack: Run) -> None:
    recording = stack("gcp", {"gpu.instance_type": TRIAL})
    pool = _gpu_pool(recording)
    assert "placementPolicy" not in pool
    assert "additionalNodeNetworkConfigs" not in pool["networkConfig"]
    assert "ephemeralStorageLocalSsdConfig" not in pool["nodeConfig"]
    assert [item.name for item in recording.of_type(NETWORK)] == ["gcp-network-vpc"]
    assert recording.of_type(DAEMONS) == []


@pytest.mark.parametrize("instance_type", [A2, A2_ULTRA, A3])
@pytest.mark.parametrize(
    ("capacity", "compact"), [("on_demand", True), ("spot", True), ("reservation", False), ("flex_start", False)]
)
def test_nodes_are_placed_together_unless_their_place_was_chosen_before(
    stack: Run, instance_type: str, capacity: str, compact: bool
) -> None:
    policy = _pool(stack, instance_type, capacity).get("placementPolicy")
    assert policy == ({"type": "COMPACT"} if compact else None), "a reservation's nodes stand where they stand"


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_taint_of_the_pool_is_tolerated_by_the_job(stack: Run, capacity: str) -> None:
    from infra.clouds.gcp.provision import gpu_pool

    taints = _nodes(stack, A2, capacity)["taints"]
    tolerated = [item.manifest for item in gpu_pool(_parse(CAPACITIES[capacity])).tolerations]
    assert [(item["key"], item["value"], "NoSchedule") for item in tolerated] == [
        (taint["key"], taint["value"], {"NO_SCHEDULE": "NoSchedule"}[taint["effect"]]) for taint in taints
    ]
    spot = "cloud.google.com/gke-spot" in {taint["key"] for taint in taints}
    assert spot is (capacity == "spot"), "else the system's own pods would move onto nodes that vanish"


def test_the_pool_carries_the_label_that_jobs_select(stack: Run) -> None:
    assert _nodes(stack)["labels"] == {"nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize(
    ("capacity", "affinity"),
    [
        ("on_demand", None),
        ("spot", {"consumeReservationType": "NO_RESERVATION"}),
        (
            "reservation",
            {
                "consumeReservationType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": ["ours"],
            },
        ),
        ("flex_start", {"consumeReservationType": "NO_RESERVATION"}),
    ],
)
def test_only_a_reservations_pool_takes_from_a_reservation(stack: Run, capacity: str, affinity: object) -> None:
    assert _nodes(stack, A2, capacity).get("reservationAffinity") == affinity


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_nodes_are_spot_only_when_asked_for(stack: Run, capacity: str) -> None:
    nodes = _nodes(stack, A2, capacity)
    assert nodes.get("spot", False) is (capacity == "spot")
    assert "preemptible" not in nodes, "its nodes end after 24 hours"


def test_flex_start_begins_empty_ends_after_seven_days_and_repairs_nothing(stack: Run) -> None:
    pool = _pool(stack, A2, "flex_start")
    assert pool["initialNodeCount"] == 0
    assert pool["autoscaling"]["totalMinNodeCount"] == 0
    assert pool["nodeConfig"]["flexStart"] is True
    assert pool["nodeConfig"]["maxRunDuration"] == f"{7 * 24 * 3600}s"
    assert pool["management"]["autoRepair"] is False, "GKE refuses flex-start beside it"


def test_flex_start_gives_its_nodes_back_when_it_is_told_to(stack: Run) -> None:
    recording = stack("gcp", {**CAPACITIES["flex_start"], "gpu.max_run_hours": 5})
    assert _gpu_pool(recording)["nodeConfig"]["maxRunDuration"] == "18000s"


def test_the_pool_begins_with_the_nodes_asked_for_and_scales_within_its_bounds(stack: Run) -> None:
    bounds = {"gpu.nodes.min": 1, "gpu.nodes.desired": 3, "gpu.nodes.max": 5}
    recording = stack("gcp", bounds | {"trainer.train.batch_size": 24 * 128})
    pool = _gpu_pool(recording)
    assert pool["initialNodeCount"] == 3
    assert pool["autoscaling"] == {"totalMinNodeCount": 1, "totalMaxNodeCount": 5, "locationPolicy": "ANY"}


def test_an_upgrade_of_gpu_nodes_needs_no_spare_gpu(stack: Run) -> None:
    assert _pool(stack)["upgradeSettings"] == {"maxSurge": 0, "maxUnavailable": 1}


# The fabric of A3 High


@pytest.fixture
def a3(stack: Run) -> Recording:
    """A stack of A3 High nodes."""
    return stack("gcp", {"gpu.instance_type": A3})


def test_a3_high_has_four_further_networks_of_large_packets(a3: Recording) -> None:
    further = [item for item in a3.of_type(NETWORK) if item.name != "gcp-network-vpc"]
    assert [item.inputs["mtu"] for item in further] == [8244] * 4
    assert a3.one(CLUSTER).inputs["enableMultiNetworking"] is True
    ranges = {
        item.inputs["ipCidrRange"]
        for item in a3.of_type("gcp:compute/subnetwork:Subnetwork")
        if item.name != "gcp-network-subnet"
    }
    assert ranges == {"10.200.0.0/20", "10.200.16.0/20", "10.200.32.0/20", "10.200.48.0/20"}


def test_each_card_of_an_a3_node_is_in_a_network_that_kubernetes_knows(a3: Recording) -> None:
    cards = _gpu_pool(a3)["networkConfig"]["additionalNodeNetworkConfigs"]
    parameters = {
        item.inputs["metadata"]["name"]: item.inputs["spec"] for item in a3.of_type(f"{CUSTOM}GKENetworkParamSet")
    }
    networks = {item.inputs["metadata"]["name"]: item.inputs["spec"] for item in a3.of_type(f"{CUSTOM}Network")}
    assert set(parameters) == set(networks)
    assert [(card["network"], card["subnetwork"]) for card in cards] == [
        (parameters[name]["vpc"], parameters[name]["vpcSubnet"]) for name in sorted(parameters)
    ], "the order of cards is the order of eth1 to eth4"
    assert {spec["deviceMode"] for spec in parameters.values()} == {"NetDevice"}
    assert all(spec["parametersRef"]["name"] == name for name, spec in networks.items())
    assert {spec["type"] for spec in networks.values()} == {"Device"}


def test_a_networks_parameters_go_after_the_network(a3: Recording) -> None:
    parameters = {item.inputs["metadata"]["name"]: item for item in a3.of_type(f"{CUSTOM}GKENetworkParamSet")}
    networks = {item.inputs["metadata"]["name"]: item for item in a3.of_type(f"{CUSTOM}Network")}
    for name, network in networks.items():
        assert a3.needs(network, parameters[name]), "GKE keeps parameters with a finalizer while a network uses them"
        assert not a3.needs(parameters[name], network), "the test would pass whatever the order"


def test_the_names_of_the_further_networks_stay_as_they_are(a3: Recording) -> None:
    further = {item.name for item in a3.of_type(NETWORK)} - {"gcp-network-vpc"}
    assert further == {f"gcp-network-fabric{number}" for number in (1, 2, 3, 4)}, (
        "a name that changes replaces the network and with it every GPU node; the golden list has none of them"
    )


def test_a_pod_on_a3_joins_the_networks_that_exist(a3: Recording) -> None:
    from infra.clouds.gcp.fabric import node_fabric

    annotations = node_fabric(_parse({"gpu.instance_type": A3})).pod_annotations
    interfaces = json.loads(annotations["networking.gke.io/interfaces"])
    assert interfaces[0] == {"interfaceName": "eth0", "network": "default"}
    existing = sorted(item.inputs["metadata"]["name"] for item in a3.of_type(f"{CUSTOM}Network"))
    assert [item["network"] for item in interfaces[1:]] == existing
    assert [item["interfaceName"] for item in interfaces[1:]] == ["eth1", "eth2", "eth3", "eth4"]


def test_the_tcpx_daemon_gets_the_gpus_by_its_name_and_shares_its_sockets_with_the_trainer() -> None:
    from infra.clouds.gcp.fabric import node_fabric

    tcpx = node_fabric(_parse({"gpu.instance_type": A3}))
    (daemon,) = tcpx.sidecars
    assert f"devices.gke.io/container.{daemon.name}" in tcpx.pod_annotations
    shared = next(mount for mount in tcpx.mounts if mount.name == "tcpx-socket")
    assert shared in daemon.mounts
    assert shared.host_path is None, "a pod's own folder: two pods of a node must not meet there"
    assert not shared.read_only
    assert tcpx.env["NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX"] == shared.mount_path
    assert shared.mount_path in daemon.command
    assert daemon.capabilities == ("NET_ADMIN",)
    assert not daemon.privileged
    assert tcpx.pod_security == "privileged"


def test_the_plugin_and_the_devices_come_onto_every_a3_node_whatever_its_taints(a3: Recording) -> None:
    specs = {item.name: item.inputs["spec"]["template"]["spec"] for item in a3.of_type(DAEMONS)}
    assert set(specs) == {"gcp-tcpx-tcpx-installer", "gcp-tcpx-device-injector"}
    for spec in specs.values():
        assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
        assert spec["tolerations"] == [{"operator": "Exists"}]
        images = [item["image"] for item in [*spec["containers"], *spec.get("initContainers", [])]]
        assert all("@sha256:" in image or ":v" in image for image in images), "an image that moves is no release"


def test_the_log_line_that_proves_the_fabric_depends_on_the_type() -> None:
    from infra.clouds.gcp.fabric import node_fabric

    expected = {A2: "NET/FastSocket", A2_ULTRA: "NET/FastSocket", A3: "NET/GPUDirectTCPX", TRIAL: ""}
    assert {name: node_fabric(_parse({"gpu.instance_type": name})).expected_log for name in TYPES} == expected


# The network


def test_nodes_reach_each_other_and_nobody_else_reaches_them(a3: Recording) -> None:
    rules = {item.name: item.inputs for item in a3.of_type(FIREWALL)}
    assert rules["gcp-network-nodes"]["sourceRanges"] == ["10.0.0.0/16", "10.64.0.0/14"]
    assert {allow["protocol"] for allow in rules["gcp-network-nodes"]["allows"]} == {"tcp", "udp", "icmp"}
    assert len(rules) == 6, "nodes, webhooks and one for each of the four further networks"
    for rule in rules.values():
        assert all(source.startswith(("10.", "172.16.")) for source in rule["sourceRanges"])
        assert rule["targetTags"] == ["gcp-network-node"]
    assert all(pool.inputs["nodeConfig"]["tags"] == ["gcp-network-node"] for pool in a3.of_type(POOL))


def test_the_control_plane_reaches_the_operators_webhooks(stack: Run) -> None:
    recording = stack("gcp")
    rule = recording.one(FIREWALL, "gcp-network-webhooks").inputs
    plane = recording.one(CLUSTER).inputs["privateClusterConfig"]["masterIpv4CidrBlock"]
    assert rule["sourceRanges"] == [plane]
    assert "9443" in rule["allows"][0]["ports"], "GKE opens 443 and 10250 only; a webhook not reached refuses every job"


def test_pods_and_services_have_ranges_of_their_own_on_the_subnet(stack: Run) -> None:
    recording = stack("gcp")
    subnet = recording.one("gcp:compute/subnetwork:Subnetwork").inputs
    secondary = {item["rangeName"]: item["ipCidrRange"] for item in subnet["secondaryIpRanges"]}
    policy = recording.one(CLUSTER).inputs["ipAllocationPolicy"]
    assert secondary[policy["clusterSecondaryRangeName"]] == "10.64.0.0/14"
    assert secondary[policy["servicesSecondaryRangeName"]] == "10.80.0.0/20"
    assert subnet["privateIpGoogleAccess"] is True, "else checkpoints would go through NAT and be billed there"


def test_the_internet_is_reached_through_cloud_nat(stack: Run) -> None:
    recording = stack("gcp")
    nat = recording.one("gcp:compute/routerNat:RouterNat")
    assert nat.inputs["subnetworks"] == [{"name": "gcp-network-subnet-id", "sourceIpRangesToNats": ["ALL_IP_RANGES"]}]
    for pool in recording.of_type(POOL):
        assert recording.needs(pool, nat), "a node without a way out cannot pull an image"


# Storage


def test_the_bucket_is_private_and_encrypted_by_keys_that_outlive_the_stack(stack: Run) -> None:
    inputs = stack("gcp").one(BUCKET).inputs
    assert inputs["uniformBucketLevelAccess"] is True
    assert inputs["publicAccessPrevention"] == "enforced"
    assert "encryption" not in inputs, "a key of this stack would be destroyed with it, and kept checkpoints be lost"


@pytest.mark.parametrize(("on_destroy", "kept"), [("keep", True), ("delete", False)])
def test_destroy_keeps_or_deletes_the_bucket_and_succeeds_either_way(stack: Run, on_destroy: str, kept: bool) -> None:
    bucket = stack("gcp", {"storage.on_destroy": on_destroy}).one(BUCKET)
    assert bucket.retained is kept
    assert bucket.inputs["forceDestroy"] is not kept, "a bucket with objects is not deleted without it"


def test_old_versions_are_paid_for_three_days_and_not_seven(stack: Run) -> None:
    inputs = stack("gcp").one(BUCKET).inputs
    assert inputs["versioning"] == {"enabled": True}
    assert inputs["softDeletePolicy"] == {"retentionDurationSeconds": 0}
    (rule,) = [rule for rule in inputs["lifecycleRules"] if "daysSinceNoncurrentTime" in rule["condition"]]
    assert rule["action"] == {"type": "Delete"}
    assert rule["condition"] == {"daysSinceNoncurrentTime": 3, "withState": "ARCHIVED"}


def test_checkpoints_expire_when_asked_to_and_datasets_never(stack: Run) -> None:
    def by_age(recording: Recording) -> list[Any]:
        rules = recording.one(BUCKET).inputs["lifecycleRules"]
        return [
            rule["condition"] for rule in rules if rule["action"]["type"] == "Delete" and "age" in rule["condition"]
        ]

    assert by_age(stack("gcp")) == []
    (condition,) = by_age(stack("gcp", {"storage.expire_checkpoints_after_days": 30}))
    assert condition == {"age": 30, "withState": "LIVE", "matchesPrefixes": ["checkpoints/"]}


def test_filestore_is_zonal_beside_the_gpu_nodes_and_mounted_by_its_own_driver(stack: Run) -> None:
    recording = stack("gcp")
    inputs = recording.one(FILESTORE).inputs
    assert (inputs["tier"], inputs["location"]) == ("ZONAL", "us-central1-a")
    assert inputs["fileShares"] == {"name": "datasets", "capacityGb": 1024}
    source = recording.one("kubernetes:core/v1:PersistentVolume").inputs["spec"]["csi"]
    assert source["driver"] == "filestore.csi.storage.gke.io"
    assert source["volumeHandle"] == "modeInstance/us-central1-a/gcp-storage-filestore-0a1b2c3/datasets"
    assert source["volumeAttributes"] == {"ip": "10.90.0.2", "volume": "datasets"}


# Who may do what


def _grants(recording: Recording) -> Iterator[Registration]:
    yield from (item for item in recording.registrations if item.type.startswith("gcp:") and "role" in item.inputs)


def test_nobody_is_owner_editor_or_administrator(a3: Recording) -> None:
    roles = {item.inputs["role"] for item in _grants(a3)}
    assert len(roles) >= 6
    assert not roles & {"roles/owner", "roles/editor", "roles/viewer"}
    assert not [role for role in roles if "admin" in role.lower()]
    assert not [item.inputs["member"] for item in _grants(a3) if item.inputs["member"].startswith("all")]


def test_a_grant_is_added_and_never_takes_another_away(a3: Recording) -> None:
    kinds = {item.type.rpartition(":")[2] for item in a3.registrations if "iam" in item.type.lower()}
    assert all(kind.lower().endswith("iammember") for kind in kinds), (
        "a binding or policy would remove what others gave"
    )


def test_the_nodes_may_write_logs_and_metrics_and_pull_this_stacks_images(stack: Run) -> None:
    recording = stack("gcp")
    nodes = [item for item in _grants(recording) if "-nodes-" in item.inputs["member"]]
    assert {item.inputs["role"] for item in nodes} == {
        "roles/container.defaultNodeServiceAccount",
        "roles/artifactregistry.reader",
    }
    reader = recording.one("gcp:artifactregistry/repositoryIamMember:RepositoryIamMember")
    assert reader.inputs["repository"] == "torchrec-cloud-gcp"
    on_project = recording.of_type("gcp:projects/iAMMember:IAMMember")
    assert [item.inputs["role"] for item in on_project] == ["roles/container.defaultNodeServiceAccount"]


def test_no_pool_runs_as_the_projects_default_account(stack: Run) -> None:
    recording = stack("gcp")
    configs = [item.inputs["nodeConfig"] for item in (*recording.of_type(POOL), recording.one(CLUSTER))]
    assert all(config["serviceAccount"].startswith("gcp-nodes-") for config in configs), "it may edit the whole project"


def test_the_trainer_reads_its_bucket_writes_its_checkpoints_and_nothing_else(stack: Run) -> None:
    recording = stack("gcp")
    trainer = [item for item in _grants(recording) if "-trainer-" in item.inputs["member"]]
    assert {item.type for item in trainer} == {"gcp:storage/bucketIAMMember:BucketIAMMember"}
    assert {item.inputs["bucket"] for item in trainer} == {"gcp-storage-bucket-0a1b2c3"}
    by_role = {item.inputs["role"]: item.inputs.get("condition") for item in trainer}
    assert set(by_role) == {"roles/storage.objectViewer", "roles/storage.objectUser"}
    writes = by_role["roles/storage.objectUser"]
    assert writes["expression"] == (
        'resource.name.startsWith("projects/_/buckets/gcp-storage-bucket-0a1b2c3/objects/checkpoints/")'
    )


def test_only_the_trainers_pods_are_the_trainer(stack: Run) -> None:
    recording = stack("gcp", {"namespace": "ads"})
    grant = recording.one("gcp:serviceaccount/iAMMember:IAMMember")
    assert grant.inputs["role"] == "roles/iam.workloadIdentityUser"
    assert grant.inputs["member"] == "serviceAccount:my-project.svc.id.goog[ads/trainer]"
    assert "trainer" in grant.inputs["serviceAccountId"]
    assert recording.needs(grant, recording.one(CLUSTER)), "the pool of identities comes with the first cluster"


def test_no_key_of_a_service_account_is_made(a3: Recording) -> None:
    assert not [item.name for item in a3.registrations if item.type.startswith("gcp:serviceaccount/key")]


@pytest.mark.parametrize("name", ["a", "gcp", "a-stack-with-quite-a-long-name"])
@pytest.mark.parametrize("role", ["nodes", "trainer"])
def test_a_service_accounts_name_fits_whatever_the_stack_is_called(name: str, role: str) -> None:
    from infra.clouds.gcp.cluster import account_id

    found = account_id(_parse(name=name), role)
    assert 6 <= len(found) <= 30
    assert role in found
    assert found != account_id(_parse(name=f"{name}2"[-29:]), role), "stacks must not share an account"


# Every resource


def test_every_resource_that_takes_labels_has_the_stacks(a3: Recording) -> None:
    import pulumi_gcp

    expected = _parse().labels
    checked = set()
    for item in a3.registrations:
        if not item.type.startswith("gcp:"):
            continue
        module, kind = item.type.split(":")[1].split("/")[0], item.type.rpartition(":")[2]
        parameters = inspect.signature(getattr(getattr(pulumi_gcp, module), kind)._internal_init).parameters
        takes = {"labels": "labels", "resource_labels": "resourceLabels", "user_labels": "userLabels"}
        for parameter in takes.keys() & parameters.keys():
            assert expected.items() <= item.inputs.get(takes[parameter], {}).items(), f"{item.type} {item.name}"
            checked.add(kind)
    assert checked == {"Bucket", "Cluster", "CryptoKey", "Instance", "Repository"}
    assert all(pool.inputs["nodeConfig"]["resourceLabels"] == expected for pool in a3.of_type(POOL)), "machines, disks"


def test_the_projects_services_stay_on_and_come_first(stack: Run) -> None:
    recording = stack("gcp")
    services = recording.of_type("gcp:projects/service:Service")
    assert all(item.inputs["disableOnDestroy"] is False for item in services), "other stacks of the project use them"
    names = {item.inputs["service"] for item in services}
    assert {"compute.googleapis.com", "container.googleapis.com", "file.googleapis.com"} <= names
    for token in (NETWORK, CLUSTER, BUCKET, FILESTORE):
        assert all(recording.needs(recording.one(token), service) for service in services)


# Destroy


def test_on_destroy_kubernetes_objects_go_before_the_nodes_that_delete_them(stack: Run) -> None:
    recording = stack("gcp")
    provider, system = recording.one("pulumi:providers:kubernetes"), recording.one(POOL, "gcp-cluster-system")
    assert recording.needs(provider, system), "without its metrics server a cluster deletes no namespace"


def test_on_destroy_the_volume_goes_before_its_file_system_and_that_before_its_network(stack: Run) -> None:
    recording = stack("gcp")
    volume, filestore = recording.one("kubernetes:core/v1:PersistentVolume"), recording.one(FILESTORE)
    assert recording.needs(volume, filestore)
    assert recording.needs(filestore, recording.one(NETWORK))


def test_on_destroy_operators_go_before_the_system_nodes(stack: Run) -> None:
    recording = stack("gcp")
    release = recording.one("kubernetes:helm.sh/v3:Release")
    assert recording.needs(release, recording.one(POOL, "gcp-cluster-system"))
    assert not recording.needs(release, recording.one(POOL, "gcp-cluster-gpu")), "operators need no GPU"


# Settings


def test_all_mistakes_of_a_stack_are_told_at_once() -> None:
    found = _problems(
        {
            "gcp:project": None,
            "gcp:zone": "europe-west4-b",
            "gpu.instance_type": "p5.48xlarge",
            "gpu.capacity": "spot",
            "gpu.reservation_id": "ours",
            "gpu.nodes.max": 300,
            "gpu.max_run_hours": 5,
            "network.pods_cidr": "10.0.0.0/24",
            "network.services_cidr": "10.80.0.0/28",
            "network.control_plane_cidr": "172.16.0.0/24",
            "system.instance_type": "m6i.xlarge",
            "storage.size_gib": 1200,
        }
    )
    expected = {
        "gcp:project": "missing",
        "gcp:zone": "not a zone of us-central1",
        "gpu.instance_type": "an instance type of aws, and cloud is 'gcp'",
        "gpu.reservation_id": "capacity 'spot' does not come from a reservation",
        "gpu.max_run_hours": "capacity 'spot' does not end by itself",
        "network.pods_cidr": "overlaps network.cidr (10.0.0.0/16)",
        "network.services_cidr": "16 usable addresses, 512 needed for services",
        "network.control_plane_cidr": "a size that GKE refuses",
        "system.instance_type": "unknown value",
        "storage.size_gib": "a size that the service refuses",
    }
    assert {key: problem.message for key, problem in found.items()} == expected
    assert found["gcp:project"].fix == "pulumi config set gcp:project my-project"
    assert found["gcp:zone"].fix == "pulumi config set gcp:zone us-central1-a"
    assert A3 in found["gpu.instance_type"].allowed


def test_a_stack_in_error_registers_nothing(stack: Run) -> None:
    recording = stack("gcp", {"gcp:project": None, "storage.size_gib": 1}, fails=True)
    assert "pulumi config set gcp:project my-project" in str(recording.error)
    assert "pulumi config set --path storage.size_gib 1024" in str(recording.error)
    assert recording.registrations == []


@pytest.mark.parametrize(
    ("size_gib", "offered"),
    [
        (1, 1024),
        (1000, 1024),
        (1025, 1280),
        (1200, 1280),
        (9984, None),
        (9985, 10240),
        (10240, None),
        (10241, 12800),
        (12800, None),
        (102400, None),
        (102401, 102400),
    ],
)
def test_filestore_comes_in_two_bands_of_steps(size_gib: int, offered: int | None) -> None:
    if offered is None:
        assert _parse({"storage.size_gib": size_gib}).storage.size_gib == size_gib
        return
    problem = _problems({"storage.size_gib": size_gib})["storage.size_gib"]
    assert problem.fix == f"pulumi config set --path storage.size_gib {offered}"
    assert "steps of 256" in problem.allowed
    assert "steps of 2560" in problem.allowed
    assert _parse({"storage.size_gib": offered})


def test_a_default_stack_has_a_size_that_filestore_takes() -> None:
    assert _parse().storage.size_gib == 1024


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"gpu.capacity": "flex_start", "gpu.nodes.min": 1}, "gpu.nodes.min"),
        ({"gpu.capacity": "flex_start", "gpu.reservation_id": "ours"}, "gpu.reservation_id"),
        ({"gpu.capacity": "flex_start", "gpu.max_run_hours": 169}, "gpu.max_run_hours"),
        ({"gpu.max_run_hours": 24}, "gpu.max_run_hours"),
        ({"gpu.capacity": "reservation"}, "gpu.reservation_id"),
        ({"gpu.capacity": "preemptible"}, "gpu.capacity"),
        ({"gpu.nodes.desired": 0, "gpu.nodes.max": 0}, "gpu.nodes.max"),
    ],
)
def test_a_way_to_buy_nodes_that_does_not_exist_is_refused(overrides: Mapping[str, object], key: str) -> None:
    assert set(_problems(overrides)) == {key}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"network.cidr": "10.64.0.0/16"}, "network.pods_cidr"),
        ({"network.control_plane_cidr": "10.0.0.0/28"}, "network.control_plane_cidr"),
        ({"network.services_cidr": "10.0.128.0/20"}, "network.services_cidr"),
        ({"network.pods_cidr": "10.64.0.0/24"}, "network.pods_cidr"),
        ({"network.cidr": "10.0.0.0/30"}, "network.cidr"),
        ({"gpu.instance_type": A3, "network.fabric_cidr": "10.0.0.0/18"}, "network.fabric_cidr"),
        ({"gpu.instance_type": A3, "network.fabric_cidr": "10.200.0.0/28"}, "network.fabric_cidr"),
    ],
)
def test_ranges_that_overlap_or_are_too_small_are_refused_with_one_that_fits(
    overrides: Mapping[str, object], key: str
) -> None:
    problem = _problems(overrides)[key]
    assert _parse({**overrides, key: problem.fix.split()[-1]}), "the command that is offered must fix it"


def test_a_range_that_no_network_uses_is_not_checked() -> None:
    assert _parse({"network.fabric_cidr": "10.0.0.0/18"}), "A2 has no further networks"


@pytest.mark.parametrize(("nodes", "fits"), [(12, True), (13, False)])
def test_every_node_of_a3_has_an_address_in_each_further_network(nodes: int, fits: bool) -> None:
    overrides = {"gpu.instance_type": A3, "network.fabric_cidr": "10.200.0.0/26", "gpu.nodes.max": nodes}
    if fits:
        assert _parse(overrides).network.fabric_subnets[3] == "10.200.0.48/28", "16 addresses, 4 of them Google's"
    else:
        assert "network.fabric_cidr" in _problems(overrides)


@pytest.mark.parametrize("name", ["Prod", "1st", "team.prod", "a" * 31, "prod-"])
def test_a_stack_whose_name_google_cloud_refuses_is_told_to_take_another(name: str) -> None:
    assert _problems({}, name)["stack"].fix == "pulumi stack rename <name>"


def test_a_label_that_google_cloud_refuses_is_named() -> None:
    assert set(_problems({"tags.extra": {"Team": "ads"}})) == {'tags.extra["Team"]'}


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [({}, True), ({"network.dns_endpoint": True}, False), ({"network.authorized_cidrs": ["198.51.100.0/24"]}, False)],
)
def test_a_private_cluster_says_how_to_reach_it(
    monkeypatch: pytest.MonkeyPatch, overrides: Mapping[str, object], warned: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", said.append)
    assert run_stack("gcp", overrides).error is None
    assert any("pulumi config set --path network.dns_endpoint true" in line for line in said) is warned


# Cost


def test_everything_billed_by_the_hour_is_in_the_sum() -> None:
    settings = _parse()
    lines = {line.what: line for line in settings.cost_lines(2)}
    assert lines["GKE control plane"].on_demand_usd_per_hour == 0.10
    assert lines["system node e2-standard-4"].count == 2
    assert lines["GiB of Filestore"].count == 1024
    assert lines["Cloud NAT gateway"].on_demand_usd_per_hour == pytest.approx(4 * 0.0014)
    total = HourlyCost(settings.cost_lines(2)).on_demand_usd
    assert total == pytest.approx(
        2 * 29.387 + 0.10 + 2 * 0.134012 + 1024 * 0.25 / 730 + 0.0056 + 0.005 + 0.06 / 730, abs=1e-3
    )


def test_nat_is_billed_for_thirty_two_nodes_at_most() -> None:
    lines = {line.what: line for line in _parse().cost_lines(100)}
    assert lines["Cloud NAT gateway"].on_demand_usd_per_hour == 0.044


def test_a_budget_below_the_sum_is_refused_with_the_sum() -> None:
    problem = _problems({"budget.max_usd_per_hour": 50})["budget.max_usd_per_hour"]
    assert "59.50 USD per hour" in problem.message
