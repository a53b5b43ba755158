"""A simulated Kubernetes API server: served kinds, objects in use, immutable fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import simulated_access
import simulated_aks
from engine_values import at
from engine_world import Inputs, Refused, Resource, Rules, World

_CONTROL_PLANES = (
    "aws:eks/cluster:Cluster",
    "azure-native:containerservice:ManagedCluster",
    "gcp:container/cluster:Cluster",
)
#: Nodes for operators; the first pool of AKS is part of the cluster resource.
_NODES = (
    "aws:eks/nodeGroup:NodeGroup",
    "azure-native:containerservice:ManagedCluster",
    "gcp:container/nodePool:NodePool",
)
_RELEASE, _CRD = "kubernetes:helm.sh/v3:Release", "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition"
_CLAIM, _VOLUME = "kubernetes:core/v1:PersistentVolumeClaim", "kubernetes:core/v1:PersistentVolume"
#: API groups without any operator.
_BUILT_IN = (
    "core",
    "apps",
    "batch",
    "policy",
    "networking.k8s.io",
    "apiextensions.k8s.io",
    "storage.k8s.io",
    "helm.sh",
)
#: API groups that GKE serves.
_MANAGED = ("networking.gke.io",)
#: API groups of the CRDs that each chart installs, by release name.
_CHART_GROUPS = {
    "kube-prometheus-stack": ("monitoring.coreos.com",),
    "network-operator": ("mellanox.com", "nfd.k8s-sigs.io"),
    "gpu-operator": ("nvidia.com", "nfd.k8s-sigs.io"),
    "kubeflow-trainer": ("trainer.kubeflow.org", "jobset.x-k8s.io"),
    "kueue": ("kueue.x-k8s.io",),
}
#: Kinds of a training's job.
_TRAININGS = ("batch/v1:Job", ":PyTorchJob", ":TrainJob")
_METADATA = ("metadata.name", "metadata.namespace")
_JOB = ("spec.completions", "spec.parallelism", "spec.selector", "spec.template")
_SOURCES = ("csi", "nfs", "hostPath")

#: Fields besides name and namespace that the provider replaces (its documentation, "replacement of objects").
_REPLACED: Mapping[str, tuple[str, ...]] = {
    "kubernetes:apps/v1:Deployment": ("spec.selector",),
    "kubernetes:apps/v1:DaemonSet": ("spec.selector",),
    "kubernetes:batch/v1:Job": _JOB,
    "kubernetes:core/v1:Service": ("spec.clusterIP",),
    _VOLUME: tuple(f"spec.{source}" for source in _SOURCES),
    _CLAIM: ("spec.accessModes", "spec.selector", "spec.storageClassName", "spec.volumeName"),
    _RELEASE: ("name", "namespace"),
}
#: Fields that the API server never changes.
_IMMUTABLE: Mapping[str, tuple[str, ...]] = {
    "kubernetes:batch/v1:Job": ("spec.completions", "spec.selector", "spec.template"),
    "kubernetes:apps/v1:Deployment": ("spec.selector",),
    _VOLUME: _REPLACED[_VOLUME],
    _CLAIM: _REPLACED[_CLAIM],
}


def rules_of(token: str, reachable: Callable[[World], bool]) -> Rules:
    """Return the rules of a kind; `reachable` returns whether there is an API server."""

    def check_access(world: World) -> None:
        if not reachable(world):
            raise Refused("configured Kubernetes cluster is unreachable: unable to load schema information")
        simulated_access.check_address(world)
        simulated_aks.check_rights(world)

    def created(world: World, inputs: Inputs) -> None:
        check_access(world)
        _require_kind(world, token)
        _require_namespace(world, inputs)
        if token == _RELEASE:
            _require_nodes(world, "INSTALLATION FAILED: context deadline exceeded")
        _require_free_nodes(world, inputs)

    def installed(world: World, resource: Resource) -> None:
        if token == _RELEASE:
            simulated_aks.check_exporter(world, resource)

    def updated(world: World, resource: Resource, inputs: Inputs) -> None:
        check_access(world)
        _require_kind(world, token)
        _check_immutable(token, resource.inputs, inputs)

    def deleted(world: World, resource: Resource) -> None:
        check_access(world)
        _check_unused(world, resource)
        if token == _RELEASE:
            _require_nodes(world, "UNINSTALLATION FAILED: pre-delete hook timed out")
        if token == "kubernetes:core/v1:Namespace":
            _delete_contents(world, resource)

    return Rules(
        (*_METADATA, *_REPLACED.get(token, ())),
        identity=_identity,
        replaces=_immutable_data,
        on_create=created,
        on_created=installed,
        on_update=updated,
        on_delete=deleted,
        computed=_computed,
    )


def has_control_plane(world: World) -> bool:
    """Return whether the stack's cluster exists; a cluster outside the stack always exists."""
    return not simulated_access.is_own_cluster(world) or bool(world.ready(*_CONTROL_PLANES))


