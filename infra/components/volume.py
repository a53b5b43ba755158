"""A persistent volume over existing storage, and the claim that training pods mount."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi
import pulumi_kubernetes as k8s

from infra.contract import Storage


def static_volume(
    name: str,
    storage: Storage,
    namespace: pulumi.Input[str],
    labels: Mapping[str, str],
    opts: pulumi.ResourceOptions,
    *,
    csi: k8s.core.v1.CSIPersistentVolumeSourceArgs | None = None,
    nfs: k8s.core.v1.NFSVolumeSourceArgs | None = None,
    host_path: k8s.core.v1.HostPathVolumeSourceArgs | None = None,
    mount_options: Sequence[str] = (),
) -> tuple[k8s.core.v1.PersistentVolume, k8s.core.v1.PersistentVolumeClaim]:
    """Create a persistent volume over exactly one of the sources, and its claim `storage.claim_name`.

    The volume is retained, because Kubernetes must not delete data that Pulumi owns. An empty storage class prevents
    the cluster's default provisioner from handling the claim.
    """
    assert sum(source is not None for source in (csi, nfs, host_path)) == 1, "exactly one volume source"
    capacity = {"storage": f"{storage.size_gib}Gi"}
    volume = k8s.core.v1.PersistentVolume(
        f"{name}-pv",
        metadata=k8s.meta.v1.ObjectMetaArgs(labels=dict(labels)),
        spec=k8s.core.v1.PersistentVolumeSpecArgs(
            access_modes=[storage.access_mode],
            capacity=capacity,
            csi=csi,
            nfs=nfs,
            host_path=host_path,
            mount_options=list(mount_options) or None,
            persistent_volume_reclaim_policy="Retain",
            storage_class_name="",
        ),
        opts=opts,
    )
    # The API server resizes claims of dynamic volumes only. This claim is bound by name and always shows the volume's
    # whole size, so its request stays unchanged when the volume grows.
    fixed = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(ignore_changes=["spec.resources"]))
    claim = volume_claim(name, storage, namespace, labels, fixed, storage_class="", volume_name=volume.metadata.name)
    return volume, claim


def volume_claim(
    name: str,
    storage: Storage,
    namespace: pulumi.Input[str],
    labels: Mapping[str, str],
    opts: pulumi.ResourceOptions,
    *,
    storage_class: str | None,
    volume_name: pulumi.Input[str | None] = None,
) -> k8s.core.v1.PersistentVolumeClaim:
    """Create the claim that pods mount; `storage_class` None selects the cluster's default class."""
    # A class that binds on first use keeps the claim pending until a pod uses it: Pulumi would wait forever.
    metadata = k8s.meta.v1.ObjectMetaArgs(
        name=storage.claim_name,
        namespace=namespace,
        labels=dict(labels),
        annotations={"pulumi.com/skipAwait": "true"},
    )
    return k8s.core.v1.PersistentVolumeClaim(
        f"{name}-pvc",
        metadata=metadata,
        spec=k8s.core.v1.PersistentVolumeClaimSpecArgs(
            access_modes=[storage.access_mode],
            resources=k8s.core.v1.VolumeResourceRequirementsArgs(requests={"storage": f"{storage.size_gib}Gi"}),
            storage_class_name=storage_class,
            volume_name=volume_name,
        ),
        opts=opts,
    )
