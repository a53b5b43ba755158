"""Azure: the GPU pool, its capacity, drivers and InfiniBand."""

from __future__ import annotations

from collections.abc import Mapping

import pulumi
import pytest
from azure_stack import (
    CHOSEN,
    NETAPP_VOLUME,
    POOL,
    RESERVATION,
    RESERVED,
    ROLE,
    SPOT,
    TRIAL,
    Stack,
    parse_settings,
    releases,
)

from infra.clouds.azure.live import plan_num_nodes


def test_all_gpu_nodes_are_in_one_scale_set_with_the_configured_limits(stack: Stack) -> None:
    (pool,) = stack("azure").of_type(POOL)
    assert pool.inputs["type"] == "VirtualMachineScaleSets"
    assert pool.inputs["vmSize"] == "Standard_ND96asr_v4"
    assert (pool.inputs["minCount"], pool.inputs["maxCount"]) == (0, 2)
    assert pool.inputs["count"] == 0, "AKS refuses a pool without a number of nodes"
    assert pool.ignored == (), "a stored number would be sent with the next change, and AKS refuses it"
    assert pool.inputs["enableAutoScaling"] is True
    assert pool.inputs["nodeLabels"] == {"nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize(("live", "expected"), [(None, 1), (1, 1), (3, 3), (0, 0)])
def test_a_request_names_the_running_number_of_nodes(live: int | None, expected: int) -> None:
    assert plan_num_nodes((1, 4), live, "azure") == expected


def test_a_maximum_below_the_running_number_of_nodes_is_refused() -> None:
    with pytest.raises(pulumi.RunError, match=r"got 2; allowed: 3 or more\. Fix: pulumi config set --path gpu.nodes"):
        plan_num_nodes((0, 2), 3, "azure")


def test_the_job_and_all_daemons_of_gpu_nodes_tolerate_the_spot_taint(stack: Stack) -> None:
    recording = stack("azure", SPOT)
    pool = recording.one(POOL).inputs
    assert (pool["scaleSetPriority"], pool["scaleSetEvictionPolicy"], pool["spotMaxPrice"]) == ("Spot", "Delete", -1)
    taint = "kubernetes.azure.com/scalesetpriority=spot:NoSchedule"
    assert taint in pool["nodeTaints"]
    tolerated = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot"}
    toleration = tolerated | {"effect": "NoSchedule"}
    values = releases(recording)
    assert toleration in values["gpu-operator"]["daemonsets"]["tolerations"]
    assert toleration in values["network-operator"]["node-feature-discovery"]["worker"]["tolerations"]
    assert toleration in values["dcgm-exporter"]["tolerations"]


def test_the_job_tolerates_exactly_the_taints_of_the_pool() -> None:
    from infra.clouds.azure.provision import gpu_pool

    for capacity, expected in (("on_demand", 1), ("spot", 2)):
        pool = gpu_pool(parse_settings({"gpu": {"instance_type": "Standard_ND96asr_v4", "capacity": capacity}}))
        assert len(pool.tolerations) == expected
        assert pool.interruptible is (capacity == "spot")


def test_an_on_demand_pool_is_not_marked_as_spot(stack: Stack) -> None:
    pool = stack("azure").one(POOL).inputs
    assert pool["scaleSetPriority"] == "Regular"
    assert pool["nodeTaints"] == ["nvidia.com/gpu=present:NoSchedule"]
    assert "spotMaxPrice" not in pool


def test_a_spot_pool_has_no_upgrade_settings_and_other_pools_upgrade_without_surge(stack: Stack) -> None:
    assert "upgradeSettings" not in stack("azure", SPOT).one(POOL).inputs
    settings = stack("azure").one(POOL).inputs["upgradeSettings"]
    assert (settings["maxSurge"], settings["maxUnavailable"]) == ("0", "1"), (
        "few subscriptions have quota for a spare ND node"
    )


def test_reserved_nodes_use_the_reservation_group_and_aks_has_a_role_on_it(stack: Stack) -> None:
    recording = stack("azure", RESERVED)
    pool = recording.one(POOL)
    assert pool.inputs["capacityReservationGroupID"] == RESERVATION
    assert (pool.inputs["minCount"], pool.inputs["count"]) == (2, 2), "reserved machines are billed, used or not"
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
def test_the_gpu_driver_is_installed_either_by_aks_or_by_the_operator(
    stack: Stack, overrides: Mapping[str, object], driver: str, software: str
) -> None:
    recording = stack("azure", overrides)
    assert recording.one(POOL).inputs["gpuProfile"] == {"driver": driver}
    assert set(releases(recording)) & {"gpu-operator", "nvidia-device-plugin"} == {software}


def test_the_operator_builds_the_driver_for_rdma_and_leaves_feature_discovery_to_the_network_operator(
    stack: Stack,
) -> None:
    values = releases(stack("azure"))["gpu-operator"]
    assert values["driver"] == {"enabled": True, "rdma": {"enabled": True}}
    assert values["nfd"] == {"enabled": False}
    alone = releases(stack("azure", {**TRIAL, "gpu.driver": "operator"}))["gpu-operator"]
    assert alone["nfd"] == {"enabled": True}, "no network operator installs it on this size"


@pytest.mark.parametrize("size", ["Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5"])
def test_a_pod_on_an_nd_node_requests_one_infiniband_function_per_gpu(size: str) -> None:
    from infra.clouds.azure.provision import gpu_pool, node_fabric

    settings = parse_settings({"gpu": {"instance_type": size}})
    assert gpu_pool(settings).resource_limits == {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    fabric = node_fabric(settings)
    assert fabric.chart
    assert fabric.chart.key == "network-operator"
    assert (fabric.rdma, fabric.as_root, fabric.capabilities) == (True, True, ("IPC_LOCK",))
    generation = "v5" if "H100" in size else "v4"
    assert fabric.env["NCCL_TOPO_FILE"].endswith(f"nd{generation}-topo.xml")


@pytest.mark.parametrize("overrides", [{}, TRIAL, SPOT])
def test_the_template_of_an_empty_pool_has_everything_that_a_trainers_pod_requests(
    stack: Stack, overrides: Mapping[str, object]
) -> None:
    from infra.clouds.azure.provision import gpu_pool

    pool = stack("azure", overrides).one(POOL).inputs
    tags = pool["tags"]
    # cluster-autoscaler, azure_template.go: GPUs are known by the size, other resources by tags of the scale set.
    start = "k8s.io_cluster-autoscaler_node-template_resources_"
    offered = {key.removeprefix(start).replace("_", "/"): tags[key] for key in tags if key.startswith(start)}
    requested = dict(gpu_pool(parse_settings({"gpu": {"instance_type": pool["vmSize"]}})).resource_limits)
    assert requested.pop("nvidia.com/gpu")
    assert offered == requested, "pending pods would start no node"


def test_a_size_without_infiniband_has_no_network_operator_and_requests_no_rdma(stack: Stack) -> None:
    from infra.clouds.azure.provision import gpu_pool, node_fabric

    settings = parse_settings({"gpu": {"instance_type": "Standard_NC4as_T4_v3"}})
    assert gpu_pool(settings).resource_limits == {"nvidia.com/gpu": "1"}
    assert node_fabric(settings).capabilities == ()
    recording = stack("azure", TRIAL)
    assert "network-operator" not in releases(recording)
    assert not recording.of_type("kubernetes:mellanox.com/v1alpha1:NicClusterPolicy")


@pytest.mark.parametrize(("driver", "warned"), [("aks", True), ("operator", False), (None, False)])
def test_a_driver_that_disables_gpudirect_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, warned: bool
) -> None:
    from infra.clouds.azure import provision

    warnings: list[str] = []
    monkeypatch.setattr(provision.pulumi.log, "warn", warnings.append)
    provision.warn_of_missing_peermem(
        parse_settings({"gpu": {"instance_type": "Standard_ND96asr_v4", "driver": driver}})
    )
    assert bool(warnings) is warned


def test_the_next_steps_list_the_required_features_of_the_subscription(stack: Stack) -> None:
    steps = "\n".join(stack("azure").exports["next_steps"])
    assert "--namespace Microsoft.ContainerService --name AKSInfinibandSupport" in steps
    assert "--namespace Microsoft.Compute --name EncryptionAtHost" in steps
    assert "AKSInfinibandSupport" not in "\n".join(stack("azure", TRIAL).exports["next_steps"])


def test_gpu_nodes_and_volume_are_in_the_same_zone(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    assert recording.one(POOL).inputs["availabilityZones"] == ["2"]
    assert recording.one(NETAPP_VOLUME).inputs["zones"] == ["2"]
    assert "availabilityZones" not in stack("azure").one(POOL).inputs


@pytest.mark.parametrize("spelling", [2, "2", "eastus-2"])
def test_a_zone_is_a_number_or_the_label_of_its_nodes(spelling: object) -> None:
    assert parse_settings({"gpu": {"instance_type": "Standard_ND96asr_v4", "zone": spelling}}).zones == ["2"]
