"""Rule no-privileged-pods: pods have only the rights on their node that training needs.

Operators manage nodes and are exempt in their own namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from infra.addons import charts
from infra.policy import facts
from infra.policy.rule import Config, resource_rule, strings
from infra.policy_facts import Props, Resource, dicts, listed, matches

_HOST = {"hostNetwork": "the node's network", "hostPID": "the node's processes", "hostIPC": "the node's memory"}

#: Namespaces of the cluster itself and of each chart.
OPERATORS = sorted({"kube-system", *(row.namespace for row in charts.table().values())})

_OPTIONS = {
    "namespaces": strings("Namespaces where pods may have such rights.", OPERATORS),
    "capabilities": strings("Linux capabilities that any fabric may need: RDMA locks memory.", ["IPC_LOCK"]),
    "fabricImages": strings(
        "Images, as shell patterns, of daemons that manage a fabric next to the trainer: these containers may add any "
        "capability, and their pods may use `hostPaths`.",
        facts.all_of(lambda cloud: cloud.fabric_images),
    ),
    "hostPaths": strings(
        "Folders of the node, as shell patterns, that a pod with such a daemon may use.",
        facts.all_of(lambda cloud: cloud.fabric_host_paths),
    ),
}


def pod_specs(value: Any) -> Iterator[Props]:
    """Yield every pod specification inside an object of any kind: each mapping with a list of containers."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        for item in value.values():
            yield from pod_specs(item)
    elif isinstance(value, list):
        for item in value:
            yield from pod_specs(item)


def containers(spec: Props) -> list[Props]:
    """Return all containers of a pod, init and ephemeral containers included."""
    return [one for key in ("initContainers", "containers", "ephemeralContainers") for one in dicts(spec.get(key))]


def is_workload(resource: Resource, config: Config) -> bool:
    """Return whether it is a Kubernetes object outside the operators' namespaces."""
    namespace = (resource.props.get("metadata") or {}).get("namespace", "default")
    return resource.type.startswith("kubernetes:") and namespace not in config["namespaces"]


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Yield the violations of one resource."""
    if not is_workload(resource, config):
        return
    for spec in pod_specs(resource.props):
        yield from (f"{key} gives {what} to a pod: remove it" for key, what in _HOST.items() if spec.get(key))
        has_daemon = any(_is_daemon(container, config) for container in containers(spec))
        allowed = config["hostPaths"] if has_daemon else ()
        for volume in dicts(spec.get("volumes")):
            path = (volume.get("hostPath") or {}).get("path")
            if path and not matches(str(path), allowed):
                yield f"volume {volume.get('name')} mounts the node's {path}: use a claim"
        for container in containers(spec):
            yield from _container(container, config)
            yield from _user(container, spec.get("securityContext") or {}, config)


def _user(container: Props, shared: Props, config: Config) -> Iterator[str]:
    """Yield a root user without a capability to use, or a capability of another user, who does not get it."""
    if _is_daemon(container, config):
        return
    name, own = container.get("name"), container.get("securityContext") or {}
    user = own.get("runAsUser", shared.get("runAsUser"))
    added = ", ".join(map(str, listed((own.get("capabilities") or {}).get("add"))))
    if user == 0 and not added:
        yield f"container {name} runs as root without need: set runAsNonRoot and another runAsUser"
    if user not in (0, None) and added:
        yield f"container {name} adds {added}, which user {user} does not get: set runAsUser to 0 or remove it"


def _container(container: Props, config: Config) -> Iterator[str]:
    name, security = container.get("name"), container.get("securityContext") or {}
    if security.get("privileged"):
        yield f"container {name} is privileged: remove securityContext.privileged"
    if security.get("allowPrivilegeEscalation"):
        yield f"container {name} may gain rights: set allowPrivilegeEscalation to false"
    capabilities = listed((security.get("capabilities") or {}).get("add"))
    rejected = [str(item) for item in capabilities if item not in config["capabilities"]]
    if rejected and not _is_daemon(container, config):
        yield f"container {name} adds {', '.join(rejected)}; allowed: {', '.join(config['capabilities'])}"


def _is_daemon(container: Props, config: Config) -> bool:
    return matches(str(container.get("image")), config["fabricImages"])


POLICY = resource_rule(
    "no-privileged-pods", "Pods outside the operators' namespaces have no rights on their node.", check, _OPTIONS
)
