"""Pods have no more rights on their node than training needs; operators, which manage nodes, have their namespaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from infra.addons import charts
from infra.policy.reading import Config, Props, Resource, dicts, listed, matches, resource_rule, strings

_HOST = {"hostNetwork": "the node's network", "hostPID": "the node's processes", "hostIPC": "the node's memory"}

#: Namespaces of what manages nodes: each chart's own, and the cluster's.
OPERATORS = sorted({"kube-system", *(row.namespace for row in charts.table().values())})

_OPTIONS = {
    "namespaces": strings("Namespaces where pods may have such rights.", OPERATORS),
    "capabilities": strings("Linux capabilities that any fabric may need: RDMA locks memory.", ["IPC_LOCK"]),
    "fabricImages": strings(
        "Images, as shell patterns, of daemons that manage a fabric beside the trainer: these containers may add any "
        "capability, and their pods may use `hostPaths`.",
        ["us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/*"],
    ),
    "hostPaths": strings(
        "Folders of the node, as shell patterns, that a pod with such a daemon may use.",
        ["/home/kubernetes/bin/nvidia/lib64", "/run/tcpx", "/sys", "/proc/sys"],
    ),
}


def pod_specs(value: Any) -> Iterator[Props]:
    """Every pod specification inside an object of any kind: what has a list of containers."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        for inner in value.values():
            yield from pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_specs(inner)


def containers(spec: Props) -> list[Props]:
    """All containers of a pod, those that run first included."""
    return [one for key in ("initContainers", "containers", "ephemeralContainers") for one in dicts(spec.get(key))]


def is_workload(resource: Resource, config: Config) -> bool:
    """Whether it is a Kubernetes object outside the operators' namespaces."""
    namespace = (resource.props.get("metadata") or {}).get("namespace", "default")
    return resource.type.startswith("kubernetes:") and namespace not in config["namespaces"]


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Violations of one resource."""
    if not is_workload(resource, config):
        return
    for spec in pod_specs(resource.props):
        yield from (f"{key} gives {what} to a pod: leave it out" for key, what in _HOST.items() if spec.get(key))
        has_daemon = any(_is_daemon(container, config) for container in containers(spec))
        allowed = config["hostPaths"] if has_daemon else ()
        for volume in dicts(spec.get("volumes")):
            path = (volume.get("hostPath") or {}).get("path")
            if path and not matches(str(path), allowed):
                yield f"volume {volume.get('name')} shows the node's {path}: use a claim"
        for container in containers(spec):
            yield from _container(container, config)


def _container(container: Props, config: Config) -> Iterator[str]:
    name, security = container.get("name"), container.get("securityContext") or {}
    if security.get("privileged"):
        yield f"container {name} is privileged: leave it out"
    if security.get("allowPrivilegeEscalation"):
        yield f"container {name} may gain rights: set allowPrivilegeEscalation to false"
    added = listed((security.get("capabilities") or {}).get("add"))
    further = [str(item) for item in added if item not in config["capabilities"]]
    if further and not _is_daemon(container, config):
        yield f"container {name} adds {', '.join(further)}; allowed: {', '.join(config['capabilities'])}"


def _is_daemon(container: Props, config: Config) -> bool:
    return matches(str(container.get("image")), config["fabricImages"])


POLICY = resource_rule(
    "no-privileged-pods", "Pods outside the operators' namespaces have no rights on their node.", check, _OPTIONS
)
