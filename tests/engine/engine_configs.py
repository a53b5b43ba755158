"""What a changed configuration of the Kubernetes provider does to the objects that it made."""

from __future__ import annotations

from typing import Any

import yaml
from engine_values import differences, has_unknown
from engine_world import Change, Inputs

_IDENTIFIER = "clusterIdentifier"
#: What names the cluster in a kubeconfig.
_CLUSTER_KEYS = ("kubeconfig", "context", "cluster")


def kubernetes_change(old: Inputs, new: Inputs) -> Change:
    """Return what a changed configuration replaces: another cluster replaces the provider and every object of it.

    DiffConfig in pulumi-kubernetes, provider/pkg/provider/provider.go: the active cluster's entry in the kubeconfig is
    compared, `server` and `tls-server-name` included, and an unknown kubeconfig counts as another one. An identifier
    that is set and stays the same prevents both; adding or removing one replaces nothing by itself.
    """
    paths = tuple(differences(old, new))
    replaces = [] if _IDENTIFIER not in old or _IDENTIFIER not in new else [_IDENTIFIER]
    if replaces and old[_IDENTIFIER] == new[_IDENTIFIER]:
        return Change(paths, ())
    unknown = [key for key in _CLUSTER_KEYS if has_unknown(new.get(key))]
    if unknown:
        return Change(tuple(unknown[:1]), (*replaces, *unknown[:1]))
    before, after = _active_cluster(old), _active_cluster(new)
    if before is not None and after is not None and before != after:
        replaces += [key for key in _CLUSTER_KEYS if old.get(key) != new.get(key)]
    if old.get("renderYamlToDirectory") != new.get("renderYamlToDirectory"):
        replaces.append("renderYamlToDirectory")
    return Change(paths, tuple(replaces))


def _active_cluster(config: Inputs) -> Any:
    """Return the cluster's entry in the kubeconfig, as `getActiveClusterFromConfig` in util.go finds it, or None."""
    document = yaml.safe_load(config.get("kubeconfig") or "") or {}
    if not isinstance(document, dict):
        return None
    contexts = {item["name"]: item["context"] for item in document.get("contexts") or ()}
    context = contexts.get(config.get("context") or document.get("current-context"))
    clusters = {item["name"]: item["cluster"] for item in document.get("clusters") or ()}
    return clusters.get(config.get("cluster") or context["cluster"]) if context else None
