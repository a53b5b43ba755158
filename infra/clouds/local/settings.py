"""The settings of a stack on an existing cluster, and their validation."""

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
    """The cluster to use; defaults to kubectl's: `$KUBECONFIG` or `~/.kube/config`, and its current context."""

    path: str | None = None
    context: str | None = None


class Gpu(GpuSettings):
    """The nodes that train; without GPUs these are any nodes, and the trainer runs on their CPUs.

    `chart` is the chart to install so that GPUs become schedulable; "present" if nodes already advertise
    nvidia.com/gpu, which `kubectl describe node` shows.
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
        """Yield problems across this section's keys."""
        yield from super().problems()
        if self.chart != "present" and not self.gpus_per_node:
            allowed = "gpu.gpus_per_node of at least 1, or gpu.chart present"
            fix = fix_by_setting("gpu.gpus_per_node", 1)
            yield Problem("gpu.chart", "a chart for GPUs on a pool without GPUs", allowed, fix, self.chart)
        if self.gpus_per_node and not self.hbm_gib_per_gpu:
            key = "gpu.hbm_gib_per_gpu"
            yield Problem(key, "missing", "the memory of one GPU in GiB", fix_by_setting(key, 24), 0)


class Storage(StorageSettings):
    """A path on the node, or a storage class of the cluster; by default the cluster's default class.

    A host path is shared only on a cluster of one node. It must be writable for group 0, the group of the trainer's
    user (`install -d -m 2775`). `bucket_uri` may be any bucket, or the storage's writable folder.
    """

    size_gib: int = Field(10, gt=0)
    host_path: str | None = Field(None, pattern="^/", examples=["/var/lib/torchrec"])
    storage_class: str | None = None
    access_mode: AccessMode = "ReadWriteOnce"
    bucket_uri: str = Field("file:///data/work", pattern=r"^(s3|abfs|gs|file)://.+", examples=["file:///data/work"])
    credentials_secret: str | None = None

    @property
    def keeps_claim(self) -> bool:
        """Return whether destroy keeps the claim and its namespace; a host path always stays on its node."""
        return self.on_destroy == "keep" and self.host_path is None

    def problems(self) -> Iterable[Problem]:
        """Yield problems across this section's keys."""
        if self.host_path and self.storage_class:
            key, allowed = "storage.storage_class", "either storage.host_path or storage.storage_class"
            yield Problem(key, "set together with storage.host_path", allowed, fix_by_removing(key))
        folder, writable = self.bucket_uri.removeprefix("file://"), f"{self.mount_path.rstrip('/')}/{WORK_FOLDER}"
        inside = folder == writable or folder.startswith(writable + "/")
        if self.bucket_uri.startswith("file://") and not inside:
            key, allowed = "storage.bucket_uri", f"file://{writable} or a folder in it"
            message = f"outside {writable}, the only folder of the storage that a pod may write to"
            yield Problem(key, message, allowed, fix_by_setting(key, f"file://{writable}"), self.bucket_uri)


class RegistrySettings(Section):
    """A registry that this machine and the cluster can reach; if unset, `job.image` names an existing image."""

    repository: str | None = None


class Settings(StackSettings):
    """All keys of a stack on an existing cluster."""

    kubeconfig: KubeconfigSettings = KubeconfigSettings()
    gpu: Gpu = Gpu()
    storage: Storage = Storage()
    registry: RegistrySettings = RegistrySettings()

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs that the settings state for each node."""
        return self.gpu.gpus_per_node

    @property
    def has_registry(self) -> bool:
        """Return whether the settings name a registry."""
        return self.registry.repository is not None

    def problems(self) -> Iterable[Problem]:
        """Yield problems across sections, including the kubeconfig's."""
        yield from super().problems()
        yield from self.storage.problems()
        yield from self._kubeconfig_problems()

    def _kubeconfig_problems(self) -> Iterable[Problem]:
        """Check that the kubeconfig can be read and has the context."""
        try:
            found = kubeconfig.read(kubeconfig.locate(self.kubeconfig.path))
        except ValueError as error:
            key = "kubeconfig.path"
            fix = fix_by_setting(key, "~/.kube/config")
            yield Problem(key, str(error), "the path of a kubeconfig", fix, self.kubeconfig.path)
            return
        key = "kubeconfig.context"
        if self.kubeconfig.context is not None:
            yield from one_of(key, self.kubeconfig.context, found.contexts)
        elif found.current not in found.contexts:
            example = found.contexts[0] if found.contexts else "<context>"
            message, fix = f"not set, and {found.path} has no current context", fix_by_setting(key, example)
            yield Problem(key, message, " | ".join(found.contexts), fix)
