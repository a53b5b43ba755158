"""Simulated GKE: versions, maintenance windows, and upgrades that it makes by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Any

from engine_values import at
from engine_world import Inputs, Refused, Resource, World

CLUSTER, NODES = "gcp:container/cluster:Cluster", "gcp:container/nodePool:NodePool"
#: Minute 0 of every world, a Monday.
START = datetime(2026, 11, 23)
#: The newest patch of each version in the Regular channel. An alias such as 1.35 is the newest patch:
#: https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters, initialClusterVersion
_CHANNEL = {"1.35": "1.35.8-gke.1036000", "1.36": "1.36.2-gke.1000000"}
_END_OF_SUPPORT = {"1.35": date(2027, 4, 11)}
_DEFAULT = "1.35"
_DAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
#: Every week has a patch: https://cloud.google.com/kubernetes-engine/docs/release-notes-regular
_PATCH_MINUTES = 24 * 60


def cluster_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Refuse versions that the channel lacks, and policies that leave too little maintenance."""
    version = str(inputs.get("minMasterVersion") or _DEFAULT)
    if version not in _CHANNEL:
        yield "minMasterVersion", f'Master version "{version}" is unsupported'
    window = at(inputs, "maintenancePolicy.recurringWindow")
    if window and _weekly_hours(window) < 12:
        # https://cloud.google.com/kubernetes-engine/docs/how-to/maintenance-windows-and-exclusions: 48 hours in 32
        # days, in windows of at least four; a weekly window lies four times in 32 days.
        reason = "maintenance policy would go longer than 32d without 48h maintenance availability of >=4h contiguous"
        yield "maintenancePolicy.recurringWindow", reason
    for exclusion in at(inputs, "maintenancePolicy.maintenanceExclusions") or []:
        for reason in _exclusion_problems(exclusion, version, bool(at(inputs, "releaseChannel.channel"))):
            yield "maintenancePolicy.maintenanceExclusions", f"{exclusion['exclusionName']}: {reason}"


def _weekly_hours(window: Inputs) -> float:
    length = (_time(window["endTime"]) - _time(window["startTime"])).total_seconds() / 3600
    return length * len(_weekdays(window)) if length >= 4 else 0


def _exclusion_problems(exclusion: Inputs, version: str, in_channel: bool) -> Iterator[str]:
    """Check one exclusion as the API and the provider do.

    https://registry.terraform.io/providers/hashicorp/google/latest/docs/resources/container_cluster
    """
    options, end = exclusion.get("exclusionOptions") or {}, exclusion.get("endTime")
    if bool(end) == bool(options.get("endTimeBehavior")):
        yield "one of endTime and endTimeBehavior"
    if options.get("scope", "NO_UPGRADES") != "NO_UPGRADES" and not in_channel:
        yield "scopes need a release channel"
    if not all(moment.endswith("Z") for moment in (exclusion["startTime"], end) if moment):
        yield "GKE returns UTC: another zone is a difference at each refresh"
    elif end and _time(end) <= _time(exclusion["startTime"]):
        yield "ends before it starts"
    # hashicorp/terraform-provider-google#20556: the end is checked against the cluster's version.
    last = _END_OF_SUPPORT.get(version)
    if end and last and _time(end).date() > last + timedelta(days=1):
        yield f"ends after the end of support of {version}, {last}"


def nodes_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Refuse what contradicts itself.

    The first is in `resource_container_node_pool.go`, the others are preconditions in cluster-toolkit,
    modules/compute/gke-node-pool/main.tf.
    """
    scaling, initial = inputs.get("autoscaling") or {}, inputs.get("initialNodeCount")
    if initial and inputs.get("nodeCount"):
        yield "nodeCount", "Cannot set both initial_node_count and node_count"
    low, high = scaling.get("totalMinNodeCount"), scaling.get("totalMaxNodeCount")
    if scaling.get("maxNodeCount") and high:
        yield "autoscaling", "limits per zone and in total exclude each other"
    if isinstance(high, int) and isinstance(initial, int) and not (low or 0) <= initial <= high:
        yield "initialNodeCount", f"must be between {low} and {high}"
    yield from _flex_start_problems(inputs)


def _flex_start_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Refuse what flex-start excludes."""
    config = inputs.get("nodeConfig") or {}
    if not config.get("flexStart"):
        return
    if at(inputs, "management.autoRepair") is not False:
        yield "management", "flex-start needs auto_repair set to false"
    if at(config, "reservationAffinity.consumeReservationType") != "NO_RESERVATION":
        yield "nodeConfig", "flex-start requires NO_RESERVATION"
    if config.get("spot"):
        yield "nodeConfig", "flex-start and spot exclude each other"
    if at(inputs, "placementPolicy.type") == "COMPACT":
        yield "placementPolicy", "compact placement with flex-start is only supported for A3 Ultra, A4 and H4D"


def cluster_created(world: World, cluster: Resource) -> None:
    """Give the cluster its version; a day later there is a patch, which GKE installs by itself."""
    cluster.computed["masterVersion"] = _CHANNEL[str(cluster.inputs.get("minMasterVersion") or _DEFAULT)]
    world.later(_PATCH_MINUTES, lambda: _roll_out(world, cluster))


