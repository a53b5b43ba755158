"""Tests of simulated GKE: what it refuses, and what it does by itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import engine_clouds
import pytest
import simulated_gke
from engine_world import Refused, Resource, World
from simulated_gke import CLUSTER, NODES, START

RECURRING = {
    "startTime": "2024-01-06T02:00:00Z",
    "endTime": "2024-01-06T14:00:00Z",
    "recurrence": "FREQ=WEEKLY;BYDAY=SA",
}
SCOPE = "NO_MINOR_OR_NODE_UPGRADES"


def _exclusion(**changed: Any) -> dict[str, Any]:
    return {
        "exclusionName": "run",
        "startTime": "2026-11-23T00:00:00Z",
        "endTime": "2026-12-01T00:00:00Z",
        "exclusionOptions": {"scope": SCOPE},
        **changed,
    }


def _cluster(*exclusions: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "releaseChannel": {"channel": "REGULAR"},
        "minMasterVersion": "1.35",
        "privateClusterConfig": {"enablePrivateEndpoint": True, "enablePrivateNodes": True},
        "controlPlaneEndpointsConfig": {"dnsEndpointConfig": {}},
        "maintenancePolicy": {"recurringWindow": RECURRING, "maintenanceExclusions": list(exclusions)},
        **changed,
    }


def _reasons(token: str, inputs: dict[str, Any]) -> str:
    return " ".join(reason for _, reason in engine_clouds.rules_of(token).problems(inputs))


@pytest.fixture
def world() -> World:
    """Return a world with the services and the NAT gateway that a cluster needs."""
    empty = World(engine_clouds.rules_of)
    empty.add("gcp:projects/service:Service", "container", {"service": "container.googleapis.com"})
    empty.add("gcp:compute/routerNat:RouterNat", "nat", {})
    return empty


def _create(world: World, *exclusions: dict[str, Any], **changed: Any) -> tuple[Resource, Resource]:
    """Create a cluster and its GPU pool."""
    cluster = world.create(CLUSTER, "cluster", _cluster(*exclusions, **changed))
    scaling = {"totalMinNodeCount": 0, "totalMaxNodeCount": 4}
    inputs = {"cluster": cluster.computed["name"], "initialNodeCount": 2, "autoscaling": scaling}
    return cluster, world.create(NODES, "gpu", inputs)


@pytest.mark.parametrize(
    ("hours", "recurrence", "accepted"),
    [
        (12, "FREQ=WEEKLY;BYDAY=SA", True),
        (11, "FREQ=WEEKLY;BYDAY=SA", False),
        (4, "FREQ=WEEKLY;BYDAY=SA", False),
        (6, "FREQ=WEEKLY;BYDAY=SA,SU", True),
        (4, "FREQ=DAILY", True),
        (3, "FREQ=DAILY", False),
    ],
)
def test_gke_wants_48_hours_of_maintenance_in_32_days(hours: int, recurrence: str, accepted: bool) -> None:
    window = {**RECURRING, "endTime": f"2024-01-06T{2 + hours:02}:00:00Z", "recurrence": recurrence}
    found = _reasons(CLUSTER, _cluster(maintenancePolicy={"recurringWindow": window}))
    assert ("without 48h maintenance availability" in found) is not accepted


@pytest.mark.parametrize(
    ("changed", "channel", "reason"),
    [
        ({}, "REGULAR", ""),
        ({}, None, "scopes need a release channel"),
        ({"endTime": None}, "REGULAR", "one of endTime and endTimeBehavior"),
        (
            {"endTime": None, "exclusionOptions": {"scope": SCOPE, "endTimeBehavior": "UNTIL_END_OF_SUPPORT"}},
            "REGULAR",
            "",
        ),
        ({"endTime": "2026-11-22T00:00:00Z"}, "REGULAR", "ends before it starts"),
        ({"endTime": "2026-12-01T00:00:00+01:00"}, "REGULAR", "GKE returns UTC"),
        ({"endTime": "2027-05-01T00:00:00Z"}, "REGULAR", "after the end of support"),
    ],
)
def test_gke_checks_each_exclusion(changed: dict[str, Any], channel: str | None, reason: str) -> None:
    found = _reasons(CLUSTER, _cluster(_exclusion(**changed), releaseChannel={"channel": channel}))
    assert reason in found if reason else not found


def test_a_version_that_the_channel_lacks_is_refused() -> None:
    assert "unsupported" in _reasons(CLUSTER, _cluster(minMasterVersion="1.34"))


@pytest.mark.parametrize(
    ("policy", "moment"),
    [
        (None, START),
        ({"recurringWindow": RECURRING}, datetime(2026, 11, 28, 2)),
        (_cluster(_exclusion())["maintenancePolicy"], datetime(2026, 12, 5, 2)),
        (_cluster(_exclusion(endTime=None))["maintenancePolicy"], None),
    ],
)
def test_nodes_are_upgraded_at_the_first_time_that_the_policy_allows(
    policy: dict[str, Any] | None, moment: datetime | None
) -> None:
    assert simulated_gke.next_maintenance(policy, START) == moment


def test_gke_upgrades_a_pool_in_place_and_interrupts_its_nodes(world: World) -> None:
    _, pool = _create(world)
    before = pool.computed["version"]
    world.clock.advance(7 * 24 * 60)
    assert pool.computed["version"] != before
    assert simulated_gke.moments(world, "interrupt") == [datetime(2026, 11, 28, 2)]


def test_an_exclusion_keeps_the_nodes(world: World) -> None:
    _, pool = _create(world, _exclusion())
    before = pool.computed["version"]
    world.clock.advance(7 * 24 * 60)
    assert pool.computed["version"] == before


def test_a_higher_lowest_version_upgrades_the_control_plane_and_a_lower_one_changes_nothing(world: World) -> None:
    cluster, pool = _create(world)
    world.update(CLUSTER, cluster.id, _cluster(minMasterVersion="1.36"))
    assert cluster.computed["masterVersion"].startswith("1.36.")
    assert pool.computed["version"].startswith("1.35."), "nodes wait for the window"
    world.update(CLUSTER, cluster.id, _cluster(minMasterVersion="1.35"))
    assert cluster.computed["masterVersion"].startswith("1.36.")
    world.clock.advance(7 * 24 * 60)
    with pytest.raises(Refused, match="does not downgrade"):
        world.update(NODES, pool.id, {**pool.inputs, "version": "1.35"})


def test_another_initial_count_replaces_a_pool(world: World) -> None:
    _, pool = _create(world)
    old = pool.inputs
    simulated_gke.autoscale(pool, 4)
    assert world.diff(NODES, pool.inputs, old).replaces == ("initialNodeCount",)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"nodeCount": 2, "initialNodeCount": 2}, "Cannot set both"),
        ({"autoscaling": {"maxNodeCount": 2, "totalMaxNodeCount": 2}}, "exclude each other"),
        ({"initialNodeCount": 3, "autoscaling": {"totalMinNodeCount": 0, "totalMaxNodeCount": 2}}, "between 0 and 2"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(inputs: dict[str, Any], reason: str) -> None:
    assert reason in _reasons(NODES, inputs)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({}, None),
        ({"management": {"autoRepair": True}}, "management"),
        ({"placementPolicy": {"type": "COMPACT"}}, "placementPolicy"),
        ({"nodeConfig": {"flexStart": True, "spot": True}}, "nodeConfig"),
    ],
)
def test_flex_start_excludes_repair_placement_and_other_capacity(changed: dict[str, Any], path: str | None) -> None:
    affinity = {"consumeReservationType": "NO_RESERVATION"}
    pool = {"management": {"autoRepair": False}, "nodeConfig": {"flexStart": True, "reservationAffinity": affinity}}
    found = {name for name, _ in engine_clouds.rules_of(NODES).problems({**pool, **changed})}
    assert found == ({path} if path else set())


def test_a_pool_without_automatic_upgrades_is_refused_in_a_channel(world: World) -> None:
    cluster = world.create(CLUSTER, "cluster", _cluster())
    with pytest.raises(Refused, match="Auto_upgrade must be true"):
        world.create(NODES, "gpu", {"cluster": cluster.computed["name"], "management": {"autoUpgrade": False}})


def test_a_kubernetes_identity_needs_a_cluster(world: World) -> None:
    kind, inputs = (
        "gcp:serviceaccount/iAMMember:IAMMember",
        {"member": "serviceAccount:p.svc.id.goog[training/trainer]"},
    )
    with pytest.raises(Refused, match="Identity Pool does not exist"):
        world.create(kind, "pods", inputs)
    _create(world)
    world.create(kind, "pods", inputs)
