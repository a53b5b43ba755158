"""The API server of a cluster: kinds that must exist, objects in use, fields that cannot change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import simulated_azure
from engine_values import at
from engine_world import Inputs, Refused, Rules, Thing, World

_CONTROL_PLANES = (
    "aws:eks/cluster:Cluster",
    "azure-native:containerservice:ManagedCluster",
    "gcp:container/cluster:Cluster",
)
#: Nodes that operators run on; AKS's first pool is a part of the control plane's own resource.
_NODES = (
    "aws:eks/nodeGroup:NodeGroup",
    "azure-native:containerservice:ManagedCluster",
    "gcp:container/nodePool:NodePool",
)
_RELEASE, _CRD = "kubernetes:helm.sh/v3:Release", "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition"
_CLAIM, _VOLUME = "kubernetes:core/v1:PersistentVolumeClaim", "kubernetes:core/v1:PersistentVolume"
#: Groups of an API server without any operator.
_BUILT_IN = ("core", "apps", "batch", "policy", "networking.k8s.io", "apiextensions.k8s.io", "helm.sh")
#: Groups that GKE serves itself.
_MANAGED = ("networking.gke.io",)
#: The groups of custom resources that each chart brings, by the name of its release.
_CHART_GROUPS = {
    "kube-prometheus-stack": ("monitoring.coreos.com",),
    "network-operator": ("mellanox.com", "nfd.k8s-sigs.io"),
    "gpu-operator": ("nvidia.com", "nfd.k8s-sigs.io"),
    "kubeflow-trainer": ("trainer.kubeflow.org", "jobset.x-k8s.io"),
    "kueue": ("kueue.x-k8s.io",),
}
_METADATA = ("metadata.name", "metadata.namespace")
_JOB = ("spec.completions", "spec.parallelism", "spec.selector", "spec.template")
_SOURCES = ("csi", "nfs", "hostPath")

#: What the provider replaces, beside an object's name and namespace (its documentation, "replacement of objects").
_REPLACED: Mapping[str, tuple[str, ...]] = {
    "kubernetes:apps/v1:Deployment": ("spec.selector",),
    "kubernetes:apps/v1:DaemonSet": ("spec.selector",),
    "kubernetes:batch/v1:Job": _JOB,
    "kubernetes:core/v1:Service": ("spec.clusterIP",),
    _VOLUME: tuple(f"spec.{source}" for source in _SOURCES),
    _CLAIM: ("spec.accessModes", "spec.selector", "spec.storageClassName", "spec.volumeName"),
    _RELEASE: ("name", "namespace"),
}
#: What the API server never changes on an object that exists.
_IMMUTABLE: Mapping[str, tuple[str, ...]] = {
    "kubernetes:batch/v1:Job": ("spec.completions", "spec.selector", "spec.template"),
    "kubernetes:apps/v1:Deployment": ("spec.selector",),
    _VOLUME: _REPLACED[_VOLUME],
    _CLAIM: _REPLACED[_CLAIM],
}


def rules_of(token: str, reachable: Callable[[World], bool]) -> Rules:
    """The rules of any kind; `reachable` says whether there is an API server to talk to."""

    def served(world: World) -> None:
        if not reachable(world):
            raise Refused("configured Kubernetes cluster is unreachable: unable to load schema information")
        if world.of_type(_CONTROL_PLANES[1]) and not simulated_azure.may_administer(world):
            raise Refused("Forbidden: the user has no role on the cluster")

    def created(world: World, inputs: Inputs) -> None:
        served(world)
        _kind_exists(world, token)
        _namespace_exists(world, inputs)
        if token == _RELEASE:
            _nodes_exist(world, "INSTALLATION FAILED: context deadline exceeded")

    def updated(world: World, thing: Thing, inputs: Inputs) -> None:
        served(world)
        _kind_exists(world, token)
        _changes_allowed(token, thing.inputs, inputs)

    def deleted(world: World, thing: Thing) -> None:
        served(world)
        _not_in_use(world, thing)
        if token == _RELEASE:
            _nodes_exist(world, "UNINSTALLATION FAILED: pre-delete hook timed out")
        if token == "kubernetes:core/v1:Namespace":
            _empty(world, thing)

    return Rules(
        (*_METADATA, *_REPLACED.get(token, ())),
        identity=_identity,
        replaces=_immutable_data,
        on_create=created,
        on_update=updated,
        on_delete=deleted,
        computed=_computed,
    )


def has_control_plane(world: World) -> bool:
    """Whether the stack's own cluster exists; one that the stack did not make is always there."""
    return "127.0.0.1" in world.kubeconfig or bool(world.of_type(*_CONTROL_PLANES))


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


