"""What cannot work between the job, the trainer's settings and the cluster; told before any resource is registered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Network

from infra.config.problems import Problem, find_unused, fix_by_removing, fix_by_setting
from infra.config.settings import StackSettings
from trainer.config import TrainConfig
from workloads.facts import job_nodes
from workloads.settings import ON_CLUSTERS, SERVICES, JobSettings

#: Elastic jobs: what each launcher can do with `job.min_nodes`.
_FIXED = {"trainjob": "Kubeflow Trainer v2 has no elastic jobs yet"}
_REFERENCE = re.compile(r"^[a-z0-9][a-z0-9._:/-]*(:[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})$")
#: Keys of the trainer that the cluster decides, and the key that a person sets instead.
_DECIDED = {
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
    """Every mistake; the order is that of the keys a person would set first."""
    yield from _service(job, settings)
    yield from _image(job, settings)
    yield from _size(job, settings)
    yield from _decided(trainer)
    yield from _batch(job, trainer, settings)
    yield from _dataset(job, settings)
    yield from _data_path(trainer, settings)
    yield from _egress(job)


def _service(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    """A service belongs to one cloud, and reads nothing that is about pods."""
    if job.launcher not in SERVICES:
        return
    if job.launcher not in settings.services:
        legal = " | ".join([*sorted(ON_CLUSTERS), *settings.services])
        wrong = "a training service of another cloud than this stack's"
        yield Problem("job.launcher", wrong, legal, fix_by_setting("job.launcher", "pytorchjob"), job.launcher)
        return
    wrong = f"about pods, and job.launcher {job.launcher} makes none"
    yield from find_unused(job, JobSettings.OF_CLUSTERS, wrong, "job.")


def _image(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    if job.image is None:
        if not settings.has_registry:
            legal = "an image that the nodes can pull or have, or registry.repository to push to"
            yield Problem(
                "job.image", "missing, and the stack has no registry", legal, fix_by_setting("job.image", "trainer:dev")
            )
    elif not _REFERENCE.match(job.image):
        legal = "name:tag, better name@sha256:<64 hexadecimal digits>, which nobody can move"
        yield Problem(
            "job.image", "no tag and no digest", legal, fix_by_setting("job.image", f"{job.image}:<tag>"), job.image
        )


def _size(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    nodes = job_nodes(job, settings.gpu.nodes.desired)
    if nodes > settings.gpu.nodes.max:
        legal = f"1 to gpu.nodes.max ({settings.gpu.nodes.max})"
        yield Problem("job.nodes", "more than the pool may have", legal, fix_by_setting("gpu.nodes.max", nodes), nodes)
    if job.min_nodes and job.min_nodes > nodes:
        legal = f"1 to job.nodes ({nodes})"
        yield Problem(
            "job.min_nodes",
            f"more than job.nodes ({nodes})",
            legal,
            fix_by_setting("job.min_nodes", nodes),
            job.min_nodes,
        )
    elif job.min_nodes and job.min_nodes < nodes and job.launcher in _FIXED:
        legal = f"job.nodes ({nodes}), or job.launcher pytorchjob"
        yield Problem(
            "job.min_nodes", _FIXED[job.launcher], legal, fix_by_setting("job.launcher", "pytorchjob"), job.min_nodes
        )
    if job.gpus_per_node and job.gpus_per_node > settings.gpus_per_node:
        legal = f"1 to {settings.gpus_per_node}" if settings.gpus_per_node else "unset: this pool has no GPUs"
        how = (
            fix_by_setting("job.gpus_per_node", settings.gpus_per_node)
            if settings.gpus_per_node
            else fix_by_removing("job.gpus_per_node")
        )
        yield Problem("job.gpus_per_node", "more than a node has", legal, how, job.gpus_per_node)
    if job.processes_per_node and settings.gpus_per_node:
        wrong = "the pool has GPUs, and each gets one process"
        how = fix_by_removing("job.processes_per_node")
        yield Problem("job.processes_per_node", wrong, "job.gpus_per_node", how, job.processes_per_node)


def _decided(trainer: TrainConfig) -> Iterable[Problem]:
    """Keys of the trainer that would be overwritten; nothing a person sets is dropped in silence."""
    for path, owner in _DECIDED.items():
        section, key = path.split(".")
        given = getattr(trainer, section)
        if key in given.model_fields_set:
            name = f"trainer.{path}"
            yield Problem(
                name, "decided by the cluster", f"{owner} instead", fix_by_removing(name), getattr(given, key)
            )


def _batch(job: JobSettings, trainer: TrainConfig, settings: StackSettings) -> Iterable[Problem]:
    if trainer.train.batch_size_is == "per_process":
        return
    per_node = job.gpus_per_node or settings.gpus_per_node or job.processes_per_node or 1
    most = job_nodes(job, settings.gpu.nodes.desired)
    for nodes in range(job.min_nodes or most, most + 1):
        world, size = nodes * per_node, trainer.train.batch_size
        if size % world:
            wrong = f"{world} processes ({nodes} nodes x {per_node}) cannot share it equally"
            fitting = size - size % world or world
            legal = f"multiples of {world}, for example {fitting}"
            yield Problem(
                "trainer.train.batch_size", wrong, legal, fix_by_setting("trainer.train.batch_size", fitting), size
            )
            return
        if trainer.eval_batch_size % world:
            wrong, fitting = (
                f"{world} processes cannot share it equally",
                max(world, trainer.eval_batch_size // world * world),
            )
            key = "trainer.train.eval_batch_size"
            yield Problem(key, wrong, f"multiples of {world}", fix_by_setting(key, fitting), trainer.eval_batch_size)
            return


def _dataset(job: JobSettings, settings: StackSettings) -> Iterable[Problem]:
    source = job.dataset.source
    there = source == "bucket" and settings.bucket_folder is not None
    if source is None or not (there or source.startswith("/")):
        return
    if not there and not _inside(source, settings.storage.mount_path):
        legal = f"bucket, a URI, or a folder below {settings.storage.mount_path}"
        yield Problem(
            "job.dataset.source",
            "not on the shared storage",
            legal,
            fix_by_setting("job.dataset.source", "bucket"),
            source,
        )
    elif not job.dataset.preprocess:
        wrong = "the data is on the shared storage already, and job.dataset.preprocess is false: nothing is left to do"
        yield Problem("job.dataset.source", wrong, "a URI, or unset", fix_by_removing("job.dataset.source"), source)


def _data_path(trainer: TrainConfig, settings: StackSettings) -> Iterable[Problem]:
    for key in ("path", "eval_path"):
        path = getattr(trainer.data, key)
        if path and "://" not in path and not _inside(path, settings.storage.mount_path):
            name = f"trainer.data.{key}"
            legal = f"a URI, or a folder below {settings.storage.mount_path}"
            yield Problem(name, "not in the pods", legal, fix_by_setting(name, f"{settings.work_path}/criteo"), path)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _egress(job: JobSettings) -> Iterable[Problem]:
    for number, entry in enumerate(job.egress):
        cidr, _, port = entry.rpartition(":")
        try:
            IPv4Network(cidr)
            legal = port.isdigit() and 0 < int(port) < 65536  # the largest port there is
        except ValueError:
            legal = False
        if not legal:
            key = f"job.egress[{number}]"
            yield Problem(
                key, "not cidr:port", "for example 10.1.2.3/32:9000", fix_by_setting(key, "10.1.2.3/32:9000"), entry
            )
