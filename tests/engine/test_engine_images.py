"""When `up` builds and pushes the trainer image, with the real engine: checkouts, changed sources, immutable tags."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_clouds
import pytest
import simulated_registry
from engine_lifecycle import open_project
from engine_runs import ROOT, Project, Run
from engine_world import Refused, World
from simulated_registry import IMAGE, REPOSITORY

#: A program with the registry and the image of a stack on AWS, and nothing else.
_PROGRAM = """
from types import SimpleNamespace

import pulumi

from infra.clouds.aws.registry import ImageRegistry
from workloads import image

registry = ImageRegistry("registry", SimpleNamespace(labels={}))
cluster = SimpleNamespace(
    gpu=SimpleNamespace(gpus_per_node=8), fabric=SimpleNamespace(image_target="aws"), registry=registry.facts
)
pulumi.export("image", image.trainer_image("image", cluster, SimpleNamespace(image=None, base_image=None)))
"""


class Checkouts:
    """One stack of several checkouts of the repository: same backend, same cloud, other folders."""

    def __init__(self, world: World, project: Project, folder: Path) -> None:
        self.world, self.project, self._folder, self._number = world, project, folder, 0
        project.replace_program(_PROGRAM)
        self._template = project.work

    def clone(self, umask: int = 0o022) -> Path:
        """Make another checkout and run the next commands in it; return its folder."""
        self._number += 1
        folder = self._folder / f"checkout-{self._number}"
        shutil.copytree(self._template, folder, symlinks=True)
        for name in ("trainer", ".cache"):
            for link in (folder / name, folder / name / "trainer-image"):
                if link.is_symlink():
                    link.unlink()
        shutil.copytree(ROOT / "trainer", folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "trainer").rglob("*"):
            path.chmod((0o777 if path.is_dir() or os.access(path, os.X_OK) else 0o666) & ~umask)
        self.project.work = simulated_registry.builder(self.world).project = folder
        return folder

    def up(self) -> Run:
        """Run `up`, which must succeed."""
        run = self.project.run("up")
        assert run.ok, run.output
        return run

    def tag(self) -> str:
        """Return the tag of the stack's image."""
        (image,) = self.world.of_type(IMAGE)
        (tag,) = image.inputs["tags"]
        return str(tag)


@pytest.fixture
def checkouts(tmp_path: Path, kubeconfig: Path, lifecycles: object) -> Iterator[Checkouts]:
    """Return the checkouts of a new stack."""
    world, server, project = open_project(tmp_path / "stack", "aws", kubeconfig)
    yield Checkouts(world, project, tmp_path)
    server.kill()


def test_only_changed_sources_build_another_image(checkouts: Checkouts) -> None:
    checkouts.clone()
    assert [step.type for step in checkouts.up().of_op("create") if step.type == IMAGE] == [IMAGE]
    first = checkouts.tag()
    folder = checkouts.clone(umask=0o002)
    assert checkouts.up().changes == [], "a build under the same tag, and a new digest, would replace the running job"
    (folder / "trainer/README.md").write_text("Other words.")
    (folder / "trainer/.main.py.swp").write_text("An editor is open.")
    assert checkouts.up().changes == []
    (folder / "trainer/main.py").write_text("# other code")
    assert [step.op for step in checkouts.up().changes] == ["update"]
    assert checkouts.tag() != first
    checkouts.clone()
    assert [step.op for step in checkouts.up().changes] == ["update"], "a return to older sources must build them again"
    assert checkouts.tag() == first


@pytest.fixture
def world() -> World:
    """Return an empty world whose project has a context."""
    return World(engine_clouds.rules_of)


@pytest.fixture
def push(world: World, tmp_path: Path) -> Callable[..., object]:
    """Return a function that builds and pushes an image with a content and credentials."""
    (tmp_path / "context/trainer").mkdir(parents=True)
    simulated_registry.builder(world).project = tmp_path

    def run(repository: str, tag: str, content: str, password: str | None) -> object:
        (tmp_path / "context/trainer/Dockerfile").write_text(content)
        host = repository.partition("/")[0]
        login = [{"address": host, "username": "user", "password": password}] if password else None
        inputs = {
            "context": {"location": "context"},
            "dockerfile": {"location": "context/trainer/Dockerfile"},
            "buildArgs": {},
            "target": "aws",
            "tags": [f"{repository}:{tag}"],
            "registries": login,
        }
        return world.create(IMAGE, f"image-{tag}-{content}", inputs)

    return run


def test_an_immutable_tag_refuses_a_second_build(world: World, push: Callable[..., object]) -> None:
    repository = world.create(REPOSITORY, "trainer", {"imageTagMutability": "IMMUTABLE"})
    url = repository.computed["repositoryUrl"]
    push(url, "one", "1", "ecr-password-1")
    with pytest.raises(Refused, match="already exists and is immutable"):
        push(url, "one", "2", "ecr-password-1")
    world.update(REPOSITORY, repository.id, {"imageTagMutability": "MUTABLE"})
    push(url, "one", "3", "ecr-password-1")


@pytest.mark.parametrize(
    ("repository", "password"),
    [
        ("000000000000.dkr.ecr.us-west-2.amazonaws.com/trainer", "ecr-password-1"),
        ("us-central1-docker.pkg.dev/project/stack/trainer", "ya29.token-1"),
        (f"{simulated_registry.azure_host()}/trainer", "acr-refresh-1"),
    ],
    ids=["ecr", "artifact-registry", "acr"],  # the address has a free port, which differs between test processes
)
def test_a_push_needs_the_token_of_its_registry(repository: str, password: str, push: Callable[..., object]) -> None:
    for wrong in (None, "another-token"):
        with pytest.raises(Refused, match="401 Unauthorized"):
            push(repository, "one", "1", wrong)
    push(repository, "one", "1", password)