def _identity(name: str, inputs: Inputs) -> str:
    if "chart" in inputs:
        return f"{inputs['namespace']}/{inputs['name']}"
    namespace, own = (at(inputs, f"metadata.{key}") for key in ("namespace", "name"))
    return f"{namespace}/{own}" if namespace else str(own)


def _computed(name: str, inputs: Inputs) -> Inputs:
    status = {"namespace": inputs["namespace"], "name": inputs["name"]} if "chart" in inputs else {"observed": True}
    return {"name": inputs.get("name"), "status": status}


def _immutable_data(old: Inputs, new: Inputs) -> Iterator[str]:
    if old.get("immutable") and old.get("data") != new.get("data"):
        yield "data"


def _group(token: str) -> str:
    return token.split(":")[1].partition("/")[0]


def _require_kind(world: World, token: str) -> None:
    group, kind = _group(token), token.rpartition(":")[2]
    served = {one for release in world.ready(_RELEASE) for one in _CHART_GROUPS.get(release.inputs["name"], ())}
    served |= {str(at(definition.inputs, "spec.group")) for definition in world.of_type(_CRD)}
    on_gke = _MANAGED if world.of_type(_CONTROL_PLANES[2]) else ()
    if group not in (*_BUILT_IN, *on_gke) and group not in served:
        raise Refused(f'no matches for kind "{kind}" in version "{token.split(":")[1]}"')


def _require_namespace(world: World, inputs: Inputs) -> None:
    name = inputs.get("namespace") if "chart" in inputs else at(inputs, "metadata.namespace")
    known = {"default", "kube-system"} | {one.id for one in world.of_type("kubernetes:core/v1:Namespace")}
    if name and name not in known and not inputs.get("createNamespace"):
        raise Refused(f'namespaces "{name}" not found')


def _require_nodes(world: World, error: str) -> None:
    if simulated_access.is_own_cluster(world) and not world.ready(*_NODES):
        raise Refused(f"{error}: 0 nodes are available")


def _require_free_nodes(world: World, inputs: Inputs) -> None:
    """Refuse a netcheck, which needs every node, while the pods of a training own them (required anti-affinity)."""
    label = "app.kubernetes.io/component"
    if (at(inputs, "metadata.labels") or {}).get(label) != "netcheck" or "parallelism" not in inputs.get("spec", {}):
        return
    for other in world.resources.values():
        if (
            other.type.endswith(_TRAININGS)
            and other.status == "ACTIVE"
            and (at(other.inputs, "metadata.labels") or {}).get(label) == "training"
        ):
            raise Refused(f"timed out waiting for the condition: pods are pending, as {other.name} owns their nodes")


def _check_immutable(token: str, old: Inputs, new: Inputs) -> None:
    for path in _IMMUTABLE.get(token, ()):
        if at(old, path) != at(new, path):
            raise Refused(f"{token.rpartition(':')[2]} is invalid: {path}: field is immutable")
    if old.get("immutable") and old.get("data") != new.get("data"):
        raise Refused("data: Forbidden: field is immutable when `immutable` is set")
    if (
        token == _CLAIM
        and at(old, "spec.resources") != at(new, "spec.resources")
        and not at(old, "spec.storageClassName")
    ):
        raise Refused("only dynamically provisioned pvc can be resized, and its storage class must allow it")


def _check_unused(world: World, resource: Resource) -> None:
    """Refuse to delete a claim or a volume in use; the real server delays the deletion instead."""
    if resource.type == _CLAIM:
        name, namespace = (at(resource.inputs, f"metadata.{key}") for key in ("name", "namespace"))
        for other in list(world.resources.values()):
            mounts = {"claimName": name} in _claims(other.inputs)
            if mounts and at(other.inputs, "metadata.namespace") == namespace:
                raise Refused(f"kubernetes.io/pvc-protection: {resource.id} is mounted by {other.type} {other.name}")
    if resource.type == _VOLUME:
        name = at(resource.inputs, "metadata.name")
        if any(at(claim.inputs, "spec.volumeName") == name for claim in world.of_type(_CLAIM)):
            raise Refused(f"kubernetes.io/pv-protection: {resource.id} is bound")


def _claims(value: object) -> list[dict[str, object]]:
    """Return every `persistentVolumeClaim` in an object's pods, by name only."""
    if isinstance(value, dict):
        found = value.get("persistentVolumeClaim")
        own = [{"claimName": found.get("claimName")}] if isinstance(found, dict) else []
        return own + [one for item in value.values() for one in _claims(item)]
    return [one for item in value for one in _claims(item)] if isinstance(value, list) else []


def _delete_contents(world: World, namespace: Resource) -> None:
    """Delete what is in the namespace; refuse if it holds custom resources, which need their operator."""
    inside = [one for one in world.resources.values() if at(one.inputs, "metadata.namespace") == namespace.id]
    for one in inside:
        if _group(one.type) not in _BUILT_IN:
            raise Refused(f"namespace {namespace.id} stays Terminating: {one.type} {one.name} waits for its operator")
        world.remove(one)
