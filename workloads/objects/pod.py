"""The one pod template that all launchers share, and the smaller one of the helpers beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.contract import Mount, Sidecar
from workloads.facts import COMPONENT_LABEL, METRICS_PORT, Facts
from workloads.objects.names import Manifest

#: The user of the image (trainer/Dockerfile). Its group is 0, as on clusters that pick a user of their own.
USER = 10001
CONFIG_DIR = "/etc/trainer"
CONFIG_FILE = "config.json"
#: Pods with this label keep each other off their nodes.
_ALONE = {"torchrec-cloud/owns-node": "true"}
_SHARED_MEMORY = {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108


def training_pod(
    facts: Facts,
    *,
    labels: Mapping[str, str],
    container: str,
    args: Sequence[str],
    config_map: str | None = None,
    subdomain: str | None = None,
) -> Manifest:
    """The template of a pod that owns a node: GPUs, fabric devices, shared memory, data, identity and settings.

    `labels` find the pods of one job, `container` is the name that the launcher's operator looks for, `args` what the
    image's entry point gets, `config_map` holds the trainer's settings, `subdomain` is the headless service that gives
    the pods names.
    """
    volumes = _scratch(facts.pool.shared_memory_gib) + _fabric_volumes(facts)
    mounts = [*_scratch_mounts(), _SHARED_MEMORY, *map(_mount, facts.fabric.mounts)]
    volumes.append(_claim(facts))
    mounts += _storage_mounts(facts)
    if config_map:
        volumes.append({"name": "config", "configMap": {"name": config_map}})
        mounts.append({"name": "config", "mountPath": CONFIG_DIR, "readOnly": True})
    main = {
        "name": container,
        "image": facts.image,
        "imagePullPolicy": "IfNotPresent",
        "args": list(args),
        "env": environment(facts, facts.fabric.env, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, facts.job.env),
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}],
        "resources": _resources(facts),
        "securityContext": container_security(facts.fabric.capabilities),
        # The last lines of the log go where `kubectl describe` and `python -m workloads status` find them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    } | _secret_env(facts)
    spec: Manifest = _pod_spec(facts, [main], volumes) | {
        "terminationGracePeriodSeconds": facts.job.grace_seconds,
        "affinity": _affinity(facts),
        "nodeSelector": dict(facts.pool.node_selector),
        "tolerations": [item.manifest for item in facts.pool.tolerations],
    }
    if facts.fabric.sidecars:
        spec["initContainers"] = [_sidecar(item) for item in facts.fabric.sidecars]
    if subdomain:
        spec["subdomain"] = subdomain
    return {"metadata": _metadata(facts, {**labels, **_ALONE}, facts.fabric.pod_annotations), "spec": spec}


def helper_pod(
    facts: Facts,
    *,
    component: str,
    containers: Sequence[Mapping[str, Any]],
    first: Sequence[Mapping[str, Any]] = (),
    read_only: bool = False,
) -> Manifest:
    """The template of a pod without GPUs on any node: the same user, identity, storage and restrictions.

    Each container brings name, args and resources; `first` run one after the other before them.
    """
    mounts = [*_scratch_mounts(), *_storage_mounts(facts, writable=not read_only)]

    def complete(own: Mapping[str, Any]) -> Manifest:
        shared = {
            "image": facts.image,
            "imagePullPolicy": "IfNotPresent",
            "env": environment(facts),
            "securityContext": container_security(()),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }
        return shared | _secret_env(facts) | dict(own)

    spec = _pod_spec(facts, [complete(item) for item in containers], [*_scratch(None), _claim(facts)])
    if first:
        spec["initContainers"] = [complete(item) for item in first]
    return {"metadata": _metadata(facts, facts.common_labels | {COMPONENT_LABEL: component}, {}), "spec": spec}


def environment(facts: Facts, *layers: Mapping[str, str]) -> list[dict[str, str]]:
    """A container's `env`: the identity's variables, then each layer over those before it."""
    merged = dict(facts.identity_env)
    for layer in layers:
        merged |= layer
    return [{"name": name, "value": value} for name, value in sorted(merged.items())]


def container_security(capabilities: Sequence[str]) -> Manifest:
    """Level `restricted` of the Pod Security Standards, and a root file system that nobody writes to."""
    added = {"add": list(capabilities)} if capabilities else {}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **added},
        "readOnlyRootFilesystem": True,
    }


def _pod_spec(facts: Facts, containers: Sequence[Manifest], volumes: Sequence[Manifest]) -> Manifest:
    return {
        # A cloud's identity comes by tokens of its own; the API server's is of no use to a trainer.
        "automountServiceAccountToken": False,
        "containers": list(containers),
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": 0,
            "fsGroup": USER,
            # Changing the group of every file of a data set at each start takes hours.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "serviceAccountName": facts.service_account,
        "volumes": list(volumes),
    }


def _metadata(facts: Facts, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Manifest:
    metadata: Manifest = {"labels": {**facts.pod_labels, **labels}}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return metadata


def _resources(facts: Facts) -> Manifest:
    """A whole node's devices, fewer GPUs if the job asks for fewer; CPU is requested and never limited."""
    limits = dict(facts.pool.resource_limits)
    if facts.gpus_per_node:
        limits["nvidia.com/gpu"] = str(facts.gpus_per_node)
    if facts.job.memory_gib:
        limits["memory"] = f"{round(facts.job.memory_gib * 1024)}Mi"
    cpus = facts.job.cpus or (None if facts.gpus_per_node else facts.processes_per_node)
    requests = {"requests": {"cpu": f"{round(cpus * 1000)}m"}} if cpus else {}
    return {"limits": limits, **requests} if limits else requests


