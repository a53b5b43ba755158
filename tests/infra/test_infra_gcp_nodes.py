"""Google Cloud: the GPU pool for each machine type and each kind of capacity."""

from __future__ import annotations

import json

import pytest
from gcp_stack import (
    A2,
    A2_ULTRA,
    A3,
    CAPACITIES,
    CLUSTER,
    DAEMONS,
    NETWORK,
    POOL,
    TRIAL,
    Stack,
    gpu_pool_inputs,
    node_config,
    parse_settings,
    pool_inputs,
)

from infra.clouds.gcp.settings import Settings


@pytest.mark.parametrize(
    ("instance_type", "accelerator", "count"),
    [
        (A2, "nvidia-tesla-a100", 8),
        (A2_ULTRA, "nvidia-a100-80gb", 8),
        (A3, "nvidia-h100-80gb", 8),
        (TRIAL, "nvidia-l4", 1),
    ],
)
def test_gke_installs_the_driver_of_the_types_gpus(
    stack: Stack, instance_type: str, accelerator: str, count: int
) -> None:
    (found,) = node_config(stack, instance_type)["guestAccelerators"]
    assert (found["type"], found["count"]) == (accelerator, count)
    assert found["gpuDriverInstallationConfig"] == {"gpuDriverVersion": "LATEST"}


def test_the_driver_version_never_replaces_the_pool(stack: Stack) -> None:
    pool = stack("gcp").one(POOL, "gcp-cluster-gpu")
    assert "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig" in pool.ignored
    assert "driver" not in json.dumps(Settings.model_json_schema()).lower(), "a setting for it would allow the change"


def test_a_node_count_of_the_autoscaler_never_replaces_the_pool(stack: Stack) -> None:
    assert "initialNodeCount" in stack("gcp").one(POOL, "gcp-cluster-gpu").ignored


def test_a_replaced_pool_is_deleted_before_the_new_one_is_created(stack: Stack) -> None:
    assert stack("gcp").one(POOL, "gcp-cluster-gpu").deleted_first, "projects have no quota for twice the GPUs"


def test_a_replaced_cluster_is_deleted_before_the_new_one_is_created(stack: Stack) -> None:
    assert stack("gcp").one(CLUSTER).deleted_first, "two control planes cannot have the same range"


def test_the_removed_default_pool_never_replaces_the_cluster(stack: Stack) -> None:
    cluster = stack("gcp").one(CLUSTER)
    assert cluster.inputs["removeDefaultNodePool"] is True
    assert cluster.ignored == ("nodeConfig",)


@pytest.mark.parametrize("instance_type", [A2, A2_ULTRA])
def test_a2_pools_have_gvnic_and_fast_socket(stack: Stack, instance_type: str) -> None:
    nodes = node_config(stack, instance_type)
    assert nodes["gvnic"] == {"enabled": True}
    assert nodes["fastSocket"] == {"enabled": True}
    assert nodes["imageType"] == "COS_CONTAINERD", "Fast Socket supports no other image"


@pytest.mark.parametrize("instance_type", [A3, TRIAL])
def test_other_pools_have_no_fast_socket(stack: Stack, instance_type: str) -> None:
    assert "fastSocket" not in node_config(stack, instance_type)


@pytest.mark.parametrize(("instance_type", "count"), [(A2_ULTRA, 8), (A3, 16)])
def test_included_local_ssds_are_used(stack: Stack, instance_type: str, count: int) -> None:
    assert node_config(stack, instance_type)["ephemeralStorageLocalSsdConfig"] == {"localSsdCount": count}


def test_the_trial_type_has_neither_placement_nor_fabric(stack: Stack) -> None:
    recording = stack("gcp", {"gpu.instance_type": TRIAL})
    pool = gpu_pool_inputs(recording)
    assert "placementPolicy" not in pool
    assert "additionalNodeNetworkConfigs" not in pool["networkConfig"]
    assert "ephemeralStorageLocalSsdConfig" not in pool["nodeConfig"]
    assert [item.name for item in recording.of_type(NETWORK)] == ["gcp-network-vpc"]
    assert recording.of_type(DAEMONS) == []


