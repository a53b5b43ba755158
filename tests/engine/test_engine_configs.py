"""Tests of the simulation: which changes of the Kubernetes provider's configuration replace its objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_configs import kubernetes_change
from engine_values import UNKNOWN


def config(server: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a Kubernetes provider."""
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "one", "user": "u"}}],
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    return {"kubeconfig": json.dumps(document), **more}


SAME = {"clusterIdentifier": "0123.eks"}


@pytest.mark.parametrize(
    ("old", "new", "replaces"),
    [
        (config("https://a"), config("https://b"), ("kubeconfig",)),
        (config("https://a"), {"kubeconfig": UNKNOWN}, ("kubeconfig",)),
        (config("https://a"), config("https://a", **SAME), ()),
        (config("https://a"), config("https://b", **SAME), ("kubeconfig",)),
        (config("https://a", **SAME), config("https://b", **SAME), ()),
        (config("https://a", **SAME), {"kubeconfig": UNKNOWN, **SAME}, ()),
        (config("https://a", **SAME), config("https://a", clusterIdentifier="other"), ("clusterIdentifier",)),
        (config("https://a", **SAME), config("https://a", clusterIdentifier=UNKNOWN), ("clusterIdentifier",)),
    ],
)
def test_another_cluster_replaces_every_object(
    old: dict[str, Any], new: dict[str, Any], replaces: tuple[str, ...]
) -> None:
    assert kubernetes_change(old, new).replaces == replaces


def test_other_credentials_replace_nothing() -> None:
    old = config("https://a")
    new = {"kubeconfig": old["kubeconfig"].replace('"t"', '"other"')}
    change = kubernetes_change(old, new)
    assert (change.paths, change.replaces) == (("kubeconfig",), ())
