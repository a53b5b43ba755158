"""A cluster that is up: its nodes, their GPUs and fabric, the storage, the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.addons import charts
from infra.contract import GPU_LABEL
from infra.findings.common_causes import CLAIM, MOUNT, NO_FABRIC, NO_GPUS, NODE_NOT_READY, OPERATOR
from infra.findings.model import Check, Context, Finding, ok, problem, skipped
from infra.kube_api import KubeApi, Object

GPU = "nvidia.com/gpu"
SERVER = "kubernetes"
_WORKING = {"deployments": ("replicas", "availableReplicas"), "daemonsets": ("desiredNumberScheduled", "numberReady")}
#: Pulumi's and Kubernetes' own; add-ons of the cloud run there too.
_SYSTEM = "kube-system"


def checks(context: Context, devices: Mapping[str, int], kubeconfig: str, login: str) -> list[Check]:
    """Checks of a cluster; the first opens it."""
    opened: list[KubeApi] = []

    def server() -> Finding:
        opened.append(KubeApi.from_text(kubeconfig, login))
        version = (opened[0].find("/version") or {}).get("gitVersion") or "of an unknown version"
        return ok(f"{opened[0].host}, Kubernetes {version}")

    settings = context.settings
    expected = {GPU: settings.gpus_per_node} if settings.gpus_per_node else {}
    return [
        Check(SERVER, server),
        Check("nodes", lambda: nodes(opened[0], bool(expected)), needs=SERVER),
        Check("gpus", lambda: advertised(opened[0], expected, NO_GPUS), needs=SERVER),
        Check("fabric", lambda: advertised(opened[0], devices, NO_FABRIC), needs=SERVER),
        Check("storage", lambda: storage(opened[0], settings.namespace), needs=SERVER),
        Check("operators", lambda: operators(opened[0], context.stack), needs=SERVER),
    ]


def nodes(kube: KubeApi, with_gpus: bool) -> Finding | list[Finding]:
    """Every node is ready; those of the GPU pool are counted."""
    every = kube.items("/api/v1/nodes")
    lame = [(node, _not_ready(node)) for node in every if _not_ready(node) is not None]
    if lame:
        names = ((str(node["metadata"]["name"]), why) for node, why in lame)
        return [problem(NODE_NOT_READY, f"{name}: {why}", node=name) for name, why in names]
    if not with_gpus:
        return ok(f"{len(every)} nodes ready")
    count = len(_gpu_nodes(every))
    empty = "; the GPU pool is empty until a pod wants a node" if not count else ""
    return ok(f"{len(every)} nodes ready, {count} of them with GPUs{empty}")


def advertised(kube: KubeApi, expected: Mapping[str, int], cause: Any) -> Finding | list[Finding]:
    """Every ready GPU node offers as many devices as its type has."""
    if not expected:
        return skipped("the stack's nodes have none")
    ready = [node for node in _gpu_nodes(kube.items("/api/v1/nodes")) if _not_ready(node) is None]
    if not ready:
        return skipped("no GPU node is up at present")
    found = []
    for node in ready:
        name, offers = str(node["metadata"]["name"]), (node.get("status") or {}).get("allocatable") or {}
        for device, count in expected.items():
            if int(offers.get(device, 0)) < count:
                told = f"{name} offers {offers.get(device, 0)} {device}, its type has {count}"
                found.append(problem(cause, told, node=name, device=device))
    each = ", ".join(f"{count} {device}" for device, count in expected.items())
    return found or ok(f"{each} on each of {len(ready)} nodes")


def storage(kube: KubeApi, namespace: str) -> Finding | list[Finding]:
    """Every claim of the namespace has its volume, and no pod waits for a mount."""
    claims = kube.items(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")
    if not claims:
        return problem(CLAIM, f"namespace {namespace} has no claim", namespace=namespace, claim="<claim>")
    found = []
    for claim in claims:
        name, phase = str(claim["metadata"]["name"]), (claim.get("status") or {}).get("phase")
        if phase != "Bound":
            why = _last_warning(kube, namespace, name)
            told = f"claim {name} is {phase}" + (f": {why}" if why else "")
            found.append(problem(CLAIM, told, namespace=namespace, claim=name))
    return found + _mounts(kube, namespace) or ok(f"{len(claims)} claims bound, no mount failed")


def _mounts(kube: KubeApi, namespace: str) -> list[Finding]:
    """Mounts that failed for pods that are still there and not running."""
    waiting = {
        str(pod["metadata"]["name"])
        for pod in kube.items(f"/api/v1/namespaces/{namespace}/pods")
        if (pod.get("status") or {}).get("phase") == "Pending"
    }
    failed: dict[str, str] = {}
    for event in kube.items(f"/api/v1/namespaces/{namespace}/events"):
        name = str((event.get("involvedObject") or {}).get("name"))
        if event.get("reason") in ("FailedMount", "FailedAttachVolume") and name in waiting:
            failed[name] = _line(event.get("message"))
    return [problem(MOUNT, f"pod {name}: {why}", namespace=namespace, pod=name) for name, why in failed.items()]


def operators(kube: KubeApi, stack: str) -> Finding | list[Finding]:
    """Deployments and DaemonSets of every namespace that an add-on may live in have all their pods."""
    spaces = sorted({chart.namespace for chart in charts.table().values()} | {_SYSTEM})
    found, count = [], 0
    for space in spaces:
        for kind, (wanted, working) in _WORKING.items():
            for item in kube.items(f"/apis/apps/v1/namespaces/{space}/{kind}"):
                count += 1
                status = item.get("status") or {}
                least = status.get(wanted) if wanted in status else (item.get("spec") or {}).get("replicas", 0)
                have, name = int(status.get(working) or 0), str(item["metadata"]["name"])
                if have < int(least or 0):
                    told = f"{space}/{name}: {have} of {least} pods work"
                    values = {"namespace": space, "kind": kind.rstrip("s"), "name": name, "stack": stack}
                    found.append(problem(OPERATOR, told, **values))
    return found or ok(f"{count} deployments and daemon sets of operators work")


def _gpu_nodes(nodes: Sequence[Object]) -> list[Object]:
    return [node for node in nodes if GPU_LABEL.items() <= (node["metadata"].get("labels") or {}).items()]


def _not_ready(node: Object) -> str | None:
    """Why a node is not ready; None for one that is."""
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready":
            if condition.get("status") == "True":
                return None
            return _line(condition.get("message")) or str(condition.get("reason"))
    return "its kubelet has not reported"


def _last_warning(kube: KubeApi, namespace: str, name: str) -> str:
    """What the newest warning about an object says."""
    events = [
        event
        for event in kube.items(f"/api/v1/namespaces/{namespace}/events")
        if (event.get("involvedObject") or {}).get("name") == name and event.get("type") == "Warning"
    ]
    newest = max(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={})
    return _line(newest.get("message"))


def _line(text: object, most: int = 200) -> str:
    return " ".join(str(text or "").split())[:most]
