"""A job on Vertex AI by the real engine: the provider in its own process, the service's REST API on loopback."""

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
SECRET = "a-token-of-a-persons-own"


@dataclass
class Life:
    """The runs by what they were for, and what the service held after each."""

    service: Service
    runs: dict[str, Run] = field(default_factory=dict)
    jobs: dict[str, list[str]] = field(default_factory=dict)
    state: str = ""
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def vertex_life(tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path) -> Iterator[Life]:
    """A quota that is too small, then up, a change, a refresh after somebody deleted the job, and destroy."""
    folder = tmp_path_factory.mktemp("vertex")
    world, server, project = open_project(folder / "stack", "gcp", kubeconfig)
    with vertex_service.serving(Service()) as service:
        key = vertex_service.credentials(folder, service)
        project.environment |= {"GOOGLE_APPLICATION_CREDENTIALS": str(key), "NO_PROXY": "127.0.0.1"}
        settings = {"job.launcher": "vertex", "job.image": IMAGE, "vertex.endpoint": service.url}
        for path, value in {**settings, "storage.on_destroy": "delete"}.items():
            project.set(path, value)
        project.pulumi("config", "set", "--stack", "gcp", "--secret", "--path", "job.env.TOKEN", SECRET)
        life = Life(service)

        def run(name: str, verb: str) -> None:
            life.runs[name] = project.run(verb)  # type: ignore[arg-type]
            life.jobs[name] = list(service.jobs)

        run("preview", "preview")
        service.refusals = [(429, "The following quota metrics exceed quota limits: nvidia_a100_gpus")]
        run("quota", "up")
        run("up", "up")
        life.state = project.export()
        run("again", "up")
        project.set("trainer.data.seed", 7)
        run("seed", "up")
        service.jobs.clear()
        run("refresh", "refresh")
        run("back", "up")
        run("destroy", "destroy")
        life.left = sorted(f"{thing.type} {thing.name}" for thing in world.things.values())
        server.kill()
        yield life


def test_a_preview_asks_the_service_nothing(vertex_life: Life) -> None:
    assert vertex_life.runs["preview"].ok, vertex_life.runs["preview"].output
    assert vertex_life.jobs["preview"] == []


def test_a_quota_is_told_without_a_stack_trace(vertex_life: Life) -> None:
    run = vertex_life.runs["quota"]
    assert not run.ok
    assert "exceed quota limits: nvidia_a100_gpus; ask for more under IAM" in run.output
    assert "Traceback" not in run.output, run.output


def test_up_makes_one_job_and_the_next_up_changes_nothing(vertex_life: Life) -> None:
    assert vertex_life.runs["up"].ok, vertex_life.runs["up"].output
    assert len(vertex_life.jobs["up"]) == 1
    assert vertex_life.runs["again"].changes == []
    assert vertex_life.jobs["again"] == vertex_life.jobs["up"]


def test_the_state_holds_no_secret_in_clear(vertex_life: Life) -> None:
    assert SECRET not in vertex_life.state
    assert vertex_life.service.public_key not in vertex_life.state
    resources = json.loads(vertex_life.state)["deployment"]["resources"]
    (job,) = [one for one in resources if one["type"] == "pulumi-python:dynamic/vertex:CustomJob"]
    assert job["outputs"]["state"] == "JOB_STATE_RUNNING"
    assert job["id"] == vertex_life.jobs["up"][0]


def test_a_change_cancels_the_old_job_before_the_new_one_begins(vertex_life: Life) -> None:
    run = vertex_life.runs["seed"]
    assert run.ok, run.output
    (old,), (new,) = vertex_life.jobs["up"], vertex_life.jobs["seed"]
    assert old != new
    asked = vertex_life.service.asked
    begun = [place for place, line in enumerate(asked) if line.startswith("POST") and line.endswith("/customJobs")]
    assert asked.index(f"DELETE /v1/{old}") < begun[-1], "two jobs would write the checkpoints of one run"
    assert f"POST /v1/{old}:cancel" in asked


def test_a_job_that_somebody_deleted_comes_back(vertex_life: Life) -> None:
    assert vertex_life.runs["refresh"].ok, vertex_life.runs["refresh"].output
    assert vertex_life.runs["back"].ok, vertex_life.runs["back"].output
    assert len(vertex_life.jobs["back"]) == 1


def test_destroy_cancels_the_job_and_leaves_nothing(vertex_life: Life) -> None:
    run = vertex_life.runs["destroy"]
    assert run.ok, run.output
    assert vertex_life.jobs["destroy"] == []
    (last,) = vertex_life.jobs["back"]
    assert f"POST /v1/{last}:cancel" in vertex_life.service.asked
    # A project's services stay on: other stacks of the project use them.
    assert [item for item in vertex_life.left if not item.startswith("gcp:projects/service:")] == []
