"""The trainer's image: built from this repository and pushed, or the image that `job.image` names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pulumi
import pulumi_docker_build as docker_build

from infra.contract import Cluster, TrainingService
from workloads.settings import JobSettings

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = "trainer/Dockerfile"


def trainer_image(
    name: str, cluster: Cluster | TrainingService, job: JobSettings, opts: pulumi.ResourceOptions | None = None
) -> pulumi.Input[str]:
    """Return the image reference for the pods; `up` builds it with BuildKit on this machine, `preview` does not."""
    if job.image:
        return job.image
    accelerator = "gpu" if cluster.gpu.gpus_per_node else "cpu"
    build_args = {"ACCELERATOR": accelerator} | ({"BASE_IMAGE": job.base_image} if job.base_image else {})
    target = cluster.fabric.image_target
    # Registries may refuse to overwrite a tag, so changed content gets a new tag.
    tag = pulumi.Output.concat(_repository(cluster), ":", content_hash(target, sorted(build_args.items())))
    image = docker_build.Image(
        name,
        context=docker_build.BuildContextArgs(location=str(ROOT)),
        dockerfile=docker_build.DockerfileArgs(location=str(ROOT / DOCKERFILE)),
        build_args=build_args,
        target=target,
        platforms=[docker_build.Platform.LINUX_AMD64],
        tags=[tag],
        push=True,
        build_on_preview=False,
        registries=_credentials(cluster),
        opts=opts,
    )
    return image.ref


def _repository(cluster: Cluster | TrainingService) -> pulumi.Input[str]:
    """Return the repository of the stack's registry."""
    repository = cluster.registry.repository
    assert repository is not None, "the settings' checks require a registry or job.image"
    return repository


def _credentials(cluster: Cluster | TrainingService) -> list[docker_build.RegistryArgs] | None:
    """Return the registry's credentials; None to use those of `docker login` or a credential helper."""
    registry = cluster.registry
    if registry.password is None or registry.server is None:
        return None
    return [docker_build.RegistryArgs(address=registry.server, username=registry.username, password=registry.password)]


def content_hash(target: str, build_args: list[tuple[str, str]]) -> str:
    """Return twelve hexadecimal digits of the hash of all files that go into the image from this repository."""
    digest = hashlib.sha256(repr((target, build_args)).encode())
    for path in _sources():
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _sources() -> Iterator[Path]:
    """Yield the files that the Dockerfile copies, in a fixed order."""
    yield ROOT / "LICENSE"
    for path in sorted((ROOT / "trainer").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md":
            yield path
