"""The doctor's checks of a Google Cloud project, against recorded responses of its APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from doctor_answers import Recorded, one, run_checks

from infra.clouds.gcp import doctor
from infra.clouds.gcp.credentials import CLUSTER_APIS
from infra.clouds.gcp.doctor import client
from infra.findings.model import Context

Contexts = Callable[..., Context]
PROJECT = "/v1/projects/my-project"
COMPUTE = "/compute/v1/projects/my-project"
TYPE = f"{COMPUTE}/zones/us-central1-a/machineTypes/a2-highgpu-8g"
RESERVATION = f"{COMPUTE}/zones/us-central1-a/reservations/gpus"
SERVER = f"{PROJECT}/locations/us-central1/serverConfig"


def quota(metric: str, limit: float, usage: float = 0) -> dict[str, object]:
    """Return one quota."""
    return {"metric": metric, "limit": limit, "usage": usage}


def refusal(code: int, message: str, **more: object) -> dict[str, object]:
    """Return the body of an error response."""
    return {"error": {"code": code, "message": message} | more}


@pytest.fixture
def google(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Serve a project without any problem."""
    import google.auth
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr(google.auth, "default", lambda scopes: (Credentials("a-token"), None))
    monkeypatch.setattr(client, "ENDPOINTS", dict.fromkeys(client.ENDPOINTS, recorded.url))
    recorded.put(PROJECT, {"projectNumber": "42", "projectId": "my-project", "lifecycleState": "ACTIVE"})
    paid = {"billingEnabled": True, "billingAccountName": "billingAccounts/0A-1B"}
    recorded.put(f"{PROJECT}/billingInfo", paid)
    on = [
        {"config": {"name": f"{name}.googleapis.com"}, "state": "ENABLED"} for name in ("serviceusage", *CLUSTER_APIS)
    ]

    def services(query: Any, _: bytes) -> tuple[int, object]:
        assert query["filter"] == "state:ENABLED"
        return 200, {"services": on[2:]} if query.get("pageToken") else {"services": on[:2], "nextPageToken": "next"}

    recorded.answers[f"{PROJECT}/services"] = services
    regular = {"channel": "REGULAR", "validVersions": ["1.36.2-gke.10", "1.35.8-gke.1036000", "1.35.7-gke.1"]}
    recorded.put(SERVER, {"channels": [{"channel": "RAPID", "validVersions": ["1.37.0-gke.1"]}, regular]})
    recorded.put(TYPE, {"name": "a2-highgpu-8g", "guestCpus": 96, "memoryMb": 696320})
    of_region = [quota("NVIDIA_A100_GPUS", 16), quota("PREEMPTIBLE_NVIDIA_A100_GPUS", 8)]
    recorded.put(f"{COMPUTE}/regions/us-central1", {"name": "us-central1", "quotas": of_region})
    recorded.put(COMPUTE, {"name": "my-project", "quotas": [quota("GPUS_ALL_REGIONS", 16), quota("NETWORKS", 15, 2)]})
    return recorded


def findings(context: Context, name: str) -> list[Any]:
    """Return the findings of one check."""
    return run_checks(doctor.checks(context), name)[name]


@pytest.mark.usefixtures("google")
def test_a_project_with_everything_it_needs_has_no_problem(context: Contexts) -> None:
    checks = [check for check in doctor.checks(context("gcp")) if check.name != "auth plug-in"]
    found = run_checks(checks)
    assert not [item for items in found.values() for item in items if item.status in ("problem", "unknown")]
    assert "project my-project (number 42), ACTIVE" in one(found, "credentials").result
    assert one(found, "services").result == "12 enabled", "both pages were read"
    assert one(found, "machine type").result == "a2-highgpu-8g in us-central1-a: 96 vCPUs, 680 GiB"


@pytest.mark.parametrize(
    ("region", "project", "result"),
    [
        (quota("NVIDIA_A100_GPUS", 8), quota("GPUS_ALL_REGIONS", 16), "NVIDIA_A100_GPUS: 8, 0 in use, 16 needed"),
        (quota("NVIDIA_A100_GPUS", 16), quota("GPUS_ALL_REGIONS", 0), "GPUS_ALL_REGIONS: 0, 0 in use, 16 needed"),
        (quota("NVIDIA_L4_GPUS", 16), quota("GPUS_ALL_REGIONS", 16), "NVIDIA_A100_GPUS: 0, 0 in use, 16 needed"),
    ],
    ids=["the region", "all regions", "not listed"],
)
def test_every_small_quota_is_reported(
    google: Recorded, context: Contexts, region: object, project: object, result: str
) -> None:
    google.put(f"{COMPUTE}/regions/us-central1", {"quotas": [region]})
    google.put(COMPUTE, {"quotas": [project, quota("NETWORKS", 15)]})
    problems = [item for item in findings(context("gcp"), "quota") if item.status == "problem"]
    assert [item.result for item in problems] == [result]
    assert "request 16 of" in problems[0].fix


