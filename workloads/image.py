"""The trainer's image: built from this repository and pushed, or the image that `job.image` names."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pulumi
import pulumi_docker_build as docker_build

from infra.contract import Cluster, TrainingService
from workloads.errors import UserError
from workloads.settings import JobSettings

#: The repository as the program sees it: a symbolic link to it stays as given.
ROOT = Path(__file__).absolute().parents[1]
DOCKERFILE = "trainer/Dockerfile"
#: Where the build's files are copied to, relative to the project's folder.
CONTEXTS = Path(".cache/trainer-image")
#: Names of files that do not go into the image; .dockerignore excludes the same ones from builds by hand.
IGNORED = ("__pycache__", ".*", "*~", "*.md", "*.pyc", "*.svg")


def trainer_image(
    name: str, cluster: Cluster | TrainingService, job: JobSettings, opts: pulumi.ResourceOptions | None = None
) -> pulumi.Input[str]:
    """Return the image reference for the pods; `up` builds it with BuildKit on this machine, `preview` does not."""
    if job.image:
        return job.image
    accelerator = "gpu" if cluster.gpu.gpus_per_node else "cpu"
    build_args = {"ACCELERATOR": accelerator} | ({"BASE_IMAGE": job.base_image} if job.base_image else {})
    target = cluster.fabric.image_target
    # The tag names the content, so that a stack's image shows in the registry which sources it has.
    tag = pulumi.Output.concat(_repository(cluster), ":", content_hash(target, sorted(build_args.items())))
    # The provider compares this path with the one in the state, and resolves it in the project's folder.
    context = stage_context(Path(pulumi.get_root_directory() or ROOT))
    image = docker_build.Image(
        name,
        context=docker_build.BuildContextArgs(location=context.as_posix()),
        dockerfile=docker_build.DockerfileArgs(location=(context / DOCKERFILE).as_posix()),
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
    if registry.login is None or registry.server is None:
        return None
    login = registry.login()
    return [docker_build.RegistryArgs(address=registry.server, username=login.username, password=login.password)]


def content_hash(target: str, build_args: Sequence[tuple[str, str]]) -> str:
    """Return twelve hexadecimal digits of the hash of the sources, the target and the build's arguments."""
    return hashlib.sha256(repr((target, [*build_args], _sources_hash(ROOT))).encode()).hexdigest()[:12]


def stage_context(project: Path) -> Path:
    """Copy the sources into a folder of the project and return its path relative to the project.

    The provider rebuilds an image if a path, a name, a mode or the content of a file in its context changes. In this
    folder they follow from the tag's content: other checkouts, umasks and files outside the image make no difference.
    """
    expected = _sources_hash(ROOT)
    location = CONTEXTS / expected[:12]
    folder = project / location
    if folder.exists() and _sources_hash(folder) != expected:
        shutil.rmtree(folder)  # edited since it was staged
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            copy = Path(temporary) / "context"
            _copy_sources(copy)
            if _sources_hash(copy) != expected:
                raise UserError("the trainer's sources changed while they were read. Fix: run the command again")
            try:
                copy.rename(folder)
            except OSError:
                # Another `up` of this project was faster; its copy has the same content.
                if not folder.exists():
                    raise
    return location


def _copy_sources(copy: Path) -> None:
    """Copy the sources into a new folder."""
    for path in _sources(ROOT):
        _copy(path, copy / path.relative_to(ROOT))
    for inside in [copy, *(one for one in copy.rglob("*") if one.is_dir())]:
        inside.chmod(0o755)  # under a strict umask the image's user could not read them


def _copy(path: Path, target: Path) -> None:
    """Copy a file with one of the two modes that Git knows."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    target.chmod(0o755 if _executable(path) else 0o644)


def _sources_hash(root: Path) -> str:
    """Return the hash of the names, modes and content of the sources in a folder."""
    digest = hashlib.sha256()
    for path in _sources(root):
        digest.update(f"{path.relative_to(root).as_posix()}\0{_executable(path)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _executable(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o100)


def _sources(root: Path) -> Iterator[Path]:
    """Yield the files of the build's context, in a fixed order; raise UserError for a link, which may lead outside."""
    yield root / ".dockerignore"
    yield root / "LICENSE"
    for path in sorted((root / "trainer").rglob("*")):
        parts = path.relative_to(root).parts
        if any(fnmatch(part, pattern) for part in parts for pattern in IGNORED):
            continue
        if path.is_symlink():
            raise UserError(f"a symbolic link in the image's sources: got {path}; allowed: files. Fix: copy its target")
        if path.is_file():
            yield path
