"""Simulated Google Cloud: refused requests, replacements and deletion rules of the types in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import simulated_gke
from engine_values import at
from engine_world import Inputs, Refused, Resource, Rules, World
from simulated_gke import CLUSTER as _CLUSTER
from simulated_gke import NODES as _NODES

_NETWORK, _SUBNET = "gcp:compute/network:Network", "gcp:compute/subnetwork:Subnetwork"
_FILESTORE, _OBJECT = "gcp:filestore/instance:Instance", "gcp:storage/bucketObject:BucketObject"
_USED = "resourceInUseByAnotherResource"
#: Filestore's zonal tier: (minimum, maximum, step) of two size bands; no resize from one band to the other.
_BANDS = ((1024, 9984, 256), (10240, 102400, 2560))
_TIERS = ("BASIC_HDD", "BASIC_SSD", "HIGH_SCALE_SSD", "ZONAL", "REGIONAL", "ENTERPRISE")


def _band(size_gib: object) -> int | None:
    for number, (least, most, step) in enumerate(_BANDS):
        if isinstance(size_gib, int) and least <= size_gib <= most and not (size_gib - least) % step:
            return number
    return None


def _filestore_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    # https://cloud.google.com/filestore/docs/service-tiers
    if inputs.get("tier") not in _TIERS:
        yield "tier", f"must be one of {_TIERS}"
    if inputs.get("tier") == "ZONAL" and _band(at(inputs, "fileShares.capacityGb")) is None:
        yield "fileShares.capacityGb", "must be 1024 to 9984 in steps of 256, or 10240 to 102400 in steps of 2560"
    if inputs.get("protocol", "NFS_V3") not in ("NFS_V3", "NFS_V4_1"):
        yield "protocol", "must be NFS_V3 or NFS_V4_1"


def _filestore_updated(world: World, resource: Resource, inputs: Inputs) -> None:
    before, after = (at(one, "fileShares.capacityGb") for one in (resource.inputs, inputs))
    if _band(before) != _band(after):
        raise Refused(f"INVALID_ARGUMENT: an instance of {before} GiB cannot become one of {after} GiB")


def _cluster_deleted(world: World, resource: Resource) -> None:
    if resource.inputs.get("deletionProtection", True):
        raise Refused("cannot destroy cluster because deletion_protection is set to true")
    for pool in world.users(resource, [_NODES]):
        world.remove(pool)


def _nodes_created(world: World, inputs: Inputs) -> None:
    """Refuse nodes without a NAT gateway: private nodes pull the images of their agents through it."""
    if not world.of_type("gcp:compute/routerNat:RouterNat"):
        raise Refused("All cluster resources were brought up, but: only 0 nodes out of 1 have registered; no Cloud NAT")


def _workload_identity(world: World, inputs: Inputs) -> None:
    """Refuse a Kubernetes identity before the first cluster of a project has created their pool.

    terraform-google-modules/terraform-google-kubernetes-engine, modules/workload-identity/README.md
    """
    if ".svc.id.goog[" in str(inputs.get("member")) and not world.ready(_CLUSTER):
        raise Refused("Error 400: Identity Pool does not exist (my-project.svc.id.goog)")


def _nat_deleted(world: World, resource: Resource) -> None:
    for pool in world.of_type(_NODES):
        raise Refused(f"{_USED}: {resource.id} is in use by nodes of {pool.name}")


def _bucket_deleted(world: World, resource: Resource) -> None:
    objects = world.users(resource, [_OBJECT])
    if objects and not resource.inputs.get("forceDestroy"):
        raise Refused(f"Error trying to delete bucket {resource.id} containing objects without `force_destroy`")
    for one in objects:
        world.remove(one)


def _api_enabled(api: str) -> Rules:
    """Return rules that refuse a create until the service's API is enabled."""

    def created(world: World, inputs: Inputs) -> None:
        found = {one.inputs["service"] for one in world.of_type("gcp:projects/service:Service")}
        if f"{api}.googleapis.com" not in found:
            raise Refused(f"Error 403: {api}.googleapis.com has not been used in project before or it is disabled")

    return Rules(on_create=created)


