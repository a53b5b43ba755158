"""What a stack can leave in a Google Cloud project, against recorded answers of its services."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest
from doctor_answers import Recorded, read_context
from test_doctor_gcp import COMPUTE, PROJECT

from infra.clouds.gcp import doctor, orphans
from infra.clouds.gcp.doctor import client
from infra.clouds.gcp.settings import Settings, account_id
from infra.findings.orphans import Leftover
from infra.orphans.search import compare, run

LABELS = {"project": "torchrec-cloud", "stack": "gcp", "managed-by": "pulumi", "owner": "me"}
CLUSTER = "gcp-cluster-1a2b3c4"
OF_CLUSTER = {"goog-k8s-cluster-name": CLUSTER}
VPC = "https://www.googleapis.com/compute/v1/projects/my-project/global/networks/gcp-network-vpc-0a1b2c3"
AT = "2026-11-20T02:11:12.000-08:00"
LOCATIONS = "/v1/projects/my-project/locations"
RING = "projects/my-project/locations/us-central1/keyRings/gcp-cluster-keys-0a1b2c3"
LISTS = (
    *(f"{COMPUTE}/aggregated/{kind}" for kind in (
        "instanceGroupManagers", "instances", "forwardingRules", "networkEndpointGroups", "addresses", "disks",
        "routers", "subnetworks",
    )),
    *(f"{COMPUTE}/global/{kind}" for kind in ("snapshots", "firewalls", "networks")),
    f"{LOCATIONS}/-/clusters", f"{LOCATIONS}/-/instances", f"{LOCATIONS}/-/backups",
    f"{LOCATIONS}/us-central1/repositories", f"{LOCATIONS}/us-central1/keyRings",
    "/v1/projects/my-project/serviceAccounts", "/v1/projects/my-project:getIamPolicy", "/storage/v1/b",
)  # fmt: skip


@pytest.fixture
def google(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Serve a project without anything of the stack."""
    import google.auth
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr(google.auth, "default", lambda scopes: (Credentials("a-token"), None))
    monkeypatch.setattr(client, "ENDPOINTS", dict.fromkeys(client.ENDPOINTS, recorded.url))
    recorded.put(PROJECT, {"projectNumber": "42", "projectId": "my-project", "lifecycleState": "ACTIVE"})
    for path in LISTS:
        recorded.put(path, {})
    return recorded


def search(**settings: object) -> tuple[list[Leftover], list[Any]]:
    """Run all searches; return what they found, and the findings of those that failed."""
    context = read_context("gcp", settings)
    found, findings = run(orphans.searches(context), doctor.checks(context)[0], "test")
    return found, [item for item in findings if item.status != "ok"]


def entry(name: str, zone: str | None = "us-central1-a", **more: Any) -> dict[str, Any]:
    """Return one resource of Compute Engine."""
    where = {"zone": f"https://www.googleapis.com/compute/v1/projects/my-project/zones/{zone}"} if zone else {}
    link = f"https://www.googleapis.com/compute/v1/projects/my-project/x/{name}"
    return {"name": name, "selfLink": link, "creationTimestamp": AT} | where | more


