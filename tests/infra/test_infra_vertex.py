"""The provider of Vertex AI's jobs against the service's REST API on loopback, through Google's own client."""

from __future__ import annotations

import json
import socket
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
_CONNECT = socket.socket.connect


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the network is loopback; anything else still fails its test."""

    def refuse(self: socket.socket, address: Any) -> None:
        assert address[0] in ("127.0.0.1", "localhost"), f"the client connects to {address}"
        _CONNECT(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> Iterator[Service]:
    with vertex_service.serving(Service()) as found:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(vertex_service.credentials(tmp_path, found)))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        # Waits of the client and of the provider, which are real ones otherwise.
        monkeypatch.setattr("time.sleep", lambda _seconds: None)
        yield found


def request(**changes: Any) -> str:
    """A request as a stack makes it."""
    pool = {
        "machineSpec": {"machineType": "a2-highgpu-8g", "acceleratorType": "NVIDIA_TESLA_A100", "acceleratorCount": 8},
        "replicaCount": "1",
        "containerSpec": {"imageUri": IMAGE, "args": ["launch"]},
    }
    return json.dumps(
        {"displayName": "gcp-a", "labels": {"stack": "gcp"}, "jobSpec": {"workerPoolSpecs": [pool]}} | changes
    )


def props(service: Service, **changes: Any) -> dict[str, Any]:
    given = {"project": "my-project", "region": "us-central1", "endpoint": service.url, "start_minutes": 1.0}
    return given | {"request": request()} | changes


def one_line(told: pytest.ExceptionInfo[ServiceError]) -> str:
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_job_is_created_and_waited_for_until_it_runs_but_not_until_it_ends(service: Service) -> None:
    service.path = ["JOB_STATE_QUEUED", "JOB_STATE_PENDING", "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    made = CustomJobProvider().create(props(service))
    assert made.id in service.jobs
    assert made.outs
    assert made.outs["state"] == "JOB_STATE_RUNNING"
    assert "request" not in made.outs, "job.env may hold a secret, and outputs are kept in clear"


def test_a_job_that_waits_for_its_machines_is_left_in_its_queue(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.path = ["JOB_STATE_QUEUED"] * 10_000
    made = CustomJobProvider().create(props(service, start_minutes=0.01))
    assert made.outs
    assert made.outs["state"] == "JOB_STATE_QUEUED"
    assert made.id in service.jobs, "flex-start may take hours, which is no failure"


def test_a_job_that_fails_before_it_runs_is_told_in_one_line_and_removed(service: Service) -> None:
    service.path, service.error = ["JOB_STATE_PENDING", "JOB_STATE_FAILED"], "Failed to pull\nthe image."
    with pytest.raises(ServiceError) as told:
        CustomJobProvider().create(props(service))
    assert "FAILED before it ran: Failed to pull the image." in one_line(told)
    assert not service.jobs, "what Pulumi does not know of must not stay"


def test_too_many_requests_are_made_again(service: Service) -> None:
    service.refusals = [(429, "Quota exceeded for quota metric 'Resource management requests'."), (503, "Try again.")]
    made = CustomJobProvider().create(props(service))
    assert list(service.jobs) == [made.id]


def test_a_quota_of_machines_is_told_at_once_with_what_to_do(service: Service) -> None:
    metric = "aiplatform.googleapis.com/custom_model_training_nvidia_a100_gpus"
    service.refusals = [(429, f"The following quota metrics exceed quota limits: {metric}")] * 9
    with pytest.raises(ServiceError, match=metric) as told:
        CustomJobProvider().create(props(service))
    assert "Quotas" in one_line(told)
    assert len(service.refusals) == 8, "no waiting gives more machines"


def test_a_request_whose_answer_was_lost_does_not_make_two_jobs(service: Service) -> None:
    service.lost = 1
    made = CustomJobProvider().create(props(service))
    assert list(service.jobs) == [made.id], "a second job would cost as much again, and nobody would see it"


def test_a_job_of_an_up_that_was_cut_off_is_taken_up_by_the_next_one(service: Service) -> None:
    first = CustomJobProvider().create(props(service))
    assert CustomJobProvider().create(props(service)).id == first.id, "the state never heard of the first"


def test_a_service_that_is_not_reached_is_told_in_one_line(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertex_client, "_BUSY_SECONDS", 0.1)
    with pytest.raises(ServiceError, match="Vertex AI was asked") as told:
        CustomJobProvider().create(props(service, endpoint="http://127.0.0.1:1"))
    assert "refused" in one_line(told)


def test_a_job_that_has_ended_is_not_taken_up_again(service: Service) -> None:
    service.path = ["JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    first = CustomJobProvider().create(props(service))
    CustomJobProvider().read(first.id, props(service))
    assert CustomJobProvider().create(props(service)).id != first.id


def test_a_request_with_a_name_that_the_service_does_not_know_never_leaves(service: Service) -> None:
    from google.protobuf.json_format import ParseError

    with pytest.raises(ParseError, match="replicas"):
        CustomJobProvider().create(props(service, request=request(replicas=3)))
    assert not [line for line in service.asked if line.startswith("POST")]


def test_a_refusal_is_the_services_own_words_on_one_line(service: Service) -> None:
    service.refusals = [(403, "Permission 'aiplatform.customJobs.create'\ndenied.")]
    with pytest.raises(ServiceError) as told:
        CustomJobProvider().create(props(service))
    assert "Permission 'aiplatform.customJobs.create' denied." in one_line(told)
    assert "roles/aiplatform.user" in str(told.value)


def test_a_running_job_is_cancelled_waited_for_and_removed(service: Service) -> None:
    made = CustomJobProvider().create(props(service))
    service.asked.clear()
    CustomJobProvider().delete(made.id, made.outs or {})
    assert service.deleted == [made.id]
    asked = [line.replace(f"/v1/{made.id}", "job") for line in service.asked]
    assert asked[0] == "POST job:cancel"
    assert asked.count("GET job") >= 3, "its machines are billed until the service has taken them back"
    assert asked.index("DELETE job") > asked.index("GET job")


@pytest.mark.parametrize("end", ["JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED"])
def test_a_job_that_has_ended_is_removed_without_an_error(service: Service, end: str) -> None:
    service.path = ["JOB_STATE_RUNNING", end]
    made = CustomJobProvider().create(props(service))
    CustomJobProvider().read(made.id, props(service))
    CustomJobProvider().delete(made.id, made.outs or {})
    assert service.deleted == [made.id]


def test_a_job_that_is_gone_needs_no_deleting(service: Service) -> None:
    CustomJobProvider().delete(f"{PARENT}/customJobs/1", props(service))
    assert service.deleted == []


def test_a_refresh_sees_the_state_and_whether_the_job_is_there(service: Service) -> None:
    service.path = ["JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
    made = CustomJobProvider().create(props(service))
    seen = CustomJobProvider().read(made.id, made.outs or {})
    assert (seen.id, (seen.outs or {})["state"]) == (made.id, "JOB_STATE_SUCCEEDED")
    service.jobs.clear()
    assert CustomJobProvider().read(made.id, made.outs or {}).id == "", "Pulumi takes an empty id for a deletion"


def test_another_request_is_another_job_after_the_end_of_the_old_one(service: Service) -> None:
    made = CustomJobProvider().create(props(service))
    olds = made.outs or {}
    same = CustomJobProvider().diff(made.id, olds, props(service))
    assert same.changes is False
    other = CustomJobProvider().diff(made.id, olds, props(service, request=request(displayName="b")))
    assert other.replaces == ["request"]
    assert other.delete_before_replace, "two jobs would write the checkpoints of one run"
    moved = CustomJobProvider().diff(made.id, olds, props(service, endpoint="https://elsewhere"))
    assert moved.changes
    assert not moved.replaces, "the way to the service is not the job"


def test_missing_credentials_are_one_line(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from google.auth.exceptions import DefaultCredentialsError

    def none(*_: object, **__: object) -> None:
        raise DefaultCredentialsError("nothing found")

    monkeypatch.setattr("google.auth.default", none)
    with pytest.raises(ServiceError, match="gcloud auth application-default login"):
        CustomJobProvider().create(props(service))


# --- the stack -------------------------------------------------------------------------------------------------------


def job(recording: Recording) -> dict[str, Any]:
    given = recording.one("pulumi-python:dynamic/vertex:CustomJob").inputs["request"]
    secret = given["value"] if isinstance(given, dict) else given
    assert isinstance(given, dict), "job.env may hold a secret: the state must encrypt the request"
    found: dict[str, Any] = json.loads(secret)
    return found


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
def test_the_service_takes_the_request_of_a_stack(
    overrides: dict[str, object], stack: Callable[..., Recording]
) -> None:
    made = job(stack("gcp", ON_VERTEX | overrides))
    if "tensorboard" in made["jobSpec"]:
        made["jobSpec"]["tensorboard"] = f"{PARENT}/tensorboards/7"
    assert vertex_service.refused(made, PARENT) is None


def test_the_fake_refuses_what_the_service_refuses() -> None:
    good = json.loads(request())
    assert vertex_service.refused(good, PARENT) is None
    pool = good["jobSpec"]["workerPoolSpecs"][0]
    for changes in (
        {"replicaCount": "2"},
        {"containerSpec": {}},
        {"machines": 1},
        {"machineSpec": {"acceleratorType": "A100"}},
    ):
        bad = good | {"jobSpec": {"workerPoolSpecs": [pool | changes]}}
        assert vertex_service.refused(bad, PARENT), f"a fake that takes {changes} proves nothing"


def test_machines_capacity_and_restarts_are_the_stacks(stack: Callable[..., Recording]) -> None:
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


def test_a_job_on_vertex_runs_as_the_trainers_account_and_shows_its_curves(stack: Callable[..., Recording]) -> None:
    recording = stack("gcp", ON_VERTEX)
    spec = job(recording)["jobSpec"]
    account = recording.one("gcp:serviceaccount/account:Account")
    assert spec["serviceAccount"].startswith(account.inputs["accountId"])
    assert spec["tensorboard"] == f"{recording.one('gcp:vertex/aiTensorboard:AiTensorboard').name}-id"
    uri = recording.exports["checkpoint_uri"]
    assert spec["baseOutputDirectory"]["outputUriPrefix"] == f"{uri}/default", "AIP_CHECKPOINT_DIR is below it"
    made = recording.one("pulumi-python:dynamic/vertex:CustomJob")
    for grant in recording.of_type("gcp:storage/bucketIAMMember:BucketIAMMember"):
        assert recording.needs(made, grant), "a job that begins before its rights fails"


def test_vertex_provisions_no_cluster(stack: Callable[..., Recording]) -> None:
    recording = stack("gcp", ON_VERTEX)
    assert not [item.type for item in recording.registrations if item.type.startswith(("kubernetes:", "gcp:container"))]
    assert not [item.type for item in recording.registrations if item.type.startswith(("gcp:compute", "gcp:filestore"))]
    assert "kubeconfig" not in recording.exports
    assert recording.exports["job"]["launcher"] == "vertex"
    assert recording.exports["hourly_cost_usd"]["on_demand"] == pytest.approx(2 * 29.387), "machines alone are billed"


def test_data_on_the_shared_storage_of_a_cluster_is_the_buckets_folder_there(stack: Callable[..., Recording]) -> None:
    data = {"trainer.data": {"source": "criteo", "path": "/data/criteo"}}
    arguments = job(stack("gcp", ON_VERTEX | data))["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    bucket = stack("gcp", ON_VERTEX | data).exports["bucket_uri"].removeprefix("gs://")
    assert f"--data-at=/data=/gcs/{bucket}/datasets" in arguments
    assert "--data.path=/data/criteo" in arguments, "one configuration, whatever starts the job"


def test_the_trainer_reads_back_the_settings_that_it_is_given(stack: Callable[..., Recording]) -> None:
    from trainer.config.options import load_config

    wanted = {"train": {"steps": 7, "batch_size": 4096}, "model": {"num_embeddings": [10, 20]}}
    wanted |= {"data": {"source": "synthetic", "num_sparse": 2}, "sharding": {"tables": {"t_cat_0": ["row_wise"]}}}
    overrides = {f"trainer.{name}": value for name, value in wanted.items()}
    arguments = job(stack("gcp", ON_VERTEX | overrides))["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    read = load_config(arguments[arguments.index("train") + 1 :], {})
    assert (read.train.steps, read.train.batch_size, read.train.device) == (7, 4096, "cuda")
    assert tuple(read.model.num_embeddings) == (10, 20)
    assert {key: list(value) for key, value in read.sharding.tables.items()} == {"t_cat_0": ["row_wise"]}


def test_a_missing_client_is_one_line_before_any_resource(
    stack: Callable[..., Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    from infra.components import optional_packages as packages

    monkeypatch.setattr(packages, "installed", lambda module: module != vertex_client.CLIENT)
    recording = stack("gcp", ON_VERTEX | {"job.run": "without-client"}, fails=True)
    assert "`make install-managed` installs it" in str(recording.error)
    assert type(recording.error).__name__ == "RunError"
    assert recording.registrations == []


def test_a_digest_is_of_the_request_alone() -> None:
    assert digest("a") == digest("a") != digest("b")
    assert digest(None) == "", "an image that is not built yet"