def cluster_updated(world: World, cluster: Resource, old: Inputs) -> None:
    """Upgrade the control plane if the lowest version is higher than its own; nodes follow when GKE may upgrade them.

    `resource_container_cluster.go`: "Only upgrade the master if the current version is lower".
    """
    lowest, current = cluster.inputs.get("minMasterVersion"), cluster.computed["masterVersion"]
    if lowest and _minor(lowest) > _minor(current):
        if _minor(lowest) - _minor(current) > 1:
            cluster.inputs = old
            raise Refused(f"Error 400: Master cannot be upgraded to {lowest}: it can skip no minor version")
        cluster.computed["masterVersion"] = _CHANNEL[lowest]
        _roll_out(world, cluster)


def nodes_created(world: World, pool: Resource) -> None:
    """Give the pool its control plane's version, and note nodes that no job needs yet."""
    cluster = _cluster_of(world, pool)
    if at(cluster.inputs, "releaseChannel.channel") and at(pool.inputs, "management.autoUpgrade") is False:
        raise Refused("Error 400: Auto_upgrade must be true when release_channel REGULAR is set.")
    pool.computed["version"] = cluster.computed["masterVersion"]
    pool.computed["nodeCount"] = pool.inputs.get("nodeCount") or pool.inputs.get("initialNodeCount", 0)
    if _num_idle(world, pool):
        world.log.append(("idle", NODES, str(world.now)))


def nodes_updated(world: World, pool: Resource, old: Inputs) -> None:
    """Resize a pool whose program has a count, and refuse an older version."""
    lowest, current = pool.inputs.get("version"), pool.computed.get("version", "")
    if lowest and current and _minor(lowest) < _minor(current):
        pool.inputs = old
        raise Refused(f"Error 400: Node version {lowest} is older than {current}: GKE does not downgrade")
    if pool.inputs.get("nodeCount") != old.get("nodeCount"):
        pool.computed["nodeCount"] = pool.inputs["nodeCount"]


def autoscale(pool: Resource, num_nodes: int) -> None:
    """Resize the pool as the autoscaler does.

    The provider's documentation warns that a resized pool may also have another `initial_node_count`, whose change
    replaces the pool: https://registry.terraform.io/providers/hashicorp/google/latest/docs/resources/container_node_pool
    """
    pool.computed["nodeCount"] = num_nodes
    pool.inputs = {**pool.inputs, "initialNodeCount": num_nodes}


def moments(world: World, verb: str) -> list[datetime]:
    """Return when nodes were idle at their start (`idle`) or upgraded (`interrupt`)."""
    return [
        START + timedelta(minutes=float(name)) for found, token, name in world.log if (found, token) == (verb, NODES)
    ]


def next_maintenance(policy: Inputs | None, now: datetime) -> datetime | None:
    """Return the next time at which GKE may upgrade nodes, None if there is none before the end of support."""
    policy = policy or {}
    hour = now.replace(minute=0, second=0, microsecond=0)
    for moment in (now, *(hour + timedelta(hours=number) for number in range(1, 24 * 366))):
        if _in_window(policy.get("recurringWindow"), moment) and not _is_excluded(policy, moment):
            return moment
    return None


def _in_window(window: Inputs | None, moment: datetime) -> bool:
    """Without a window GKE may upgrade at any time."""
    if not window:
        return True
    start, end = _time(window["startTime"]), _time(window["endTime"])
    for day in (moment.date(), moment.date() - timedelta(days=1)):
        opens = datetime.combine(day, start.time())
        if day.weekday() in _weekdays(window) and opens <= moment < opens + (end - start):
            return True
    return False


def _is_excluded(policy: Inputs, moment: datetime) -> bool:
    return any(
        _time(one["startTime"]) <= moment and (not one.get("endTime") or moment < _time(one["endTime"]))
        for one in policy.get("maintenanceExclusions") or []
    )


def _weekdays(window: Inputs) -> Sequence[int]:
    rule = dict(part.split("=") for part in str(window["recurrence"]).split(";"))
    return [_DAYS.index(day) for day in rule["BYDAY"].split(",")] if rule["FREQ"] == "WEEKLY" else range(7)


def _roll_out(world: World, cluster: Resource) -> None:
    """Upgrade the nodes of all pools as soon as the policy of that time allows."""
    if world.find(CLUSTER, cluster.id) is not cluster:
        return
    now = START + timedelta(minutes=world.now)
    moment = next_maintenance(cluster.inputs.get("maintenancePolicy"), now)
    if moment is None:
        return
    if moment > now:
        world.later((moment - now).total_seconds() / 60, lambda: _roll_out(world, cluster))
        return
    for pool in world.users(cluster, [NODES]):
        major, _, build = str(cluster.computed["masterVersion"]).partition("-gke.")
        pool.computed["version"] = f"{major}-gke.{int(build) + 1}"
        world.log.append(("interrupt", NODES, str(world.now)))


def _num_idle(world: World, pool: Resource) -> int:
    """Return the number of nodes that cost money without a job; a pool without autoscaling keeps its nodes."""
    scaling: Any = pool.inputs.get("autoscaling")
    jobs = [one for one in world.resources.values() if one.type.endswith((":Job", ":PyTorchJob", ":TrainJob"))]
    return 0 if jobs or not scaling else max(0, pool.computed["nodeCount"] - scaling.get("totalMinNodeCount", 0))


def _cluster_of(world: World, pool: Resource) -> Resource:
    found = [cluster for cluster in world.of_type(CLUSTER) if pool.refers_to(cluster)]
    if not found:
        raise Refused(f"Error 404: Not found: cluster {pool.inputs.get('cluster')}")
    return found[0]


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.removesuffix("Z"))
