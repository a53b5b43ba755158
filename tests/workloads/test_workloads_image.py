"""The trainer's image: built for the cluster's registry and fabric, or given by `job.image`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pulumi.runtime.rpc import _special_secret_sig, _special_sig_key
from workload_facts import CLOUDS, ROOT, record_facts

from provider_mocks.recording import Recording, run_stack  # isort: skip

from workloads import image

BUILD = "docker-build:index:Image"
DOCKERFILE = (ROOT / image.DOCKERFILE).read_text()


def build_image(stack: str, overrides: dict[str, Any] | None = None) -> tuple[Recording, dict[str, Any]]:
    """Run a stack's program; return the recording and the inputs of its image."""
    recording = run_stack(stack, overrides)
    assert recording.error is None
    return recording, dict(recording.one(BUILD).inputs)


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_image_is_built_for_the_clouds_fabric_and_pushed_to_its_registry(cloud: str) -> None:
    recording, inputs = build_image(cloud)
    assert inputs["target"] == record_facts(cloud).fabric.image_target
    assert re.search(rf"^FROM \S+ AS {inputs['target']}$", DOCKERFILE, re.MULTILINE), (
        "the Dockerfile has no such target"
    )
    assert inputs["push"] is True
    assert inputs["buildOnPreview"] is False, "a preview changes nothing, and building takes minutes"
    (tag,) = inputs["tags"]
    assert tag.startswith(f"{recording.exports['registry']}:")
    assert inputs["buildArgs"] == {"ACCELERATOR": "gpu"}
    assert inputs["platforms"] == ["linux/amd64"]


def test_the_registrys_token_reaches_the_engine_as_a_secret() -> None:
    """The engine encrypts values with this signature in the state and hides them on the screen."""
    _, inputs = build_image("aws")
    assert inputs["registries"][_special_sig_key] == _special_secret_sig
    (login,) = inputs["registries"]["value"]
    assert login["username"] == "AWS"


def test_a_registry_without_a_password_uses_dockers_own_login() -> None:
    """Azure's has none: `az acr login`, which the stack's outputs name, stores a token for Docker."""
    _, inputs = build_image("azure")
    assert "registries" not in inputs
    assert any("az acr login" in line for line in run_stack("azure").exports["next_steps"])


def test_a_given_image_is_not_built() -> None:
    given = f"registry.example/mine@sha256:{'1' * 64}"
    recording = run_stack("aws", {"job.image": given})
    assert recording.error is None
    assert recording.of_type(BUILD) == []
    assert recording.exports["job"]["image"] == given


def test_the_base_image_is_a_build_argument() -> None:
    _, inputs = build_image("aws", {"job.base_image": "ubuntu@sha256:2"})
    assert inputs["buildArgs"]["BASE_IMAGE"] == "ubuntu@sha256:2"
    for argument in inputs["buildArgs"]:
        assert re.search(rf"^ARG {argument}\b", DOCKERFILE, re.MULTILINE), f"the Dockerfile has no ARG {argument}"


def test_changed_content_gets_another_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trainer", "trainer/__pycache__"):
        (tmp_path / name).mkdir()
    for name in ("LICENSE", "trainer/a.py"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(image, "ROOT", tmp_path)
    first = image.content_hash("default", [])
    (tmp_path / "trainer/__pycache__/a.pyc").write_text("compiled")
    (tmp_path / "trainer/README.md").write_text("words")
    assert image.content_hash("default", []) == first, "files outside the image do not change its tag"
    assert image.content_hash("aws", []) != first
    assert image.content_hash("default", [("ACCELERATOR", "cpu")]) != first
    (tmp_path / "trainer/a.py").write_text("2")
    assert image.content_hash("default", []) != first


def test_the_build_context_contains_the_files_that_the_tag_covers() -> None:
    """The tag covers the files that .dockerignore lets into the context; the Dockerfile copies no others."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed == {"LICENSE", "trainer"}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_topology_file_of_a_fabric_is_in_its_image(cloud: str) -> None:
    fabric = record_facts(cloud).fabric
    path = fabric.env.get("NCCL_TOPO_FILE")
    if path is None:
        assert fabric.name != "infiniband", "without it NCCL guesses which network card is near which GPU"
        return
    stage = DOCKERFILE.partition(f" AS {fabric.image_target}\n")[2].partition("\nFROM ")[0]
    assert path in stage