def _affinity(facts: Facts) -> Manifest:
    """No two training pods on one node: a rule where nodes have GPUs, a wish where a laptop's one node must do."""
    term = {"labelSelector": {"matchLabels": dict(_ALONE)}, "topologyKey": "kubernetes.io/hostname"}
    if facts.gpus_per_node:
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    wish = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}


def _scratch(shared_memory_gib: int | None) -> list[Manifest]:
    """Places to write beside a read-only root file system; shared memory counts as the pod's memory."""
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}, {"name": "work", "emptyDir": {}}]
    if shared_memory_gib:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_memory_gib}Gi"}})
    return volumes


def _scratch_mounts() -> list[Manifest]:
    return [{"name": "tmp", "mountPath": "/tmp"}, {"name": "work", "mountPath": "/work"}]  # noqa: S108


def _claim(facts: Facts) -> Manifest:
    return {"name": "data", "persistentVolumeClaim": {"claimName": facts.storage.claim_name}}


def _storage_mounts(facts: Facts, *, writable: bool = True) -> list[Manifest]:
    """The shared storage read-only, and inside it the one folder for logs and prepared data that can be written."""
    storage = facts.storage
    mounts: list[Manifest] = [{"name": "data", "mountPath": storage.mount_path, "readOnly": True}]
    if writable:
        mounts.append({"name": "data", "mountPath": storage.work_path, "subPath": storage.work_folder})
    return mounts


def _fabric_volumes(facts: Facts) -> list[Manifest]:
    """One volume for each name: the trainer and a sidecar that mount the same name share it."""
    found = [*facts.fabric.mounts, *(mount for item in facts.fabric.sidecars for mount in item.mounts)]
    volumes: dict[str, Manifest] = {}
    for mount in found:
        source: Manifest = (
            {"hostPath": {"path": mount.host_path}} if mount.host_path else {"emptyDir": {"medium": "Memory"}}
        )
        known = volumes.setdefault(mount.name, {"name": mount.name, **source})
        assert known == {"name": mount.name, **source}, f"two sources for the volume {mount.name}"
    return list(volumes.values())


def _mount(mount: Mount) -> Manifest:
    return {"name": mount.name, "mountPath": mount.mount_path, "readOnly": mount.read_only}


def _sidecar(sidecar: Sidecar) -> Manifest:
    """An init container that goes on running: it is there before the trainer and ends with it.

    Sidecars change the host's network settings, which only root may; nothing beyond the named capabilities is given.
    """
    return {
        "name": sidecar.name,
        "image": sidecar.image,
        "restartPolicy": "Always",
        "command": list(sidecar.command),
        "env": [{"name": name, "value": value} for name, value in sorted(sidecar.env.items())],
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "privileged": sidecar.privileged,
            "capabilities": {"drop": ["ALL"], "add": list(sidecar.capabilities)},
        },
        "volumeMounts": [_mount(mount) for mount in sidecar.mounts],
    }


def _secret_env(facts: Facts) -> Manifest:
    return {"envFrom": [{"secretRef": {"name": facts.secret_name}}]} if facts.secret_name else {}