def _kind_exists(world: World, token: str) -> None:
    group, kind = _group(token), token.rpartition(":")[2]
    served = {one for release in world.of_type(_RELEASE) for one in _CHART_GROUPS.get(release.inputs["name"], ())}
    served |= {str(at(definition.inputs, "spec.group")) for definition in world.of_type(_CRD)}
    on_gke = _MANAGED if world.of_type(_CONTROL_PLANES[2]) else ()
    if group not in (*_BUILT_IN, *on_gke) and group not in served:
        raise Refused(f'no matches for kind "{kind}" in version "{token.split(":")[1]}"')


def _namespace_exists(world: World, inputs: Inputs) -> None:
    wanted = inputs.get("namespace") if "chart" in inputs else at(inputs, "metadata.namespace")
    known = {"default", "kube-system"} | {one.id for one in world.of_type("kubernetes:core/v1:Namespace")}
    if wanted and wanted not in known and not inputs.get("createNamespace"):
        raise Refused(f'namespaces "{wanted}" not found')


def _nodes_exist(world: World, words: str) -> None:
    if "127.0.0.1" not in world.kubeconfig and not world.of_type(*_NODES):
        raise Refused(f"{words}: 0 nodes are available")


def _changes_allowed(token: str, old: Inputs, new: Inputs) -> None:
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


def _not_in_use(world: World, thing: Thing) -> None:
    """Protection of claims and volumes: the real deletion waits until the last user has gone, here it is refused."""
    if thing.type == _CLAIM:
        name, namespace = (at(thing.inputs, f"metadata.{key}") for key in ("name", "namespace"))
        for other in list(world.things.values()):
            mounts = {"claimName": name} in _claims(other.inputs)
            if mounts and at(other.inputs, "metadata.namespace") == namespace:
                raise Refused(f"kubernetes.io/pvc-protection: {thing.id} is mounted by {other.type} {other.name}")
    if thing.type == _VOLUME:
        name = at(thing.inputs, "metadata.name")
        if any(at(claim.inputs, "spec.volumeName") == name for claim in world.of_type(_CLAIM)):
            raise Refused(f"kubernetes.io/pv-protection: {thing.id} is bound")


def _claims(value: object) -> list[dict[str, object]]:
    """Every `persistentVolumeClaim` of the pods that an object describes, by name only."""
    if isinstance(value, dict):
        found = value.get("persistentVolumeClaim")
        own = [{"claimName": found.get("claimName")}] if isinstance(found, dict) else []
        return own + [one for item in value.values() for one in _claims(item)]
    return [one for item in value for one in _claims(item)] if isinstance(value, list) else []


def _empty(world: World, namespace: Thing) -> None:
    """Deleting a namespace deletes what is in it; custom resources there must be gone while their operator runs."""
    inside = [one for one in world.things.values() if at(one.inputs, "metadata.namespace") == namespace.id]
    for one in inside:
        if _group(one.type) not in _BUILT_IN:
            raise Refused(f"namespace {namespace.id} stays Terminating: {one.type} {one.name} waits for its operator")
        world.remove(one)
