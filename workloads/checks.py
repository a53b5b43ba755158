"""Checks of the job and trainer settings against the cluster's settings, before any resource is registered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Network

from infra.config.problems import Problem, find_unused, fix_by_removing, fix_by_setting
from infra.config.settings import StackSettings
from trainer.config import TrainConfig
from workloads.facts import job_nodes
from workloads.settings import ON_CLUSTERS, SERVICES, JobSettings

#: Launchers without elastic jobs, and the reason.
_NOT_ELASTIC = {"trainjob": "Kubeflow Trainer v2 has no elastic jobs yet"}
_IMAGE_REFERENCE = re.compile(r"^[a-z0-9][a-z0-9._:/-]*(:[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})$")
_MAX_PORT = 65_535
#: Keys of the trainer that the cluster sets, and what the user sets instead.
_SET_BY_CLUSTER = {
    "train.run": "job.run",
    "train.device": "gpu",
    "checkpoint.uri": "storage",
    "fault.grace_seconds": "job.grace_seconds",
    "metrics.dir": "storage",
    "metrics.prometheus_port": "addons.monitoring",
    "metrics.prometheus_host": "addons.monitoring",
    "metrics.progress": "python -m workloads logs",
}


def problems(job: JobSettings, trainer: TrainConfig, settings: StackSettings) -> Iterable[Problem]:
    """Yield all problems, in the order in which a user sets the keys."""
    yield from _check_service(job, settings)
    yield from _check_image(job, settings)
    yield from _check_nodes(job, settings)
    yield from _check_processes(job, settings)
    yield from _check_reserved_keys(trainer)
    yield from _check_batch_size(job, trainer, settings)
    yield from _check_dataset(job, settings)
    yield from _check_data_paths(trainer, settings)
    yield from _check_egress(job)


def synthetic_data_notice(job: JobSettings, trainer: TrainConfig) -> str | None:
    """Return the line that a run on synthetic data shows: a new stack trains on it until its data is configured."""
    if trainer.data.source != "synthetic":
        return None
    samples = trainer.train.steps * trainer.train.batch_size if trainer.train.steps else trainer.data.train_samples
    return (
        f"run {job.run} trains on {samples:,} synthetic clicks, a trial. To train on your own data: "
        "workloads/README.md#your-own-data-on-a-cluster-and-the-model-back"
    )


def _check_service(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    """Yield a training service of another cloud, or the keys about pods that a service does not use."""
    if job.launcher not in SERVICES:
        return
    if job.launcher not in settings.services:
        message = "a training service of another cloud than this stack's"
        allowed = " | ".join([*sorted(ON_CLUSTERS), *settings.services])
        yield Problem("job.launcher", message, allowed, fix_by_setting("job.launcher", "pytorchjob"), job.launcher)
        return
    message = f"only for pods, and job.launcher {job.launcher} creates none"
    yield from find_unused(job, JobSettings.OF_CLUSTERS, message, "job.")


def _check_image(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    """Yield a missing image, or one without tag and digest."""
    key = "job.image"
    if job.image is None:
        if not settings.has_registry:
            allowed = "an image that the nodes can pull or have, or registry.repository to push to"
            yield Problem(key, "missing, and the stack has no registry", allowed, fix_by_setting(key, "trainer:dev"))
    elif not _IMAGE_REFERENCE.match(job.image):
        allowed = "name:tag, better the immutable name@sha256:<64 hexadecimal digits>"
        yield Problem(key, "no tag and no digest", allowed, fix_by_setting(key, f"{job.image}:<tag>"), job.image)


def _check_nodes(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    """Yield numbers of nodes that the pool or the launcher does not support."""
    nodes, max_nodes, key = job_nodes(job, settings.gpu.nodes.desired), settings.gpu.nodes.max, "job.min_nodes"
    if nodes > max_nodes:
        message, allowed = "more than the pool's maximum", f"1 to gpu.nodes.max ({max_nodes})"
        yield Problem("job.nodes", message, allowed, fix_by_setting("gpu.nodes.max", nodes), nodes)
    if job.min_nodes and job.min_nodes > nodes:
        message, allowed = f"more than job.nodes ({nodes})", f"1 to job.nodes ({nodes})"
        yield Problem(key, message, allowed, fix_by_setting(key, nodes), job.min_nodes)
    elif job.min_nodes and job.min_nodes < nodes and job.launcher in _NOT_ELASTIC:
        message, allowed = _NOT_ELASTIC[job.launcher], f"job.nodes ({nodes}), or job.launcher pytorchjob"
        yield Problem(key, message, allowed, fix_by_setting("job.launcher", "pytorchjob"), job.min_nodes)


def _check_processes(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    """Yield more GPUs than a node has, or a number of processes although the GPUs determine it."""
    num_gpus, key = settings.gpus_per_node, "job.gpus_per_node"
    if job.gpus_per_node and job.gpus_per_node > num_gpus:
        allowed = f"1 to {num_gpus}" if num_gpus else "unset: this pool has no GPUs"
        fix = fix_by_setting(key, num_gpus) if num_gpus else fix_by_removing(key)
        yield Problem(key, "more than a node has", allowed, fix, job.gpus_per_node)
    if job.processes_per_node and num_gpus:
        key, message = "job.processes_per_node", "the pool has GPUs, and each gets one process"
        yield Problem(key, message, "job.gpus_per_node", fix_by_removing(key), job.processes_per_node)


def _check_reserved_keys(trainer: TrainConfig) -> Iterable[Problem]:
    """Yield keys of the trainer that the cluster would overwrite, so that no setting is silently ignored."""
    for path, owner in _SET_BY_CLUSTER.items():
        section_name, key = path.split(".")
        section = getattr(trainer, section_name)
        if key in section.model_fields_set:
            name = f"trainer.{path}"
            fix = fix_by_removing(name)
            yield Problem(name, "set by the cluster", f"{owner} instead", fix, getattr(section, key))


def _check_batch_size(job: JobSettings, trainer: TrainConfig, settings: StackSettings) -> Iterable[Problem]:
    """Yield a global batch size that the processes cannot share equally, at any allowed number of nodes."""
    if trainer.train.batch_size_is == "per_process":
        return
    per_node = job.gpus_per_node or settings.gpus_per_node or job.processes_per_node or 1
    max_nodes = job_nodes(job, settings.gpu.nodes.desired)
    sizes = {"batch_size": trainer.train.batch_size, "eval_batch_size": trainer.eval_batch_size}
    for nodes in range(job.min_nodes or max_nodes, max_nodes + 1):
        world = nodes * per_node
        for name, size in sizes.items():
            if size % world:
                key, fitting = f"trainer.train.{name}", size - size % world or world
                message = f"{world} processes ({nodes} nodes x {per_node}) cannot share it equally"
                allowed = f"multiples of {world}, for example {fitting}"
                yield Problem(key, message, allowed, fix_by_setting(key, fitting), size)
                return


def _check_dataset(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    """Yield a dataset that is not on the shared storage, or needs no Job because it is already mounted."""
    key, source, mount_path = "job.dataset.source", job.dataset.source, settings.storage.mount_path
    mounted_bucket = source == "bucket" and settings.bucket_folder is not None
    if source is None or not (mounted_bucket or source.startswith("/")):
        return
    if not mounted_bucket and not _is_below(source, mount_path):
        allowed = f"bucket, a URI, or a folder below {mount_path}"
        yield Problem(key, "not on the shared storage", allowed, fix_by_setting(key, "bucket"), source)
    elif not job.dataset.preprocess:
        message = "already on the shared storage, and job.dataset.preprocess is false, so the Job would do nothing"
        yield Problem(key, message, "a URI, or unset", fix_by_removing(key), source)


def _check_data_paths(trainer: TrainConfig, settings: StackSettings) -> Iterable[Problem]:
    """Yield paths of data that do not exist in the pods."""
    mount_path = settings.storage.mount_path
    for name in ("path", "eval_path"):
        path = getattr(trainer.data, name)
        if path and "://" not in path and not _is_below(path, mount_path):
            key, allowed = f"trainer.data.{name}", f"a URI, or a folder below {mount_path}"
            yield Problem(key, "not in the pods", allowed, fix_by_setting(key, f"{settings.work_path}/criteo"), path)


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path is the folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _check_egress(job: JobSettings) -> Iterable[Problem]:
    """Yield egress rules that are not `cidr:port`."""
    example = "10.1.2.3/32:9000"
    for number, entry in enumerate(job.egress):
        if not _is_endpoint(entry):
            key = f"job.egress[{number}]"
            yield Problem(key, "not cidr:port", f"for example {example}", fix_by_setting(key, example), entry)


def _is_endpoint(entry: str) -> bool:
    """Return whether an egress rule is `cidr:port`."""
    cidr, _, port = entry.rpartition(":")
    try:
        IPv4Network(cidr)
    except ValueError:
        return False
    return port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT
