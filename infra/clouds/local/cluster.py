"""The Kubernetes provider of an existing cluster."""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from infra.clouds.local import kubeconfig
from infra.clouds.local.settings import KubeconfigSettings


class ExistingCluster(pulumi.ComponentResource):
    """One context of a kubeconfig, stored as a secret without the other contexts."""

    context: str
    kubeconfig: pulumi.Output[str]
    provider: k8s.Provider

    def __init__(self, name: str, settings: KubeconfigSettings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("torchrec-cloud:local:Cluster", name, None, opts)
        found = kubeconfig.read(kubeconfig.locate(settings.path))
        self.context = settings.context or found.current or ""
        self.kubeconfig = pulumi.Output.secret(kubeconfig.extract_context(found, self.context))
        self.provider = k8s.Provider(
            f"{name}-k8s",
            kubeconfig=self.kubeconfig,
            context=self.context,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.register_outputs({"context": self.context, "kubeconfig": self.kubeconfig})
