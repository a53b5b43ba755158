"""The pod template that all launchers share, and the smaller template of helpers without GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.contract import Mount, Sidecar
from workloads.facts import COMPONENT_LABEL, METRICS_PORT, Facts
from workloads.objects.manifest import Manifest

#: The user of the image (trainer/Dockerfile). Its group is 0, as on clusters that assign a user ID.
USER = 10001
CONFIG_DIR = "/etc/trainer"
CONFIG_FILE = "config.json"
#: Pods with this label do not share a node.
_OWNS_NODE = {"torchrec-cloud/owns-node": "true"}
#: The cluster autoscaler must not move the pod to save a node (cluster-autoscaler FAQ); drains ignore the annotation.
_KEEPS_NODE = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
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
    """Return the template of a pod that owns a node: GPUs, fabric devices, shared memory, data, identity, settings.

    `labels` select the pods of one job. `container` is the name that the launcher's operator expects. `args` are the
    arguments of the image's entry point. `config_map` holds the trainer's settings. `subdomain` is the headless service
    that gives the pods names.
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
        # `kubectl describe` and `python -m workloads status` then show the last lines of the log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    } | _secret_env(facts)
    spec: Manifest = _pod_spec(facts, [main], volumes, as_root=facts.fabric.as_root) | {
        "terminationGracePeriodSeconds": facts.job.grace_seconds,
        "affinity": _affinity(facts),
        "nodeSelector": dict(facts.pool.node_selector),
        "tolerations": [item.manifest for item in facts.pool.tolerations],
    }
    if facts.fabric.sidecars:
        spec["initContainers"] = [_sidecar(item) for item in facts.fabric.sidecars]
    if subdomain:
        spec["subdomain"] = subdomain
    annotations = _KEEPS_NODE | dict(facts.fabric.pod_annotations)
    return {"metadata": _metadata(facts, {**labels, **_OWNS_NODE}, annotations), "spec": spec}


def helper_pod(
    facts: Facts,
    *,
    component: str,
    containers: Sequence[Mapping[str, Any]],
    first: Sequence[Mapping[str, Any]] = (),
    read_only: bool = False,
) -> Manifest:
    """Return the template of a pod without GPUs, with the same user, identity, storage and restrictions.

    Each container needs a name, args and resources. The containers in `first` run before them, one by one.
    """
    mounts = [*_scratch_mounts(), *_storage_mounts(facts, writable=not read_only)]

    def complete(own: Mapping[str, Any]) -> Manifest:
        """Return a container with the fields that all share."""
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
    """Return a container's `env`: the identity's variables, overridden by each layer in turn."""
    merged = dict(facts.identity_env)
    for layer in layers:
        merged |= layer
    return [{"name": name, "value": value} for name, value in sorted(merged.items())]


def container_security(capabilities: Sequence[str]) -> Manifest:
    """Return level `restricted` of the Pod Security Standards, plus capabilities, with a read-only root file system."""
    added = {"add": list(capabilities)} if capabilities else {}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **added},
        "readOnlyRootFilesystem": True,
    }


def _pod_spec(
    facts: Facts, containers: Sequence[Manifest], volumes: Sequence[Manifest], *, as_root: bool = False
) -> Manifest:
    """Return what training pods and helpers have in common.

    Root is for fabrics that need a capability. Its group is the image's, so both users write to the shared folders.
    """
    return {
        # The cloud's identity uses its own tokens, and the trainer does not use the Kubernetes API.
        "automountServiceAccountToken": False,
        "containers": list(containers),
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": not as_root,
            "runAsUser": 0 if as_root else USER,
            "runAsGroup": 0,
            "fsGroup": USER,
            # Changing the group of every file of a dataset at each start takes hours.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "serviceAccountName": facts.service_account,
        "volumes": list(volumes),
    }


def _metadata(facts: Facts, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Manifest:
    """Return the metadata of a pod template."""
    metadata: Manifest = {"labels": {**facts.pod_labels, **labels}}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return metadata


def _resources(facts: Facts) -> Manifest:
    """Return all devices of a node, or fewer GPUs if the job requests fewer; CPUs are requested and never limited."""
    limits = dict(facts.pool.resource_limits)
    if facts.gpus_per_node:
        limits["nvidia.com/gpu"] = str(facts.gpus_per_node)
    if facts.job.memory_gib:
        limits["memory"] = f"{round(facts.job.memory_gib * 1024)}Mi"
    cpus = facts.job.cpus or (None if facts.gpus_per_node else facts.processes_per_node)
    requests = {"requests": {"cpu": f"{round(cpus * 1000)}m"}} if cpus else {}
    return {"limits": limits, **requests} if limits else requests


def _affinity(facts: Facts) -> Manifest:
    """Return the rule of one training pod per node: required with GPUs, else preferred, as a laptop has one node."""
    term = {"labelSelector": {"matchLabels": dict(_OWNS_NODE)}, "topologyKey": "kubernetes.io/hostname"}
    if facts.gpus_per_node:
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def _scratch(shared_memory_gib: int | None) -> list[Manifest]:
    """Return the writable volumes of a read-only root file system; shared memory counts as the pod's memory."""
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}, {"name": "work", "emptyDir": {}}]
    if shared_memory_gib:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_memory_gib}Gi"}})
    return volumes


def _scratch_mounts() -> list[Manifest]:
    """Return the mounts of the writable volumes."""
    return [{"name": "tmp", "mountPath": "/tmp"}, {"name": "work", "mountPath": "/work"}]  # noqa: S108


def _claim(facts: Facts) -> Manifest:
    """Return the volume of the shared storage."""
    return {"name": "data", "persistentVolumeClaim": {"claimName": facts.storage.claim_name}}


def _storage_mounts(facts: Facts, *, writable: bool = True) -> list[Manifest]:
    """Return the read-only mount of the shared storage, and its writable folder for logs and preprocessed data."""
    storage = facts.storage
    mounts: list[Manifest] = [{"name": "data", "mountPath": storage.mount_path, "readOnly": True}]
    if writable:
        mounts.append({"name": "data", "mountPath": storage.work_path, "subPath": storage.work_folder})
    return mounts


def _fabric_volumes(facts: Facts) -> list[Manifest]:
    """Return one volume for each name; the trainer and a sidecar share a volume of the same name."""
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
    """Return a mount of the fabric."""
    return {"name": mount.name, "mountPath": mount.mount_path, "readOnly": mount.read_only}


def _sidecar(sidecar: Sidecar) -> Manifest:
    """Return an init container that keeps running: it starts before the trainer and ends with it.

    A sidecar changes the host's network settings as root, with the named capabilities only.
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
    """Return the reference to the secret of the identity's variables, empty without one."""
    return {"envFrom": [{"secretRef": {"name": facts.secret_name}}]} if facts.secret_name else {}
