"""The provider of Vertex AI jobs, through Google's client, against a fake REST service; and a stack with Vertex AI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from provider_mocks.recording import Recording

pytest.importorskip("google.cloud.aiplatform_v1", reason="google-cloud-aiplatform is missing: make install-managed")

import vertex_service
from vertex_service import Service

from infra.clouds.gcp import vertex_client
from infra.clouds.gcp.vertex import CustomJobProvider, digest
from infra.components.one_line_errors import ServiceError

PARENT = "projects/my-project/locations/us-central1"
IMAGE = "us-central1-docker.pkg.dev/my-project/trainer/trainer@sha256:" + "0" * 64
ON_VERTEX = {"job.launcher": "vertex", "job.image": IMAGE}


@pytest.fixture
def no_network(loopback_only: None) -> None:
    """Allow these tests to connect to loopback."""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> Iterator[Service]:
    """Serve a fake Vertex AI, with credentials for it and without waits."""
    with vertex_service.serve_vertex(Service()) as found:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(vertex_service.credentials(tmp_path, found)))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("time.sleep", lambda _seconds: None)
        yield found


def request(**changes: Any) -> str:
    """Return a valid request with changes."""
    pool = {
        "machineSpec": {"machineType": "a2-highgpu-8g", "acceleratorType": "NVIDIA_TESLA_A100", "acceleratorCount": 8},
        "replicaCount": "1",
        "containerSpec": {"imageUri": IMAGE, "args": ["launch"]},
    }
    return json.dumps(
        {"displayName": "gcp-a", "labels": {"stack": "gcp"}, "jobSpec": {"workerPoolSpecs": [pool]}} | changes
    )


def props(service: Service, **changes: Any) -> dict[str, Any]:
    """Return the inputs of a job with changes."""
    inputs = {"project": "my-project", "region": "us-central1", "endpoint": service.url, "start_minutes": 1.0}
    return inputs | {"request": request()} | changes


def one_line(caught: pytest.ExceptionInfo[ServiceError]) -> str:
    """Return the message of an error after checking that it is one line."""
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_create_waits_until_the_job_runs_but_not_until_it_ends(service: Service) -> None:
    service.path = ["JOB_STATE_QUEUED", "JOB_STATE_PENDING", "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    made = CustomJobProvider().create(props(service))
    assert made.id in service.jobs
    assert made.outs
    assert made.outs["state"] == "JOB_STATE_RUNNING"
    assert "request" not in made.outs, "job.env may hold a secret, and outputs are stored in plain text"


def test_a_job_without_machines_stays_in_its_queue(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.path = ["JOB_STATE_QUEUED"] * 10_000
    made = CustomJobProvider().create(props(service, start_minutes=0.01))
    assert made.outs
    assert made.outs["state"] == "JOB_STATE_QUEUED"
    assert made.id in service.jobs, "waiting hours for flex-start is no failure"


def test_a_job_that_fails_to_start_is_deleted_and_reported_in_one_line(service: Service) -> None:
    service.path, service.error = ["JOB_STATE_PENDING", "JOB_STATE_FAILED"], "Failed to pull\nthe image."
    with pytest.raises(ServiceError) as caught:
        CustomJobProvider().create(props(service))
    assert "FAILED before it ran: Failed to pull the image." in one_line(caught)
    assert not service.jobs, "Pulumi could never delete a job without a state"


def test_rate_limited_requests_are_retried(service: Service) -> None:
    service.refusals = [(429, "Quota exceeded for quota metric 'Resource management requests'."), (503, "Try again.")]
    made = CustomJobProvider().create(props(service))
    assert list(service.jobs) == [made.id]


def test_an_exhausted_machine_quota_fails_at_once_with_a_fix(service: Service) -> None:
    metric = "aiplatform.googleapis.com/custom_model_training_nvidia_a100_gpus"
    service.refusals = [(429, f"The following quota metrics exceed quota limits: {metric}")] * 9
    with pytest.raises(ServiceError, match=metric) as caught:
        CustomJobProvider().create(props(service))
    assert "Quotas" in one_line(caught)
    assert len(service.refusals) == 8, "retries cannot increase the quota"


def test_a_lost_response_does_not_create_a_second_job(service: Service) -> None:
    service.lost = 1
    made = CustomJobProvider().create(props(service))
    assert list(service.jobs) == [made.id], "an unnoticed second job would double the costs"


def test_up_adopts_the_job_of_an_interrupted_up(service: Service) -> None:
    first = CustomJobProvider().create(props(service))
    assert CustomJobProvider().create(props(service)).id == first.id, "the state does not contain the first job"


def test_an_unreachable_service_is_reported_in_one_line(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertex_client, "_RETRY_SECONDS", 0.1)
    with pytest.raises(ServiceError, match="Vertex AI still fails") as caught:
        CustomJobProvider().create(props(service, endpoint="http://127.0.0.1:1"))
    assert "refused" in one_line(caught)


def test_up_does_not_adopt_a_job_that_has_ended(service: Service) -> None:
    service.path = ["JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    first = CustomJobProvider().create(props(service))
    CustomJobProvider().read(first.id, props(service))
    assert CustomJobProvider().create(props(service)).id != first.id


def test_a_request_with_an_unknown_field_is_not_sent(service: Service) -> None:
    from google.protobuf.json_format import ParseError

    with pytest.raises(ParseError, match="replicas"):
        CustomJobProvider().create(props(service, request=request(replicas=3)))
    assert not [line for line in service.requests if line.startswith("POST")]


def test_an_error_response_is_reported_on_one_line(service: Service) -> None:
    service.refusals = [(403, "Permission 'aiplatform.customJobs.create'\ndenied.")]
    with pytest.raises(ServiceError) as caught:
        CustomJobProvider().create(props(service))
    assert "Permission 'aiplatform.customJobs.create' denied." in one_line(caught)
    assert "roles/aiplatform.user" in str(caught.value)


def test_delete_cancels_a_running_job_and_waits_for_its_end(service: Service) -> None:
    made = CustomJobProvider().create(props(service))
    service.requests.clear()
    CustomJobProvider().delete(made.id, made.outs or {})
    assert service.deleted == [made.id]
    requests = [line.replace(f"/v1/{made.id}", "job") for line in service.requests]
    assert requests[0] == "POST job:cancel"
    assert requests.count("GET job") >= 3, "machines are billed until the service has released them"
    assert requests.index("DELETE job") > requests.index("GET job")


@pytest.mark.parametrize("end", ["JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED"])
def test_delete_of_a_job_that_has_ended_succeeds(service: Service, end: str) -> None:
    service.path = ["JOB_STATE_RUNNING", end]
    made = CustomJobProvider().create(props(service))
    CustomJobProvider().read(made.id, props(service))
    CustomJobProvider().delete(made.id, made.outs or {})
    assert service.deleted == [made.id]


def test_delete_of_a_missing_job_succeeds(service: Service) -> None:
    CustomJobProvider().delete(f"{PARENT}/customJobs/1", props(service))
    assert service.deleted == []


def test_a_refresh_reads_the_state_and_detects_a_deleted_job(service: Service) -> None:
    service.path = ["JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    made = CustomJobProvider().create(props(service))
    seen = CustomJobProvider().read(made.id, made.outs or {})
    assert (seen.id, (seen.outs or {})["state"]) == (made.id, "JOB_STATE_SUCCEEDED")
    service.jobs.clear()
    assert CustomJobProvider().read(made.id, made.outs or {}).id == "", "Pulumi treats an empty id as a deletion"


def test_a_changed_request_replaces_the_job_after_its_deletion(service: Service) -> None:
    made = CustomJobProvider().create(props(service))
    olds = made.outs or {}
    same = CustomJobProvider().diff(made.id, olds, props(service))
    assert same.changes is False
    other = CustomJobProvider().diff(made.id, olds, props(service, request=request(displayName="b")))
    assert other.replaces == ["request"]
    assert other.delete_before_replace, "two jobs would write the checkpoints of one run"
    moved = CustomJobProvider().diff(made.id, olds, props(service, endpoint="https://elsewhere"))
    assert moved.changes
    assert not moved.replaces, "another endpoint does not change the job"


def test_missing_credentials_are_reported_in_one_line(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from google.auth.exceptions import DefaultCredentialsError

    def fail(*_: object, **__: object) -> None:
        raise DefaultCredentialsError("nothing found")

    monkeypatch.setattr("google.auth.default", fail)
    with pytest.raises(ServiceError, match="gcloud auth application-default login"):
        CustomJobProvider().create(props(service))


def job(recording: Recording) -> dict[str, Any]:
    """Return the request of the stack's job."""
    request = recording.one("pulumi-python:dynamic/vertex:CustomJob").inputs["request"]
    secret = request["value"] if isinstance(request, dict) else request
    assert isinstance(request, dict), "job.env may hold a secret: the state must encrypt the request"
    parsed: dict[str, Any] = json.loads(secret)
    return parsed


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gpu.instance_type": "a3-highgpu-8g", "gpu.capacity": "flex_start", "vertex.queue_hours": 5},
        {"gpu.instance_type": "a2-ultragpu-8g", "gpu.capacity": "reservation", "gpu.reservation_id": "mine"},
        {"gpu.instance_type": "g2-standard-4", "gpu.capacity": "spot", "job.nodes": 1, "vertex.tensorboard": False},
    ],
    ids=["two machines", "flex-start", "reservation", "spot"],
)
def test_the_service_accepts_the_request_of_a_stack(
    overrides: dict[str, object], stack: Callable[..., Recording]
) -> None:
    made = job(stack("gcp", ON_VERTEX | overrides))
    if "tensorboard" in made["jobSpec"]:
        made["jobSpec"]["tensorboard"] = f"{PARENT}/tensorboards/7"
    assert vertex_service.find_error(made, PARENT) is None


