"""Shared storage of an existing cluster: a path on its node, or a claim on a storage class."""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from infra.clouds.local.settings import Settings
from infra.components.volume import static_volume, volume_claim
from infra.contract import Storage


class LocalStorage(pulumi.ComponentResource):
    """The claim that training pods mount."""

    facts: Storage

    def __init__(
        self, name: str, settings: Settings, namespace: k8s.core.v1.Namespace, opts: pulumi.ResourceOptions
    ) -> None:
        super().__init__("torchrec-cloud:local:Storage", name, None, opts)
        chosen = settings.storage
        self.facts = Storage(
            claim_name="datasets",
            mount_path=chosen.mount_path,
            size_gib=chosen.size_gib,
            access_mode="ReadWriteMany" if chosen.host_path else chosen.access_mode,
        )
        child = pulumi.ResourceOptions(parent=self, retain_on_delete=chosen.keeps_claim)
        if chosen.host_path:
            source = k8s.core.v1.HostPathVolumeSourceArgs(path=chosen.host_path, type="DirectoryOrCreate")
            static_volume(name, self.facts, namespace.metadata.name, settings.labels, child, host_path=source)
        else:
            volume_claim(
                name, self.facts, namespace.metadata.name, settings.labels, child, storage_class=chosen.storage_class
            )
        self.register_outputs({"claim": self.facts.claim_name})
