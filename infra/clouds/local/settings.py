"""What a stack configures about a cluster that exists already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from infra.clouds.local import kubeconfig
from infra.config.checks import one_of
from infra.config.problems import Problem, fix_by_removing, fix_by_setting
from infra.config.settings import WORK_FOLDER, GpuSettings, Section, StackSettings, StorageSettings
from infra.contract import AccessMode


class KubeconfigSettings(Section):
    """Which cluster: unset, what kubectl would talk to (`$KUBECONFIG`, `~/.kube/config`, its current context)."""

    path: str | None = None
    context: str | None = None


class NodeSettings(GpuSettings):
    """The nodes that train; without GPUs they are any nodes and the trainer runs on CPU.

    `chart` is what is missing to make GPUs schedulable; "present" where `kubectl describe node` shows nvidia.com/gpu.
    """

    gpus_per_node: int = Field(0, ge=0, le=16)
    model: str = "none"
    hbm_gib_per_gpu: float = Field(0, ge=0)
    num_vcpus: int = Field(2, gt=0)
    memory_gib: float = Field(4, gt=0)
    shared_memory_gib: int = Field(1, gt=0)
    chart: Literal["present", "nvidia-device-plugin", "gpu-operator"] = "present"
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerate_taint: bool = True

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from super().problems()
        if self.chart != "present" and not self.gpus_per_node:
            legal = "gpu.gpus_per_node of at least 1, or gpu.chart present"
            yield Problem("gpu.chart", "needs GPUs", legal, fix_by_setting("gpu.gpus_per_node", 1), self.chart)
        if self.gpus_per_node and not self.hbm_gib_per_gpu:
            yield Problem(
                "gpu.hbm_gib_per_gpu", "unknown", "one GPU's memory", fix_by_setting("gpu.hbm_gib_per_gpu", 24), 0
            )


class Storage(StorageSettings):
    """A path on the node, or a storage class of the cluster; neither means the cluster's default class.

    A host path is shared only on a cluster of one node, where it must be writable for group 0 (`install -d -m 2775`),
    the group of the trainer's user. `bucket_uri` may be any bucket, or the storage's writable folder.
    """

    size_gib: int = Field(10, gt=0)
    host_path: str | None = Field(None, pattern="^/", examples=["/var/lib/torchrec"])
    storage_class: str | None = None
    access_mode: AccessMode = "ReadWriteOnce"
    bucket_uri: str = Field("file:///data/work", pattern=r"^(s3|abfs|gs|file)://.+", examples=["file:///data/work"])
    credentials_secret: str | None = None

    @property
    def keeps_claim(self) -> bool:
        """Whether destroy leaves the claim, and so its namespace; a host path stays on its node anyway."""
        return self.on_destroy == "keep" and self.host_path is None

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        if self.host_path and self.storage_class:
            legal = "one of storage.host_path and storage.storage_class"
            yield Problem(
                "storage.storage_class", "beside storage.host_path", legal, fix_by_removing("storage.storage_class")
            )
        folder, writable = self.bucket_uri.removeprefix("file://"), f"{self.mount_path.rstrip('/')}/{WORK_FOLDER}"
        inside = folder == writable or folder.startswith(writable + "/")
        if self.bucket_uri.startswith("file://") and not inside:
            wrong = f"outside {writable}, the one folder of the storage that a pod may write to"
            legal = f"file://{writable} or a folder in it"
            yield Problem(
                "storage.bucket_uri",
                wrong,
                legal,
                fix_by_setting("storage.bucket_uri", f"file://{writable}"),
                self.bucket_uri,
            )


class RegistrySettings(Section):
    """A registry that both this machine and the cluster reach; unset, `job.image` names an image that exists."""

    repository: str | None = None


class Settings(StackSettings):
    """All keys of a stack on an existing cluster."""

    kubeconfig: KubeconfigSettings = KubeconfigSettings()
    gpu: NodeSettings = NodeSettings()
    storage: Storage = Storage()
    registry: RegistrySettings = RegistrySettings()

    @property
    def gpus_per_node(self) -> int:
        """What the settings say of the nodes that exist."""
        return self.gpu.gpus_per_node

    @property
    def has_registry(self) -> bool:
        """Whether one was named."""
        return self.registry.repository is not None

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections, the kubeconfig's contexts included."""
        yield from super().problems()
        yield from self.storage.problems()
        try:
            found = kubeconfig.read(kubeconfig.locate(self.kubeconfig.path))
        except ValueError as error:
            key = "kubeconfig.path"
            yield Problem(
                key, str(error), "the path of a kubeconfig", fix_by_setting(key, "~/.kube/config"), self.kubeconfig.path
            )
            return
        key = "kubeconfig.context"
        if self.kubeconfig.context is not None:
            yield from one_of(key, self.kubeconfig.context, found.contexts)
        elif found.current not in found.contexts:
            example = found.contexts[0] if found.contexts else "<context>"
            yield Problem(
                key,
                f"not set, and {found.path} has no current context",
                " | ".join(found.contexts),
                fix_by_setting(key, example),
            )
