"""Tests of the simulated clouds: the engine tests can fail only because these refuse wrong requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import engine_clouds
import pytest
from engine_lifecycle import num_creates, spread_positions
from engine_world import LAPTOP, ConnectionLost, Inputs, PartlyCreated, Refused, Resource, Rules, World
from simulated_access import check_address

SUBNET, VPC = "aws:ec2/subnet:Subnet", "aws:ec2/vpc:Vpc"
LUSTRE = "aws:fsx/lustreFileSystem:LustreFileSystem"
NAMESPACE, JOB = "kubernetes:core/v1:Namespace", "kubernetes:batch/v1:Job"
CLAIM = "kubernetes:core/v1:PersistentVolumeClaim"


@pytest.fixture
def world() -> World:
    """Return an empty world with an existing cluster."""
    empty = World(engine_clouds.rules_of)
    empty.kubeconfig = "server: https://127.0.0.1:6443"
    return empty


def job(completions: int = 2, claim: str = "datasets") -> dict[str, Any]:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": claim}}
    pod = {"spec": {"containers": [{"name": "trainer"}], "volumes": [volume]}}
    metadata = {"name": "run-1", "namespace": "training"}
    return {"metadata": metadata, "spec": {"completions": completions, "template": pod}}


def lustre(subnet: str, **changed: object) -> dict[str, Any]:
    inputs = {"deploymentType": "PERSISTENT_2", "storageCapacity": 1200, "perUnitStorageThroughput": 250}
    return {**inputs, "subnetIds": subnet, **changed}


def test_a_vpc_with_a_subnet_and_a_subnet_with_a_file_system_cannot_be_deleted(world: World) -> None:
    vpc = world.create(VPC, "vpc", {"cidrBlock": "10.0.0.0/16"})
    subnet = world.create(SUBNET, "subnet", {"vpcId": vpc.id})
    system = world.create(LUSTRE, "lustre", lustre(subnet.id))
    for token, resource in ((VPC, vpc), (SUBNET, subnet)):
        with pytest.raises(Refused, match="DependencyViolation"):
            world.delete(token, resource.id)
    for token, resource in ((LUSTRE, system), (SUBNET, subnet), (VPC, vpc)):
        world.delete(token, resource.id)
    assert not world.resources


@pytest.mark.parametrize("forced", [False, True])
def test_a_bucket_with_objects_is_deleted_only_by_force(world: World, forced: bool) -> None:
    bucket = world.create("aws:s3/bucket:Bucket", "bucket", {"forceDestroy": forced})
    world.add("aws:s3/bucketObjectv2:BucketObjectv2", "checkpoint", {"bucket": bucket.computed["bucket"]})
    if forced:
        world.delete(bucket.type, bucket.id)
        assert not world.resources, "objects of a deleted bucket remain"
    else:
        with pytest.raises(Refused, match="BucketNotEmpty"):
            world.delete(bucket.type, bucket.id)


def test_a_custom_resource_needs_its_operator_and_an_object_its_namespace(world: World) -> None:
    monitor = {"metadata": {"name": "run", "namespace": "training"}}
    kind = "kubernetes:monitoring.coreos.com/v1:PodMonitor"
    with pytest.raises(Refused, match='no matches for kind "PodMonitor"'):
        world.create(kind, "monitor", monitor)
    release = {"chart": "kube-prometheus-stack", "name": "kube-prometheus-stack", "namespace": "monitoring"}
    with pytest.raises(Refused, match='namespaces "monitoring" not found'):
        world.create("kubernetes:helm.sh/v3:Release", "prometheus", release)
    for name in ("monitoring", "training"):
        world.create(NAMESPACE, name, {"metadata": {"name": name}})
    world.create("kubernetes:helm.sh/v3:Release", "prometheus", release)
    world.create(kind, "monitor", monitor)
    with pytest.raises(Refused, match="stays Terminating"):
        world.delete(NAMESPACE, "training")


def test_a_deleted_cluster_is_unreachable(world: World) -> None:
    world.kubeconfig = "server: https://of.a.cloud"
    with pytest.raises(Refused, match="unreachable"):
        world.create(NAMESPACE, "training", {"metadata": {"name": "training"}})


PRIVATE_CLUSTERS = {
    "aws:eks/cluster:Cluster": (
        {},
        {"vpcConfig": {"endpointPublicAccess": True, "publicAccessCidrs": ["203.0.113.7/32"]}},
    ),
    "azure-native:containerservice:ManagedCluster": (
        {"apiServerAccessProfile": {"enablePrivateCluster": True}},
        {"apiServerAccessProfile": {"authorizedIPRanges": ["203.0.113.0/24"]}},
    ),
    "gcp:container/cluster:Cluster": (
        {"privateClusterConfig": {"enablePrivateEndpoint": True}},
        {"masterAuthorizedNetworksConfig": {"cidrBlocks": [{"cidrBlock": "203.0.113.7/32"}]}},
    ),
}


@pytest.mark.parametrize("kind", PRIVATE_CLUSTERS)
def test_an_api_server_lets_in_its_network_and_the_authorized_ranges(world: World, kind: str) -> None:
    private, authorized = PRIVATE_CLUSTERS[kind]
    cluster = world.add(kind, "cluster", private)
    with pytest.raises(Refused, match=r"i/o timeout|no such host"):
        check_address(world)
    world.machine = "10.0.1.5"
    check_address(world)
    world.machine, cluster.inputs = LAPTOP, authorized
    check_address(world)
    world.machine = "198.51.100.1"
    with pytest.raises(Refused, match=r"i/o timeout|no such host"):
        check_address(world)


def test_a_job_template_is_immutable_and_its_claim_is_protected(world: World) -> None:
    world.create(NAMESPACE, "training", {"metadata": {"name": "training"}})
    claim = {"metadata": {"name": "datasets", "namespace": "training"}, "spec": {"storageClassName": ""}}
    world.create(CLAIM, "claim", claim)
    world.create(JOB, "job", job())
    with pytest.raises(Refused, match="field is immutable"):
        world.update(JOB, "training/run-1", job(claim="another"))
    assert world.diff(JOB, job(), job(claim="another")).replaces
    with pytest.raises(Refused, match="pvc-protection"):
        world.delete(CLAIM, "training/datasets")
    larger = {**claim, "spec": {"storageClassName": "", "resources": {"requests": {"storage": "2Ti"}}}}
    with pytest.raises(Refused, match="only dynamically provisioned pvc can be resized"):
        world.update(CLAIM, "training/datasets", larger)


def test_lustre_grows_in_place_and_is_replaced_to_shrink(world: World) -> None:
    small, large = lustre("subnet"), lustre("subnet", storageCapacity=2400)
    assert not world.diff(LUSTRE, small, large).replaces
    assert world.diff(LUSTRE, large, small).replaces == ("storageCapacity",)


def test_the_bounds_of_a_pool_must_include_its_current_size(world: World) -> None:
    kind = "aws:eks/nodeGroup:NodeGroup"
    world.add("aws:eks/cluster:Cluster", "eks", {"name": "eks", "version": "1.35"})
    own = {"clusterName": "eks", "version": "1.35"}
    world.add(kind, "gpu", {**own, "scalingConfig": {"minSize": 0, "desiredSize": 2, "maxSize": 2}})
    with pytest.raises(Refused, match="desired capacity 2 is outside the new bounds"):
        world.update(kind, "gpu", {**own, "scalingConfig": {"minSize": 3, "desiredSize": 2, "maxSize": 4}})


@pytest.mark.parametrize(
    ("token", "inputs", "path"),
    [
        (SUBNET, {"cidrBlock": "10.0.0.0/24"}, "vpcId"),
        (SUBNET, {"vpcId": "vpc", "mapPublicIpOnLaunch": "no"}, "mapPublicIpOnLaunch"),
        (SUBNET, {"vpcId": "vpc", "cidr": "10.0.0.0/24"}, "cidr"),
        (LUSTRE, lustre("subnet", storageCapacity=1300), "storageCapacity"),
        (LUSTRE, lustre("subnet", perUnitStorageThroughput=200), "perUnitStorageThroughput"),
        (
            "azure-native:netapp:CapacityPool",
            {"accountName": "a", "resourceGroupName": "g", "serviceLevel": "Premium", "size": 2**40 + 1},
            "size",
        ),
        (
            "gcp:filestore/instance:Instance",
            {"tier": "ZONAL", "fileShares": {"name": "data", "capacityGb": 1025}, "networks": []},
            "fileShares.capacityGb",
        ),
    ],
)
def test_check_finds_the_inputs_that_a_service_rejects(
    world: World, token: str, inputs: dict[str, Any], path: str
) -> None:
    assert [found for found, _ in world.check(token, inputs)] == [path]


def test_a_fault_happens_once_and_creates_nothing(world: World) -> None:
    world.faults.fail_create = 2
    world.create(VPC, "first", {})
    with pytest.raises(Refused, match="injected"):
        world.create(VPC, "second", {})
    world.faults.lose_create = 1
    with pytest.raises(ConnectionLost):
        world.create(VPC, "second", {})
    world.create(VPC, "second", {})
    assert [name for _, _, name in world.log] == ["first", "second"]


def slow_world(**rules: Any) -> World:
    """Return a world in which every create takes ten minutes, an update five and a deletion three."""
    minutes = {
        "create_minutes": lambda inputs: 10.0,
        "update_minutes": lambda old, new: 5.0,
        "delete_minutes": lambda inputs: 3.0,
    }
    return World(lambda token: Rules(**{**minutes, **rules}))


def test_operations_take_simulated_minutes_and_no_real_ones() -> None:
    world = slow_world()
    vpc = world.create(VPC, "vpc", {})
    assert (world.now, vpc.created_at, vpc.status) == (10, 0, "ACTIVE")
    world.update(VPC, vpc.id, {"changed": True})
    world.delete(VPC, vpc.id)
    assert world.now == 18


def test_parallel_creates_overlap_and_are_not_ready_before_their_time() -> None:
    all_three = threading.Barrier(3)

    def meet(inputs: Inputs) -> None:
        all_three.wait()

    world = slow_world(lock_key=meet)
    ready: list[int] = []
    world.later(9, lambda: ready.append(len(world.ready(VPC))))
    world.later(10.5, lambda: ready.append(len(world.ready(VPC))))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: world.create(VPC, name, {}), ("one", "two", "three")))
    assert world.now == 10
    world.clock.advance(1)
    assert ready == [0, 3]


def test_a_cloud_acts_by_itself_at_its_time() -> None:
    world = slow_world()
    seen: list[float] = []
    world.later(4, lambda: seen.append(world.now))
    world.later(25, lambda: seen.append(world.now))
    world.create(VPC, "vpc", {})
    assert seen == [4]
    world.clock.advance(20)
    assert seen == [4, 25]


def test_a_partly_created_resource_exists_with_its_status_and_a_refused_one_does_not() -> None:
    def fail(error: Exception) -> Callable[[World, Resource], None]:
        def on_created(world: World, resource: Resource) -> None:
            raise error

        return on_created

    partly = slow_world(on_created=fail(PartlyCreated("no capacity", "CREATE_FAILED")))
    with pytest.raises(PartlyCreated) as failure:
        partly.create(VPC, "vpc", {})
    assert failure.value.resource in partly.of_type(VPC)
    assert (partly.ready(VPC), partly.of_type(VPC)[0].status, partly.now) == ([], "CREATE_FAILED", 10)
    refused = slow_world(on_created=fail(Refused("no capacity")))
    with pytest.raises(Refused):
        refused.create(VPC, "vpc", {})
    assert not refused.resources


def test_an_update_that_is_refused_at_its_end_changes_nothing() -> None:
    def drain(world: World, resource: Resource, old: Inputs) -> None:
        assert resource.inputs != old
        raise Refused("PodEvictionFailure")

    world = slow_world(on_updated=drain)
    vpc = world.create(VPC, "vpc", {"version": 1})
    with pytest.raises(Refused):
        world.update(VPC, vpc.id, {"version": 2})
    assert (vpc.inputs, vpc.status, world.now) == ({"version": 1}, "ACTIVE", 15)


def test_operations_under_one_lock_are_refused_while_another_takes_its_time() -> None:
    both = threading.Barrier(2)
    world = slow_world(lock_key=lambda inputs: "account" if inputs or both.wait() >= 0 else None)

    def create(name: str) -> str:
        try:
            return world.create(VPC, name, {}).status
        except Refused as refusal:
            return str(refusal)

    with ThreadPoolExecutor() as pool:
        results = sorted(pool.map(create, ("one", "two")))
    assert results == ["ACTIVE", "OperationAborted: another operation on account is in progress"]
    assert world.create(VPC, "three", {"alone": True}).status == "ACTIVE", "the lock was not released"


def test_a_stopped_provider_ends_what_is_in_progress() -> None:
    world = slow_world()
    world.later(5, world.clock.interrupt)
    with pytest.raises(ConnectionLost):
        world.create(VPC, "vpc", {})
    assert not world.resources


def test_fault_positions_include_the_first_and_the_last_create() -> None:
    assert spread_positions(15) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert spread_positions(117)[0] == 1
    assert spread_positions(117)[-1] == 117
    assert num_creates("local") == 11