@pytest.mark.parametrize("capacity", ["spot", "flex_start"])
@pytest.mark.usefixtures("google")
def test_preemptible_nodes_count_against_their_own_quota(context: Contexts, capacity: str) -> None:
    found = findings(context("gcp", {"gpu.capacity": capacity}), "quota")
    assert [item.result for item in found if item.status == "problem"] == [
        "PREEMPTIBLE_NVIDIA_A100_GPUS: 8, 0 in use, 16 needed"
    ]


def test_tcpx_needs_four_additional_networks(google: Recorded, context: Contexts) -> None:
    google.put(f"{COMPUTE}/regions/us-central1", {"quotas": [quota("NVIDIA_H100_GPUS", 16)]})
    google.put(COMPUTE, {"quotas": [quota("GPUS_ALL_REGIONS", 16), quota("NETWORKS", 5, 2)]})
    found = findings(context("gcp", {"gpu.instance_type": "a3-highgpu-8g"}), "quota")
    assert [item.result for item in found if item.status == "problem"] == ["NETWORKS: 5, 2 in use, 5 needed"]


@pytest.mark.usefixtures("google")
def test_a_stack_in_an_existing_network_needs_no_quota_of_networks(context: Contexts) -> None:
    names = {"network": "shared", "subnetwork": "gpus", "pods_range": "pods", "services_range": "services"}
    found = findings(context("gcp", {"network.existing": names}), "quota")
    assert not [item for item in found if item.result.startswith("NETWORKS")]


def test_a_zone_without_the_machine_type_is_reported_with_a_zone_that_offers_it(
    google: Recorded, context: Contexts
) -> None:
    del google.answers[TYPE]
    listed = {"zones/us-central1-f": {"machineTypes": [{}]}, "zones/us-east1-b": {"machineTypes": [{}]}}
    listed["zones/us-central1-b"] = {"warning": {"code": "NO_RESULTS_ON_PAGE"}}  # type: ignore[dict-item]
    google.put(f"{COMPUTE}/aggregated/machineTypes", {"items": listed})
    (finding,) = findings(context("gcp"), "machine type")
    assert finding.status == "problem"
    assert finding.result == "us-central1-a has no a2-highgpu-8g; us-central1-f, us-east1-b do"
    assert finding.fix == "pulumi config set gcp:zone us-central1-f"


def test_a_disabled_api_is_reported_by_its_list_and_by_a_denied_request(google: Recorded, context: Contexts) -> None:
    google.put(f"{PROJECT}/services", {"services": [{"config": {"name": "serviceusage.googleapis.com"}}]})
    (finding,) = findings(context("gcp"), "services")
    missing = " ".join(f"{name}.googleapis.com" for name in CLUSTER_APIS)
    assert finding.fix == f"gcloud services enable {missing} --project my-project, then up again"
    message = "Compute Engine API has not been used in project 42 before or it is disabled: compute.googleapis.com"
    google.put(TYPE, refusal(403, message, errors=[{"reason": "accessNotConfigured"}]), 403)
    (finding,) = findings(context("gcp"), "machine type")
    assert (finding.status, finding.cause) == ("unknown", "gcp-service")
    assert finding.fix == "gcloud services enable compute.googleapis.com --project my-project, then up again"


def test_every_service_is_enabled_before_up_because_a_new_one_refuses_requests_for_minutes(
    google: Recorded, context: Contexts
) -> None:
    # hashicorp/terraform-provider-google#10510 and #11023: enabled, and the next request gets SERVICE_DISABLED.
    on = [{"config": {"name": f"{name}.googleapis.com"}} for name in ("serviceusage", *CLUSTER_APIS[:-1])]
    google.put(f"{PROJECT}/services", {"services": on})
    (finding,) = findings(context("gcp"), "services")
    assert (finding.status, finding.result) == ("problem", "disabled: storage.googleapis.com")


@pytest.mark.parametrize(
    ("versions", "fix"),
    [
        (["1.36.2-gke.10", "1.37.0-gke.1"], "pulumi config set --path cluster.kubernetes_version 1.36"),
        ([], "pulumi config set --path cluster.kubernetes_version <version>"),
    ],
)
def test_a_version_that_gke_no_longer_offers_is_a_problem(
    google: Recorded, context: Contexts, versions: list[str], fix: str
) -> None:
    google.put(SERVER, {"channels": [{"channel": "REGULAR", "validVersions": versions}]})
    (finding,) = findings(context("gcp"), "Kubernetes version")
    assert (finding.status, finding.fix) == ("problem", fix)


