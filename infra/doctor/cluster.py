"""Checks of a running cluster: nodes, GPUs, fabric, storage and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from infra.addons import charts
from infra.contract import GPU_LABEL
from infra.findings.common_causes import CLAIM, MOUNT, NO_FABRIC, NO_GPUS, NODE_NOT_READY, OPERATOR
from infra.findings.model import Check, Context, Finding, ok, problem, skipped
from infra.kube_api import KubeApi, Object
from infra.text import one_line

GPU = "nvidia.com/gpu"
SERVER = "kubernetes"
_MAX_TEXT = 200
#: The fields with the expected and the working number of pods, by resource.
_POD_COUNTS = {
    "deployments": ("replicas", "availableReplicas"),
    "daemonsets": ("desiredNumberScheduled", "numberReady"),
}
#: The namespace of Kubernetes' own components and of the cloud's add-ons.
_SYSTEM = "kube-system"


def checks(context: Context, devices: Mapping[str, int], kubeconfig: str, login: str) -> list[Check]:
    """Return the checks of a cluster; the others need the first one, which connects to it."""

    @cache
    def api() -> KubeApi:
        """Open the cluster's API once, for all checks."""
        return KubeApi.from_text(kubeconfig, login)

    settings = context.settings
    expected = {GPU: settings.gpus_per_node} if settings.gpus_per_node else {}
    return [
        Check(SERVER, lambda: server(api())),
        Check("nodes", lambda: nodes(api(), bool(expected)), needs=SERVER),
        Check("gpus", lambda: advertised(api(), expected, NO_GPUS), needs=SERVER),
        Check("fabric", lambda: advertised(api(), devices, NO_FABRIC), needs=SERVER),
        Check("storage", lambda: storage(api(), settings.namespace), needs=SERVER),
        Check("operators", lambda: operators(api(), context.stack), needs=SERVER),
    ]


def server(kube: KubeApi) -> Finding:
    """Check that the Kubernetes API responds."""
    version = (kube.find("/version") or {}).get("gitVersion") or "of an unknown version"
    return ok(f"{kube.host}, Kubernetes {version}")


def nodes(kube: KubeApi, with_gpus: bool) -> Finding | list[Finding]:
    """Check that every node is ready, and count the GPU nodes."""
    listed = kube.items("/api/v1/nodes")
    reasons = {str(node["metadata"]["name"]): _not_ready_reason(node) for node in listed}
    found = [problem(NODE_NOT_READY, f"{name}: {reason}", node=name) for name, reason in reasons.items() if reason]
    if found:
        return found
    if not with_gpus:
        return ok(f"{len(listed)} nodes ready")
    count = len(_gpu_nodes(listed))
    empty = "; the GPU pool is empty until a pod requests a node" if not count else ""
    return ok(f"{len(listed)} nodes ready, {count} of them with GPUs{empty}")


def advertised(kube: KubeApi, expected: Mapping[str, int], cause: Any) -> Finding | list[Finding]:
    """Check that every ready GPU node advertises all devices of its type."""
    if not expected:
        return skipped("the stack's nodes have no such devices")
    ready = [node for node in _gpu_nodes(kube.items("/api/v1/nodes")) if _not_ready_reason(node) is None]
    if not ready:
        return skipped("no GPU node is running")
    found = []
    for node in ready:
        name, offers = str(node["metadata"]["name"]), (node.get("status") or {}).get("allocatable") or {}
        for device, count in expected.items():
            if int(offers.get(device, 0)) < count:
                result = f"{name} offers {offers.get(device, 0)} {device}, its type has {count}"
                found.append(problem(cause, result, node=name, device=device))
    each = ", ".join(f"{count} {device}" for device, count in expected.items())
    return found or ok(f"{each} on each of {len(ready)} nodes")


def storage(kube: KubeApi, namespace: str) -> Finding | list[Finding]:
    """Check that every claim of the namespace is bound, and that no pod waits for a mount."""
    claims = kube.items(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")
    if not claims:
        return problem(CLAIM, f"namespace {namespace} has no claim", namespace=namespace, claim="<claim>")
    found = []
    for claim in claims:
        name, phase = str(claim["metadata"]["name"]), (claim.get("status") or {}).get("phase")
        if phase != "Bound":
            warning = _last_warning(kube, namespace, name)
            result = f"claim {name} is {phase}" + (f": {warning}" if warning else "")
            found.append(problem(CLAIM, result, namespace=namespace, claim=name))
    return found + _failed_mounts(kube, namespace) or ok(f"{len(claims)} claims bound, no mount failed")


def _failed_mounts(kube: KubeApi, namespace: str) -> list[Finding]:
    """Return a problem for each pending pod with a failed mount."""
    waiting = {
        str(pod["metadata"]["name"])
        for pod in kube.items(f"/api/v1/namespaces/{namespace}/pods")
        if (pod.get("status") or {}).get("phase") == "Pending"
    }
    failed: dict[str, str] = {}
    for event in kube.items(f"/api/v1/namespaces/{namespace}/events"):
        name = str((event.get("involvedObject") or {}).get("name"))
        if event.get("reason") in ("FailedMount", "FailedAttachVolume") and name in waiting:
            failed[name] = one_line(event.get("message") or "", _MAX_TEXT)
    return [problem(MOUNT, f"pod {name}: {text}", namespace=namespace, pod=name) for name, text in failed.items()]


def operators(kube: KubeApi, stack: str) -> Finding | list[Finding]:
    """Check that the deployments and daemon sets of all operators have their pods."""
    spaces = sorted({chart.namespace for chart in charts.table().values()} | {_SYSTEM})
    found, count = [], 0
    for space in spaces:
        for kind, (expected, working) in _POD_COUNTS.items():
            for item in kube.items(f"/apis/apps/v1/namespaces/{space}/{kind}"):
                count += 1
                status = item.get("status") or {}
                least = status.get(expected) if expected in status else (item.get("spec") or {}).get("replicas", 0)
                have, name = int(status.get(working) or 0), str(item["metadata"]["name"])
                if have < int(least or 0):
                    result = f"{space}/{name}: {have} of {least} pods work"
                    values = {"namespace": space, "kind": kind.rstrip("s"), "name": name, "stack": stack}
                    found.append(problem(OPERATOR, result, **values))
    return found or ok(f"{count} deployments and daemon sets of operators work")


def _gpu_nodes(nodes: Sequence[Object]) -> list[Object]:
    """Return the nodes with the label of GPU pools."""
    return [node for node in nodes if GPU_LABEL.items() <= (node["metadata"].get("labels") or {}).items()]


def _not_ready_reason(node: Object) -> str | None:
    """Return the reason why a node is not ready; None if it is ready."""
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready":
            if condition.get("status") == "True":
                return None
            return one_line(condition.get("message") or "", _MAX_TEXT) or str(condition.get("reason"))
    return "its kubelet has not reported"


def _last_warning(kube: KubeApi, namespace: str, name: str) -> str:
    """Return the newest warning about an object, empty if there is none."""
    events = [
        event
        for event in kube.items(f"/api/v1/namespaces/{namespace}/events")
        if (event.get("involvedObject") or {}).get("name") == name and event.get("type") == "Warning"
    ]
    newest = max(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={})
    return one_line(newest.get("message") or "", _MAX_TEXT)