def test_the_fake_service_rejects_what_the_service_rejects() -> None:
    good = json.loads(request())
    assert vertex_service.find_error(good, PARENT) is None
    pool = good["jobSpec"]["workerPoolSpecs"][0]
    for changes in (
        {"replicaCount": "2"},
        {"containerSpec": {}},
        {"machines": 1},
        {"machineSpec": {"acceleratorType": "A100"}},
    ):
        bad = good | {"jobSpec": {"workerPoolSpecs": [pool | changes]}}
        assert vertex_service.find_error(bad, PARENT), f"the service rejects {changes}"


def test_machines_capacity_and_restarts_follow_the_settings(stack: Callable[..., Recording]) -> None:
    overrides = {"gpu.instance_type": "a3-highgpu-8g", "gpu.capacity": "flex_start", "gpu.max_run_hours": 48}
    spec = job(stack("gcp", ON_VERTEX | overrides))["jobSpec"]
    assert spec["scheduling"] == {
        "strategy": "FLEX_START",
        "timeout": "172800s",
        "maxWaitDuration": "86400s",
        "restartJobOnWorkerRestart": True,
    }
    machine = spec["workerPoolSpecs"][0]["machineSpec"]
    assert (machine["machineType"], machine["acceleratorType"]) == ("a3-highgpu-8g", "NVIDIA_H100_80GB")
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == ["1", "1"]