def test_a_project_without_billing_is_a_problem(google: Recorded, context: Contexts) -> None:
    google.put(f"{PROJECT}/billingInfo", {"billingEnabled": False})
    (finding,) = findings(context("gcp"), "billing")
    assert finding.status == "problem"
    assert finding.fix.startswith("gcloud billing projects link my-project")


@pytest.mark.parametrize(
    ("held", "fix"),
    [
        ({}, ""),
        ({"status": "CREATING"}, "gpu.reservation_id"),
        ({"inUseCount": "1"}, "gpu.nodes.desired 1"),
        ({"machineType": "a2-ultragpu-8g"}, "gpu.reservation_id"),
        (None, "gpu.reservation_id"),
    ],
    ids=["matching", "not ready", "full", "another type", "deleted"],
)
def test_a_reservation_must_be_ready_and_match_type_and_number_of_nodes(
    google: Recorded, context: Contexts, held: dict[str, str] | None, fix: str
) -> None:
    if held is not None:
        inner = {"count": "2", "inUseCount": held.get("inUseCount", "0")}
        kind = {"instanceProperties": {"machineType": held.get("machineType", "a2-highgpu-8g")}}
        google.put(RESERVATION, {"status": held.get("status", "READY"), "specificReservation": inner | kind})
    settings = context("gcp", {"gpu.capacity": "reservation", "gpu.reservation_id": "gpus"})
    (finding,) = findings(settings, "reservation")
    assert finding.status == ("problem" if fix else "ok")
    assert fix in finding.fix


def test_a_shared_reservation_is_read_from_its_own_project(google: Recorded, context: Contexts) -> None:
    named = "projects/other-project/reservations/gpus"
    findings(context("gcp", {"gpu.capacity": "reservation", "gpu.reservation_id": named}), "reservation")
    path = "/compute/v1/projects/other-project/zones/us-central1-a/reservations/gpus"
    assert any(path in asked_for for _, asked_for, _ in google.requests)


@pytest.mark.parametrize(("status", "cause"), [(404, "gcp-project"), (403, "gcp-project"), (401, "gcp-credentials")])
def test_a_denied_project_is_a_problem(google: Recorded, context: Contexts, status: int, cause: str) -> None:
    google.put(PROJECT, refusal(status, "The caller does not have permission"), status)
    (finding,) = findings(context("gcp"), "credentials")
    assert (finding.status, finding.cause) == ("problem", cause)


def test_missing_application_default_credentials_are_fixed_by_a_login(
    context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    def no_credentials(scopes: object) -> None:
        raise DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr(google.auth, "default", no_credentials)
    (finding,) = findings(context("gcp"), "credentials")
    assert (finding.status, finding.fix) == ("problem", "gcloud auth application-default login")


def test_the_bucket_of_a_stack_that_is_up_must_exist(google: Recorded, context: Contexts) -> None:
    up = context("gcp", None, {"account": "my-project", "bucket_uri": "gs://b-1234", "cluster_name": "c"})
    assert findings(up, "bucket")[0].status == "problem"
    google.put("/storage/v1/b/b-1234", {"name": "b-1234", "location": "US-CENTRAL1"})
    assert findings(up, "bucket")[0].result == "gs://b-1234 exists, in US-CENTRAL1"


def test_the_plug_in_of_the_kubeconfig_must_be_on_path(context: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor.auth_plugin().cause == "gcp-auth-plugin"


@pytest.mark.usefixtures("google")
def test_a_training_service_needs_no_plug_in_and_has_its_own_quotas(context: Contexts) -> None:
    checks = list(doctor.checks(context("gcp", {"job.launcher": "vertex"})))
    assert "auth plug-in" not in {check.name for check in checks}, "there is no kubeconfig that uses it"
    (quota,) = [check for check in checks if check.name == "quota"]
    found = run_checks([check for check in checks if check.name in ("credentials", "quota")])
    assert "its own quotas" in one(found, quota.name).result


def test_a_failing_service_is_unknown_and_not_an_error_of_the_doctor(google: Recorded, context: Contexts) -> None:
    google.put(TYPE, refusal(503, "backend error"), 503)
    (finding,) = findings(context("gcp"), "machine type")
    assert (finding.status, finding.cause, finding.result) == ("unknown", "slow", "503 backend error")
