"""A Vertex AI job with the real engine: its provider in a separate process, a fake REST API on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_lifecycle import open_project
from engine_runs import Run

pytest.importorskip("google.cloud.aiplatform_v1", reason="google-cloud-aiplatform is missing: make install-managed")

import vertex_service
from vertex_service import Service

IMAGE = "us-central1-docker.pkg.dev/my-project/trainer/trainer@sha256:" + "0" * 64
SECRET = "a-secret-token-of-the-user"


@dataclass
class VertexLifecycle:
    """The runs by their purpose, and the jobs of the service after each."""

    service: Service
    runs: dict[str, Run] = field(default_factory=dict)
    jobs: dict[str, list[str]] = field(default_factory=dict)
    state: str = ""
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def vertex_lifecycle(tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path) -> Iterator[VertexLifecycle]:
    """Run up with too small a quota, up, a change, a refresh after the job was deleted, and destroy."""
    folder = tmp_path_factory.mktemp("vertex")
    world, server, project = open_project(folder / "stack", "gcp", kubeconfig, authorized=False)
    with vertex_service.serve_vertex(Service()) as service:
        key = vertex_service.credentials(folder, service)
        project.environment |= {"GOOGLE_APPLICATION_CREDENTIALS": str(key), "NO_PROXY": "127.0.0.1"}
        settings = {"job.launcher": "vertex", "job.image": IMAGE, "vertex.endpoint": service.url}
        for path, value in {**settings, "storage.on_destroy": "delete"}.items():
            project.set(path, value)
        project.pulumi("config", "set", "--stack", "gcp", "--secret", "--path", "job.env.TOKEN", SECRET)
        lifecycle = VertexLifecycle(service)

        def run(name: str, verb: str) -> None:
            lifecycle.runs[name] = project.run(verb)  # type: ignore[arg-type]
            lifecycle.jobs[name] = list(service.jobs)

        run("preview", "preview")
        service.refusals = [(429, "The following quota metrics exceed quota limits: nvidia_a100_gpus")]
        run("quota", "up")
        run("up", "up")
        lifecycle.state = project.export()
        run("again", "up")
        project.set("trainer.data.seed", 7)
        run("seed", "up")
        service.jobs.clear()
        run("refresh", "refresh")
        run("recreate", "up")
        run("destroy", "destroy")
        lifecycle.left = sorted(f"{resource.type} {resource.name}" for resource in world.resources.values())
        server.kill()
        yield lifecycle


def test_a_preview_creates_no_job(vertex_lifecycle: VertexLifecycle) -> None:
    assert vertex_lifecycle.runs["preview"].ok, vertex_lifecycle.runs["preview"].output
    assert vertex_lifecycle.jobs["preview"] == []


def test_a_quota_error_is_reported_without_a_stack_trace(vertex_lifecycle: VertexLifecycle) -> None:
    run = vertex_lifecycle.runs["quota"]
    assert not run.ok
    assert "exceed quota limits: nvidia_a100_gpus. Fix: request more under IAM" in run.output
    assert "Traceback" not in run.output, run.output


def test_up_creates_one_job_and_the_next_up_changes_nothing(vertex_lifecycle: VertexLifecycle) -> None:
    assert vertex_lifecycle.runs["up"].ok, vertex_lifecycle.runs["up"].output
    assert len(vertex_lifecycle.jobs["up"]) == 1
    assert vertex_lifecycle.runs["again"].changes == []
    assert vertex_lifecycle.jobs["again"] == vertex_lifecycle.jobs["up"]


def test_the_state_contains_no_secret_in_plain_text(vertex_lifecycle: VertexLifecycle) -> None:
    assert SECRET not in vertex_lifecycle.state
    assert vertex_lifecycle.service.public_key not in vertex_lifecycle.state
    resources = json.loads(vertex_lifecycle.state)["deployment"]["resources"]
    (job,) = [one for one in resources if one["type"] == "pulumi-python:dynamic/vertex:CustomJob"]
    assert job["outputs"]["state"] == "JOB_STATE_RUNNING"
    assert job["id"] == vertex_lifecycle.jobs["up"][0]


def test_a_change_cancels_the_old_job_before_it_creates_the_new_one(vertex_lifecycle: VertexLifecycle) -> None:
    run = vertex_lifecycle.runs["seed"]
    assert run.ok, run.output
    (old,), (new,) = vertex_lifecycle.jobs["up"], vertex_lifecycle.jobs["seed"]
    assert old != new
    requests = vertex_lifecycle.service.requests
    creates = [index for index, line in enumerate(requests) if line.startswith("POST") and line.endswith("/customJobs")]
    assert requests.index(f"DELETE /v1/{old}") < creates[-1], "two jobs would write the checkpoints of one run"
    assert f"POST /v1/{old}:cancel" in requests


def test_a_deleted_job_is_recreated(vertex_lifecycle: VertexLifecycle) -> None:
    assert vertex_lifecycle.runs["refresh"].ok, vertex_lifecycle.runs["refresh"].output
    assert vertex_lifecycle.runs["recreate"].ok, vertex_lifecycle.runs["recreate"].output
    assert len(vertex_lifecycle.jobs["recreate"]) == 1


def test_destroy_cancels_the_job_and_leaves_nothing(vertex_lifecycle: VertexLifecycle) -> None:
    run = vertex_lifecycle.runs["destroy"]
    assert run.ok, run.output
    assert vertex_lifecycle.jobs["destroy"] == []
    (last,) = vertex_lifecycle.jobs["recreate"]
    assert f"POST /v1/{last}:cancel" in vertex_lifecycle.service.requests
    # The project's services stay enabled: other stacks may use them.
    assert [item for item in vertex_lifecycle.left if not item.startswith("gcp:projects/service:")] == []