def test_a_job_runs_as_the_trainers_account_and_writes_to_tensorboard(stack: Callable[..., Recording]) -> None:
    recording = stack("gcp", ON_VERTEX)
    spec = job(recording)["jobSpec"]
    account = recording.one("gcp:serviceaccount/account:Account")
    assert spec["serviceAccount"].startswith(account.inputs["accountId"])
    assert spec["tensorboard"] == f"{recording.one('gcp:vertex/aiTensorboard:AiTensorboard').name}-id"
    uri = recording.exports["checkpoint_uri"]
    assert spec["baseOutputDirectory"]["outputUriPrefix"] == f"{uri}/default", "AIP_CHECKPOINT_DIR is below it"
    made = recording.one("pulumi-python:dynamic/vertex:CustomJob")
    for role in recording.of_type("gcp:storage/bucketIAMMember:BucketIAMMember"):
        assert recording.needs(made, role), "a job that starts before its roles fails"


def test_vertex_creates_no_cluster(stack: Callable[..., Recording]) -> None:
    recording = stack("gcp", ON_VERTEX)
    assert not [item.type for item in recording.registrations if item.type.startswith(("kubernetes:", "gcp:container"))]
    assert not [item.type for item in recording.registrations if item.type.startswith(("gcp:compute", "gcp:filestore"))]
    assert "kubeconfig" not in recording.exports
    assert recording.exports["job"]["launcher"] == "vertex"
    assert recording.exports["hourly_cost_usd"]["on_demand"] == pytest.approx(2 * 29.387), "only machines are billed"


def test_data_of_the_shared_storage_is_read_from_the_buckets_folder(stack: Callable[..., Recording]) -> None:
    data = {"trainer.data": {"source": "criteo", "path": "/data/criteo"}}
    arguments = job(stack("gcp", ON_VERTEX | data))["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    bucket = stack("gcp", ON_VERTEX | data).exports["bucket_uri"].removeprefix("gs://")
    assert f"--data-at=/data=/gcs/{bucket}/datasets" in arguments
    assert "--data.path=/data/criteo" in arguments, "the configuration is the same for all launchers"


def test_the_trainer_parses_the_options_of_the_stack(stack: Callable[..., Recording]) -> None:
    from trainer.config.options import load_config

    expected = {"train": {"steps": 7, "batch_size": 4096}, "model": {"num_embeddings": [10, 20]}}
    expected |= {"data": {"source": "synthetic", "num_sparse": 2}, "sharding": {"tables": {"t_cat_0": ["row_wise"]}}}
    overrides = {f"trainer.{name}": value for name, value in expected.items()}
    arguments = job(stack("gcp", ON_VERTEX | overrides))["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    read = load_config(arguments[arguments.index("train") + 1 :], {})
    assert (read.train.steps, read.train.batch_size, read.train.device) == (7, 4096, "cuda")
    assert tuple(read.model.num_embeddings) == (10, 20)
    assert {key: list(value) for key, value in read.sharding.tables.items()} == {"t_cat_0": ["row_wise"]}


def test_a_missing_client_is_reported_in_one_line_before_any_resource(
    stack: Callable[..., Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    from infra.components import optional_packages as packages

    monkeypatch.setattr(packages, "installed", lambda module: module != vertex_client.CLIENT)
    recording = stack("gcp", ON_VERTEX | {"job.run": "without-client"}, fails=True)
    assert "Fix: make install-managed" in str(recording.error)
    assert type(recording.error).__name__ == "RunError"
    assert recording.registrations == []


def test_a_digest_depends_only_on_the_request() -> None:
    assert digest("a") == digest("a") != digest("b")
    assert digest(None) == "", "the image is not built yet"