def aggregated(kind: str, *entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return an aggregated list: a zone with entries, and one without."""
    empty = {"warning": {"code": "NO_RESULTS_ON_PAGE"}}
    return {"items": {"zones/us-central1-a": {kind: list(entries)}, "zones/us-east1-b": empty}}


@pytest.mark.usefixtures("google")
def test_an_empty_project_has_no_orphan() -> None:
    assert search() == ([], [])


def test_disks_of_claims_outlive_the_cluster_and_are_found_by_its_label(google: Recorded) -> None:
    kind = "https://www.googleapis.com/compute/v1/projects/my-project/zones/us-central1-a/diskTypes/pd-balanced"
    mine = entry("pvc-1", labels=OF_CLUSTER, type=kind, sizeGb="100")
    others = entry("pvc-2", labels={"goog-k8s-cluster-name": "gcp-cluster-of-another"}, type=kind, sizeGb="100")
    path = f"{COMPUTE}/aggregated/disks"

    def pages(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
        page = aggregated("disks", mine if query.get("pageToken") else others)
        return 200, page if query.get("pageToken") else page | {"nextPageToken": "next"}

    google.answers[path] = pages
    found, failed = search()
    assert not failed
    (disk,) = found
    assert disk.usd_per_hour == pytest.approx(100 * 0.10 / 730)
    assert disk.since == "2026-11-20T10:11Z"
    assert disk.remove == "gcloud compute disks delete pvc-1 --zone us-central1-a --project my-project --quiet"
    assert compare(found, [{"type": orphans.CLUSTER, "id": "x"}], orphans) == ([], []), "the cluster may use it"


def test_what_is_in_the_network_belongs_to_the_stack(google: Recorded) -> None:
    firewalls = [
        entry("k8s-fw-abc", None, network=VPC), entry("gcp-network-nodes-0a1b2c3", None, network=VPC),
        entry("else", None, network=VPC.replace("gcp-network", "gcp-eval-network")),
    ]  # fmt: skip
    google.put(f"{COMPUTE}/global/firewalls", {"items": firewalls})
    networks = [entry("gcp-network-vpc-0a1b2c3", None), entry("gcp-eval-network-vpc-0a1b2c3", None), entry("default")]
    google.put(f"{COMPUTE}/global/networks", {"items": networks})
    rule = entry("a1", None, network=VPC, region="https://www.googleapis.com/compute/v1/projects/p/regions/us-central1")
    google.put(f"{COMPUTE}/aggregated/forwardingRules", aggregated("forwardingRules", rule))
    found, _ = search()
    assert [(item.kind, item.id, item.of_cluster) for item in found] == [
        ("forwarding rule", "a1", True), ("firewall rule", "k8s-fw-abc", True),
        ("firewall rule", "gcp-network-nodes-0a1b2c3", False), ("network", "gcp-network-vpc-0a1b2c3", False),
    ]  # fmt: skip
    assert {item.remove for item in found} == {""}, "another project's stack of this name has such a network"
    assert {item.withheld for item in found} == {"no labels show whose it is"}
    labelled = rule | {"labels": OF_CLUSTER}
    google.put(f"{COMPUTE}/aggregated/forwardingRules", aggregated("forwardingRules", labelled))
    assert "forwarding-rules delete a1 --region us-central1 --project" in search()[0][0].remove
    state = [{"type": "gcp:compute/network:Network", "id": "projects/my-project/x/gcp-network-vpc-0a1b2c3"}]
    assert "network" not in {item.kind for item in compare(found, state, orphans)[0]}, "the endpoint is not compared"


def test_idle_gpu_nodes_have_their_price(google: Recorded) -> None:
    machine = "https://www.googleapis.com/compute/v1/projects/p/zones/z/machineTypes/a2-highgpu-8g"
    node = entry("gke-gcp-cluster-1a2b3c4-gpu-0", machineType=machine, status="RUNNING")
    google.put(f"{COMPUTE}/aggregated/instances", aggregated("instances", node))
    (item,) = search()[0]
    assert item.usd_per_hour == pytest.approx(29.387, rel=0.01)


def test_services_are_found_by_their_labels(google: Recorded) -> None:
    instance = {"name": f"{LOCATIONS[4:]}/us-central1-a/instances/fs", "labels": LABELS, "createTime": AT}
    google.put(f"{LOCATIONS}/-/instances", {"instances": [instance | {"fileShares": [{"capacityGb": "1024"}]}]})
    cluster = {"name": CLUSTER, "location": "us-central1", "resourceLabels": LABELS, "createTime": AT}
    google.put(f"{LOCATIONS}/-/clusters", {"clusters": [cluster, cluster | {"name": "other"}]})
    repository = {"name": f"{LOCATIONS[4:]}/us-central1/repositories/torchrec-cloud-gcp", "labels": LABELS}
    google.put(f"{LOCATIONS}/us-central1/repositories", {"repositories": [repository]})
    backup = {"name": f"{LOCATIONS[4:]}/us-central1/backups/b", "sourceInstance": "x/gcp-storage-filestore-0a1b2c3"}
    google.put(f"{LOCATIONS}/-/backups", {"backups": [backup]})
    google.put("/storage/v1/b", {"items": [{"name": "gcp-bucket", "labels": LABELS, "timeCreated": AT}]})
    found, failed = search()
    assert not failed
    prices = {item.kind: item.usd_per_hour for item in found}
    assert prices == {
        "cluster": 0.10, "Filestore instance": pytest.approx(1024 * 0.25 / 730), "Filestore backup": None,
        "image repository": None, "bucket": None,
    }  # fmt: skip
    assert [item.kind for item in found if item.kept] == ["bucket"]
    assert not [item for item in search(**{"storage.on_destroy": "delete"})[0] if item.kept]


@pytest.mark.parametrize(("state", "kept"), [("DESTROY_SCHEDULED", True), ("ENABLED", False)])
def test_a_key_version_goes_by_itself_once_it_is_scheduled(google: Recorded, state: str, kept: bool) -> None:
    google.put(f"{LOCATIONS}/us-central1/keyRings", {"keyRings": [{"name": RING}, {"name": f"{RING}-other"}]})
    google.put(f"/v1/{RING}/cryptoKeys", {"cryptoKeys": [{"name": f"{RING}/cryptoKeys/k", "labels": LABELS}]})
    versions = [
        {"name": f"{RING}/cryptoKeys/k/cryptoKeyVersions/2", "state": state, "destroyTime": AT, "createTime": AT},
        {"name": f"{RING}/cryptoKeys/k/cryptoKeyVersions/1", "state": "DESTROYED"},
    ]
    google.put(f"/v1/{RING}/cryptoKeys/k/cryptoKeyVersions", {"cryptoKeyVersions": versions})
    (item,) = search()[0]
    assert bool(item.kept) == kept
    assert "versions destroy 2 --key k --keyring gcp-cluster-keys-0a1b2c3 --location us-central1" in item.remove


def test_the_key_of_another_projects_stack_is_not_listed(google: Recorded) -> None:
    google.put(f"{LOCATIONS}/us-central1/keyRings", {"keyRings": [{"name": RING}]})
    for labels in ({}, LABELS | {"project": "another"}):
        google.put(f"/v1/{RING}/cryptoKeys", {"cryptoKeys": [{"name": f"{RING}/cryptoKeys/k", "labels": labels}]})
        version = {"name": f"{RING}/cryptoKeys/k/cryptoKeyVersions/1", "state": "ENABLED"}
        google.put(f"/v1/{RING}/cryptoKeys/k/cryptoKeyVersions", {"cryptoKeyVersions": [version]})
        assert search() == ([], [])


def test_the_bucket_of_another_projects_stack_is_not_listed(google: Recorded) -> None:
    bucket = {"name": "b", "labels": LABELS | {"project": "another"}, "timeCreated": AT}
    google.put("/storage/v1/b", {"items": [bucket]})
    assert search() == ([], []), "its stack has the same name"


@pytest.mark.parametrize(
    ("name", "labels", "is_own"),
    [
        ("gke-gcp-cluster-1a2b3c4-gpu-0", {}, True),
        ("gke-gcp-cluster-blue-gpu-0", {}, False),
        ("gke-gcp-cluster-1a2b3c4d-gpu-0", {}, False),
        ("gke-gcp-eval-cluster-1a2b3c4-gpu-0", {}, False),
        ("gke-gcp-cluster-1a2b3c4-gpu-0", {"goog-k8s-cluster-name": "gcp-cluster-blue"}, False),
        ("any", OF_CLUSTER, True),
    ],
)
def test_nodes_of_another_cluster_are_not_listed(
    google: Recorded, name: str, labels: Mapping[str, str], is_own: bool
) -> None:
    machine = "https://www.googleapis.com/compute/v1/projects/p/zones/z/machineTypes/a2-highgpu-8g"
    node = entry(name, machineType=machine, status="RUNNING", labels=labels)
    google.put(f"{COMPUTE}/aggregated/instances", aggregated("instances", node))
    assert bool(search()[0]) == is_own


@pytest.mark.parametrize(
    ("path", "answer", "kind"),
    [
        (f"{LOCATIONS}/-/instances", {"unreachable": ["us-east1-b"]}, "Filestore instance"),
        (f"{LOCATIONS}/-/clusters", {"missingZones": ["us-east1-b"]}, "cluster"),
        (f"{COMPUTE}/aggregated/disks", {"items": {}, "unreachables": ["us-east1-b"]}, "disk"),
        (
            f"{COMPUTE}/aggregated/disks",
            {"items": {"zones/us-east1-b": {"warning": {"code": "UNREACHABLE"}}}},
            "disk",
        ),
    ],
)
def test_an_incomplete_list_is_not_checked(google: Recorded, path: str, answer: object, kind: str) -> None:
    google.put(path, answer)
    (failed,) = search()[1]
    assert (failed.check, failed.status) == (kind, "unknown")
    assert "us-east1-b" in failed.result


def test_accounts_and_the_roles_of_deleted_accounts_are_found(google: Recorded) -> None:
    settings = read_context("gcp").settings
    assert isinstance(settings, Settings)
    email = f"{account_id(settings, 'nodes')}@my-project.iam.gserviceaccount.com"
    accounts = [{"email": email, "name": f"projects/my-project/serviceAccounts/{email}"}, {"email": "x@y", "name": "z"}]
    google.put("/v1/projects/my-project/serviceAccounts", {"accounts": accounts})
    deleted = f"deleted:serviceAccount:{email}?uid=123"
    role = "roles/container.defaultNodeServiceAccount"
    members = [f"serviceAccount:{email}", deleted, "deleted:serviceAccount:else@y?uid=1"]
    google.put("/v1/projects/my-project:getIamPolicy", {"bindings": [{"role": role, "members": members}]})
    found, failed = search()
    assert not failed
    assert [(item.kind, item.id) for item in found] == [
        ("IAM binding", f"{role} of {email}"),
        ("service account", email),
    ]
    words = shlex.split(found[0].remove)
    assert words[words.index("--member") + 1] == deleted


def test_a_service_that_is_not_enabled_has_no_resources(google: Recorded) -> None:
    text = "Cloud Filestore API has not been used in project 42 before (file.googleapis.com)"
    error = {"error": {"code": 403, "message": text, "details": [{"reason": "SERVICE_DISABLED"}]}}
    google.put(f"{LOCATIONS}/-/instances", error, 403)
    assert search() == ([], [])


def test_a_missing_permission_leaves_its_kind_unchecked(google: Recorded) -> None:
    text = "Permission 'file.instances.list' denied on 'projects/my-project/locations/-'"
    google.put(f"{LOCATIONS}/-/instances", {"error": {"code": 403, "message": text}}, 403)
    found, failed = search()
    assert not found
    assert [(item.check, item.cause) for item in failed] == [("Filestore instance", "gcp-denied")]
    assert "file.instances.list" in failed[0].result
