"""Checks of an existing cluster before `up`: the API server, the nodes, the storage class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from infra.clouds.local import kubeconfig
from infra.clouds.local.credentials import LOGIN
from infra.clouds.local.settings import Settings
from infra.contract import GPU_LABEL
from infra.findings.model import Cause, Check, Context, Finding, ok, problem, skipped
from infra.kube_api import KubeApi

PACKAGES: Sequence[str] = ()

NODES = Cause(
    "local-nodes",
    "pods wait with `Insufficient nvidia.com/gpu`, or for labels that no node has",
    "fewer nodes than gpu.nodes.desired have the labels or enough GPUs",
    "{fix}",
    guide="kubectl label node <node> nvidia.com/gpu.present=true, or pulumi config set --path gpu.nodes.desired N",
)
CLASS = Cause(
    "local-storage-class",
    "the claim stays Pending",
    "the storage class does not exist, or the cluster has no default class",
    "pulumi config set --path storage.storage_class {name}, or a folder of the only node: storage.host_path",
)
FOLDER = Cause(
    "local-host-path",
    "pods on one node do not see files that pods on another wrote",
    "storage.host_path is a separate folder on each node, shared only where there is one node",
    "pulumi config rm --path storage.host_path, and storage.storage_class of a class that many nodes mount",
)
CAUSES = (NODES, CLASS, FOLDER)

_SERVER = "cluster"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def checks(context: Context) -> list[Check]:
    """Return the checks before `up`; after it, the checks that all clouds share cover the cluster."""
    settings = context.settings
    assert isinstance(settings, Settings)
    if context.outputs:
        return []
    queries = Queries(settings)
    return [
        Check(_SERVER, queries.server),
        Check("nodes", queries.nodes, _SERVER),
        Check("storage", queries.storage, _SERVER),
    ]


def devices(_: Settings) -> Mapping[str, int]:
    """Return no devices, because nodes of an existing cluster communicate over TCP."""
    return {}


def login(*_: object) -> tuple[str, str] | None:
    """Return None, because the user logs in to the registry with `docker login`."""
    return None


@dataclass(frozen=True)
class Queries:
    """The queries about one existing cluster."""

    settings: Settings

    @cached_property
    def context(self) -> str:
        """The kubeconfig context that the stack uses."""
        return self.settings.kubeconfig.context or self._kubeconfig.current or ""

    @cached_property
    def kube(self) -> KubeApi:
        """The cluster's API, opened once."""
        return KubeApi.from_text(kubeconfig.extract_context(self._kubeconfig, self.context), LOGIN)

    @cached_property
    def _kubeconfig(self) -> kubeconfig.Kubeconfig:
        return kubeconfig.read(kubeconfig.locate(self.settings.kubeconfig.path))

    def server(self) -> Finding:
        """Check that the API server answers."""
        version = (self.kube.find("/version") or {}).get("gitVersion") or "of an unknown version"
        return ok(f"context {self.context}, Kubernetes {version}")

    def nodes(self) -> Finding:
        """Check that enough nodes can run a training pod."""
        pool = self.settings.gpu
        labels = (GPU_LABEL if pool.gpus_per_node else {}) | pool.node_selector
        nodes = self.kube.items("/api/v1/nodes")
        labelled = [node for node in nodes if labels.items() <= (node["metadata"].get("labels") or {}).items()]
        usable = [node for node in labelled if _gpus(node) >= pool.gpus_per_node or pool.chart != "present"]
        result = f"{len(usable)} of {len(nodes)} nodes are usable, gpu.nodes.desired is {pool.nodes.desired}"
        if len(usable) >= pool.nodes.desired:
            return ok(result)
        words = " ".join(f"{key}={value}" for key, value in labels.items())
        fix = f"pulumi config set --path gpu.nodes.desired {len(usable)}"
        fix += f", or label nodes: kubectl label node <node> {words}" if words else ""
        return problem(NODES, result, fix=fix)

    def storage(self) -> Finding:
        """Check that the claim's storage class exists, and that a host path is not used on several nodes."""
        chosen = self.settings.storage
        if chosen.host_path:
            num_nodes = len(self.kube.items("/api/v1/nodes"))
            if num_nodes > 1:
                return problem(FOLDER, f"{chosen.host_path} on a cluster of {num_nodes} nodes")
            return skipped(f"{chosen.host_path} on the node, which the Kubernetes API cannot check")
        classes = self.kube.items("/apis/storage.k8s.io/v1/storageclasses")
        names = [str(item["metadata"]["name"]) for item in classes]
        defaults = [
            name
            for name, item in zip(names, classes, strict=True)
            if (item["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
        ]
        if chosen.storage_class in names or (chosen.storage_class is None and defaults):
            return ok(f"class {chosen.storage_class or defaults[0]}")
        missing = f"no class {chosen.storage_class!r}" if chosen.storage_class else "no default class"
        result = f"{missing}; the cluster has: {', '.join(names) or 'none'}"
        return problem(CLASS, result, name=names[0] if names else "<class>")


def _gpus(node: Mapping[str, Any]) -> int:
    return int(((node.get("status") or {}).get("allocatable") or {}).get("nvidia.com/gpu", 0))
