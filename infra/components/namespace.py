"""The namespace of training jobs, created before the storage claim in it."""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from infra.contract import Fabric


def training_namespace(
    name: str, namespace: str, fabric: Fabric, labels: dict[str, str], opts: pulumi.ResourceOptions
) -> k8s.core.v1.Namespace:
    """Create a namespace whose Pod Security level admits the fabric's pods, and warns about less restricted ones."""
    level = fabric.pod_security
    security = {
        "pod-security.kubernetes.io/enforce": level,
        "pod-security.kubernetes.io/warn": "restricted" if level == "restricted" else "baseline",
    }
    metadata = k8s.meta.v1.ObjectMetaArgs(name=namespace, labels=labels | security)
    return k8s.core.v1.Namespace(f"{name}-namespace", metadata=metadata, opts=opts)