def _with_api(api: str, rules: Rules) -> Rules:
    enabled, own = _api_enabled(api), rules.on_create

    def created(world: World, inputs: Inputs) -> None:
        enabled.on_create(world, inputs)
        own(world, inputs)

    return Rules(**{**vars(rules), "on_create": created})


RULES: Mapping[str, Rules] = {
    "gcp:vertex/aiTensorboard:AiTensorboard": _with_api(
        "aiplatform",
        Rules(("region",), identity=lambda name, inputs: "projects/my-project/locations/us-central1/tensorboards/7"),
    ),
    _NETWORK: _with_api(
        "compute",
        Rules(
            ("autoCreateSubnetworks", "name"),
            dict.fromkeys(
                (_SUBNET, "gcp:compute/firewall:Firewall", "gcp:compute/router:Router", _FILESTORE, _CLUSTER, _NODES),
                _USED,
            ),
        ),
    ),
    _SUBNET: _with_api(
        "compute",
        Rules(
            ("name", "network", "region"),
            dict.fromkeys((_CLUSTER, _NODES, "gcp:compute/routerNat:RouterNat"), _USED),
        ),
    ),
    "gcp:compute/firewall:Firewall": Rules(("direction", "name", "network")),
    "gcp:compute/router:Router": Rules(("name", "network", "region"), {"gcp:compute/routerNat:RouterNat": _USED}),
    "gcp:compute/routerNat:RouterNat": Rules(("name", "region", "router"), on_delete=_nat_deleted),
    _CLUSTER: _with_api(
        "container",
        Rules(
            (
                "databaseEncryption",
                "datapathProvider",
                "defaultMaxPodsPerNode",
                "enableMultiNetworking",
                "ipAllocationPolicy",
                "location",
                "name",
                "network",
                "networkingMode",
                "nodeConfig",
                "privateClusterConfig.masterIpv4CidrBlock",
                "subnetwork",
            ),
            problems=simulated_gke.cluster_problems,
            on_delete=_cluster_deleted,
            on_created=simulated_gke.cluster_created,
            on_updated=simulated_gke.cluster_updated,
        ),
    ),
    _NODES: _with_api(
        "container",
        Rules(
            (
                "cluster",
                "initialNodeCount",
                "location",
                "name",
                "networkConfig.additionalNodeNetworkConfigs",
                "nodeConfig.guestAccelerators",
                "nodeConfig.oauthScopes",
                "nodeConfig.serviceAccount",
                "nodeConfig.spot",
                "placementPolicy",
            ),
            problems=simulated_gke.nodes_problems,
            on_create=_nodes_created,
            on_created=simulated_gke.nodes_created,
            on_updated=simulated_gke.nodes_updated,
        ),
    ),
    _FILESTORE: _with_api(
        "file",
        Rules(
            ("location", "name", "networks", "protocol", "tier"),
            problems=_filestore_problems,
            on_update=_filestore_updated,
        ),
    ),
    "gcp:storage/bucket:Bucket": _with_api("storage", Rules(("location", "name"), on_delete=_bucket_deleted)),
    "gcp:serviceaccount/account:Account": _with_api("iam", Rules(("accountId",))),
    "gcp:serviceaccount/iAMMember:IAMMember": Rules(
        ("member", "role", "serviceAccountId"), on_create=_workload_identity
    ),
    "gcp:kms/keyRing:KeyRing": _with_api("cloudkms", Rules(("location", "name"))),
    "gcp:kms/cryptoKey:CryptoKey": _with_api("cloudkms", Rules(("keyRing", "name"))),
    "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember": Rules(("cryptoKeyId", "member", "role"), {}),
    "gcp:artifactregistry/repository:Repository": _with_api(
        "artifactregistry",
        Rules(
            ("format", "location", "repositoryId"),
            identity=lambda name, inputs: f"projects/my-project/repositories/{inputs['repositoryId']}",
        ),
    ),
    "gcp:projects/service:Service": Rules(
        ("project", "service"), identity=lambda name, inputs: f"{inputs['project']}/{inputs['service']}"
    ),
    "gcp:monitoring/dashboard:Dashboard": _api_enabled("monitoring"),
}