@pytest.mark.parametrize("instance_type", [A2, A2_ULTRA, A3])
@pytest.mark.parametrize(
    ("capacity", "compact"), [("on_demand", True), ("spot", True), ("reservation", False), ("flex_start", False)]
)
def test_nodes_are_placed_compactly_unless_reserved_or_flex_start(
    stack: Stack, instance_type: str, capacity: str, compact: bool
) -> None:
    policy = pool_inputs(stack, instance_type, capacity).get("placementPolicy")
    assert policy == ({"type": "COMPACT"} if compact else None), "a reservation has already placed its nodes"


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_job_tolerates_every_taint_of_the_pool(stack: Stack, capacity: str) -> None:
    from infra.clouds.gcp.provision import gpu_pool

    taints = node_config(stack, A2, capacity)["taints"]
    tolerated = [item.manifest for item in gpu_pool(parse_settings(CAPACITIES[capacity])).tolerations]
    assert [(item["key"], item["value"], "NoSchedule") for item in tolerated] == [
        (taint["key"], taint["value"], {"NO_SCHEDULE": "NoSchedule"}[taint["effect"]]) for taint in taints
    ]
    spot = "cloud.google.com/gke-spot" in {taint["key"] for taint in taints}
    assert spot is (capacity == "spot"), "without the taint, system pods could run on spot nodes"


def test_the_pool_has_the_label_that_jobs_select(stack: Stack) -> None:
    assert node_config(stack)["labels"] == {"nvidia.com/gpu.present": "true"}


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
def test_only_a_reserved_pool_uses_a_specific_reservation(stack: Stack, capacity: str, affinity: object) -> None:
    assert node_config(stack, A2, capacity).get("reservationAffinity") == affinity


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_nodes_are_spot_only_if_configured(stack: Stack, capacity: str) -> None:
    nodes = node_config(stack, A2, capacity)
    assert nodes.get("spot", False) is (capacity == "spot")
    assert "preemptible" not in nodes, "preemptible nodes are deleted after 24 hours"


def test_flex_start_starts_empty_expires_after_seven_days_and_repairs_nothing(stack: Stack) -> None:
    pool = pool_inputs(stack, A2, "flex_start")
    assert pool["initialNodeCount"] == 0
    assert pool["autoscaling"]["totalMinNodeCount"] == 0
    assert pool["nodeConfig"]["flexStart"] is True
    assert pool["nodeConfig"]["maxRunDuration"] == f"{7 * 24 * 3600}s"
    assert pool["management"]["autoRepair"] is False, "GKE rejects flex-start with it"


def test_flex_start_nodes_expire_after_the_configured_time(stack: Stack) -> None:
    recording = stack("gcp", {**CAPACITIES["flex_start"], "gpu.max_run_hours": 5})
    assert gpu_pool_inputs(recording)["nodeConfig"]["maxRunDuration"] == "18000s"


@pytest.mark.parametrize(("capacity", "num_nodes"), [("on_demand", 1), ("spot", 1), ("reservation", 3)])
def test_the_pool_starts_with_its_minimum_unless_reserved_and_scales_within_its_limits(
    stack: Stack, capacity: str, num_nodes: int
) -> None:
    bounds = {"gpu.nodes.min": 1, "gpu.nodes.desired": 3, "gpu.nodes.max": 5}
    recording = stack("gcp", bounds | CAPACITIES[capacity] | {"trainer.train.batch_size": 24 * 128})
    pool = gpu_pool_inputs(recording)
    assert pool["initialNodeCount"] == num_nodes, "idle nodes cost, then the autoscaler removes them"
    assert pool["autoscaling"] == {"totalMinNodeCount": 1, "totalMaxNodeCount": 5, "locationPolicy": "ANY"}
    assert "nodeCount" not in pool, "the provider would resize the pool to it after each change by the autoscaler"


def test_an_upgrade_of_gpu_nodes_needs_no_spare_gpu(stack: Stack) -> None:
    assert pool_inputs(stack)["upgradeSettings"] == {"maxSurge": 0, "maxUnavailable": 1}
