"""What the policy pack must know about Google Cloud resource types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from infra.policy_facts import CloudPolicy, NodePool, Props, Resource, dicts, listed, number, open_ranges

_CLUSTER = "gcp:container/cluster:Cluster"
_POOL = "gcp:container/nodePool:NodePool"
#: Google publishes the images of GPUDirect-TCPX by tag.
_TCPX_IMAGES = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/*"

_ADMIN_ROLES = {"roles/owner", "roles/editor", "roles/iam.securityAdmin", "roles/resourcemanager.projectIamAdmin"}
_ANYONE = {"allUsers", "allAuthenticatedUsers"}


def _encrypted_cluster(props: Props) -> Iterable[str]:
    if (props.get("databaseEncryption") or {}).get("state") != "ENCRYPTED":
        yield "Kubernetes secrets are not encrypted with a key of yours; set databaseEncryption.state to ENCRYPTED"


def _open_firewall(props: Props) -> Iterable[str]:
    if props.get("direction", "INGRESS") == "INGRESS" and props.get("allows"):
        yield from open_ranges(listed(props.get("sourceRanges")), "the firewall lets in")


def _open_cluster(props: Props) -> Iterable[str]:
    private = props.get("privateClusterConfig") or {}
    if not private.get("enablePrivateNodes"):
        yield "nodes get public addresses: set privateClusterConfig.enablePrivateNodes"
    authorized = props.get("masterAuthorizedNetworksConfig")
    if not private.get("enablePrivateEndpoint") and not authorized:
        yield "the API server is open to the internet: set enablePrivateEndpoint, or masterAuthorizedNetworksConfig"
    blocks = [block.get("cidrBlock") for block in dicts((authorized or {}).get("cidrBlocks"))]
    yield from open_ranges(blocks, "the API server is open to")


def _public_pool(props: Props) -> Iterable[str]:
    if (props.get("networkConfig") or {}).get("enablePrivateNodes") is False:
        yield "nodes get public addresses: set networkConfig.enablePrivateNodes"


def _open_bucket(props: Props) -> Iterable[str]:
    if props.get("publicAccessPrevention") != "enforced":
        yield "objects may be made public: set publicAccessPrevention to enforced"


def _grant(props: Props) -> Iterable[str]:
    if props.get("role") in _ADMIN_ROLES:
        yield f"{props['role']}: grant a narrower role"
    for member in [*listed(props.get("member")), *listed(props.get("members"))]:
        if member in _ANYONE:
            yield f"{member}: name the accounts that need the role"


def _node_pool(props: Props, _: Sequence[Resource]) -> Iterable[NodePool]:
    scaling, num_zones = props.get("autoscaling") or {}, len(listed(props.get("nodeLocations"))) or 1
    in_each_zone = scaling.get("maxNodeCount") or props.get("nodeCount") or props.get("initialNodeCount")
    num_nodes_max = number(scaling.get("totalMaxNodeCount")) or number(in_each_zone) * num_zones
    yield NodePool(str((props.get("nodeConfig") or {}).get("machineType")), num_nodes_max)


def _vertex(props: Props, _: Sequence[Resource]) -> Iterable[NodePool]:
    yield NodePool(str(props.get("machineType")), number(props.get("numMachines")))


POLICY = CloudPolicy(
    types=("gcp:*",),
    encryption={_CLUSTER: _encrypted_cluster},
    exposure={
        _CLUSTER: _open_cluster,
        _POOL: _public_pool,
        "gcp:compute/firewall:Firewall": _open_firewall,
        "gcp:storage/bucket:Bucket": _open_bucket,
    },
    rights={f"gcp:*{spelling}{kind}": _grant for spelling in ("IAM", "Iam") for kind in ("Member", "Binding")},
    node_pools={_POOL: _node_pool, "pulumi-python:dynamic/vertex:CustomJob": _vertex},
    untaggable=(
        "gcp:*IAM*",
        "gcp:*Iam*",
        "gcp:compute/firewall:Firewall",
        "gcp:compute/network:Network",
        "gcp:compute/resourcePolicy:ResourcePolicy",
        "gcp:compute/router*",
        "gcp:compute/subnetwork:Subnetwork",
        "gcp:kms/keyRing:KeyRing",
        "gcp:monitoring/dashboard:Dashboard",
        "gcp:projects/service*",
        "gcp:serviceaccount/*",
    ),
    tags_within={_POOL: "nodeConfig"},
    zone=re.compile(r"^([a-z]+-[a-z]+\d+)-[a-z]$"),
    internal_load_balancers=("networking.gke.io/load-balancer-type", "cloud.google.com/load-balancer-type"),
    images_by_tag=(_TCPX_IMAGES,),
    fabric_images=(_TCPX_IMAGES,),
    fabric_host_paths=("/home/kubernetes/bin/nvidia/lib64", "/run/tcpx", "/sys", "/proc/sys"),
)
