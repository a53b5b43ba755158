"""What a cluster that exists says before anything is made on it: that it answers, its nodes, its storage class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "fewer nodes than gpu.nodes.desired have the labels, or so many GPUs",
    "{fix}",
    guide="kubectl label node <node> nvidia.com/gpu.present=true, or pulumi config set --path gpu.nodes.desired N",
)
CLASS = Cause(
    "local-storage-class",
    "the claim stays Pending",
    "the storage class does not exist, or the cluster has no default one",
    "pulumi config set --path storage.storage_class {name}, or a folder of the one node: storage.host_path",
)
FOLDER = Cause(
    "local-host-path",
    "pods on one node do not see what those on another wrote",
    "storage.host_path is a folder of each node, shared only where there is one node",
    "pulumi config rm --path storage.host_path, and storage.storage_class of a class that many nodes mount",
)
CAUSES = (NODES, CLASS, FOLDER)
SERVER = "cluster"


def checks(context: Context) -> list[Check]:
    """Before `up`; a stack that is up is looked at by the checks that all clouds share."""
    settings = context.settings
    assert isinstance(settings, Settings)
    if context.outputs:
        return []
    opened: list[KubeApi] = []

    def server() -> Finding:
        found = kubeconfig.read(kubeconfig.locate(settings.kubeconfig.path))
        name = settings.kubeconfig.context or found.current or ""
        opened.append(KubeApi.from_text(kubeconfig.only(found, name), LOGIN))
        version = (opened[0].find("/version") or {}).get("gitVersion", "of an unknown version")
        return ok(f"context {name}, Kubernetes {version}")

    return [
        Check(SERVER, server),
        Check("nodes", lambda: nodes(opened[0], settings), SERVER),
        Check("storage", lambda: storage(opened[0], settings), SERVER),
    ]


def devices(_: Settings) -> Mapping[str, int]:
    """None: such a cluster talks TCP."""
    return {}


def login(*_: object) -> tuple[str, str] | None:
    """None: what `docker login` left is Docker's own."""
    return None


def nodes(kube: KubeApi, settings: Settings) -> Finding:
    """Enough nodes that a pod could be put on."""
    pool = settings.gpu
    wanted = (GPU_LABEL if pool.gpus_per_node else {}) | pool.node_selector
    every = kube.items("/api/v1/nodes")
    fitting = [node for node in every if wanted.items() <= (node["metadata"].get("labels") or {}).items()]
    with_gpus = [node for node in fitting if _gpus(node) >= pool.gpus_per_node or pool.chart != "present"]
    told = f"{len(with_gpus)} of {len(every)} nodes will do, gpu.nodes.desired is {pool.nodes.desired}"
    if len(with_gpus) >= pool.nodes.desired:
        return ok(told)
    labels = " ".join(f"{key}={value}" for key, value in wanted.items())
    fix = f"pulumi config set --path gpu.nodes.desired {len(with_gpus)}"
    fix += f", or label nodes: kubectl label node <node> {labels}" if labels else ""
    return problem(NODES, told, fix=fix)


def storage(kube: KubeApi, settings: Settings) -> Finding:
    """The class of the claim is there; a folder of a node is shared with nobody."""
    chosen = settings.storage
    if chosen.host_path:
        count = len(kube.items("/api/v1/nodes"))
        if count > 1:
            return problem(FOLDER, f"{chosen.host_path} on a cluster of {count} nodes")
        return skipped(f"{chosen.host_path} on the node, which Kubernetes cannot look at")
    classes = kube.items("/apis/storage.k8s.io/v1/storageclasses")
    names = [str(item["metadata"]["name"]) for item in classes]
    key = "storageclass.kubernetes.io/is-default-class"
    default = [n for n, item in zip(names, classes, strict=True) if _annotation(item, key) == "true"]
    if chosen.storage_class in names or (chosen.storage_class is None and default):
        return ok(f"class {chosen.storage_class or default[0]}")
    told = f"no class {chosen.storage_class!r}" if chosen.storage_class else "no default class"
    return problem(CLASS, f"{told}; there are: {', '.join(names) or 'none'}", name=names[0] if names else "<class>")


def _gpus(node: Mapping[str, Any]) -> int:
    return int(((node.get("status") or {}).get("allocatable") or {}).get("nvidia.com/gpu", 0))


def _annotation(item: Mapping[str, Any], key: str) -> str:
    return str((item["metadata"].get("annotations") or {}).get(key, ""))
