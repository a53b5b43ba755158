"""A stack on an existing cluster: the resources it registers, and the kubeconfig it extracts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from provider_mocks.recording import Recording

from infra.clouds.local import kubeconfig as kubeconfigs

PV = "kubernetes:core/v1:PersistentVolume"
PVC = "kubernetes:core/v1:PersistentVolumeClaim"
NAMESPACE = "kubernetes:core/v1:Namespace"


def test_a_host_path_becomes_a_volume_that_kubernetes_does_not_delete(stack: Callable[..., Recording]) -> None:
    recording = stack("local")
    spec = recording.one(PV).inputs["spec"]
    assert spec["hostPath"]["path"] == "/var/lib/torchrec-cloud"
    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert recording.one(PVC).inputs["spec"]["storageClassName"] == "", (
        "the default provisioner must not bind the claim"
    )


def test_with_a_storage_class_the_stack_creates_no_volume(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"storage.host_path": None, "storage.storage_class": "fast"})
    assert recording.of_type(PV) == []
    assert recording.one(PVC).inputs["spec"]["storageClassName"] == "fast"


def test_without_host_path_and_storage_class_the_default_class_is_used(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"storage.host_path": None})
    assert "storageClassName" not in recording.one(PVC).inputs["spec"]


@pytest.mark.parametrize(("on_destroy", "kept"), [("keep", True), ("delete", False)])
def test_a_kept_claim_keeps_its_namespace(stack: Callable[..., Recording], on_destroy: str, kept: bool) -> None:
    recording = stack("local", {"storage.host_path": None, "storage.on_destroy": on_destroy})
    assert recording.one(PVC).retained is kept
    assert recording.one(NAMESPACE).retained is kept, "deleting the namespace would delete the claim in it"


def test_up_does_not_wait_for_a_claim_that_binds_on_first_use(stack: Callable[..., Recording]) -> None:
    annotations = stack("local").one(PVC).inputs["metadata"]["annotations"]
    assert annotations["pulumi.com/skipAwait"] == "true"


def test_a_cpu_cluster_costs_nothing_and_has_no_gpu_software(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"addons.monitoring": True})
    assert recording.exports["hourly_cost_usd"]["on_demand"] == 0
    assert {item.inputs["name"] for item in recording.of_type("kubernetes:helm.sh/v3:Release")} == {
        "kube-prometheus-stack"
    }


def test_the_chosen_gpu_chart_is_installed(stack: Callable[..., Recording]) -> None:
    gpus = {"gpu.gpus_per_node": 8, "gpu.hbm_gib_per_gpu": 80, "gpu.chart": "gpu-operator"}
    releases = stack("local", gpus).of_type("kubernetes:helm.sh/v3:Release")
    assert {item.inputs["name"] for item in releases} == {"gpu-operator"}


def test_a_gpu_chart_without_gpus_is_rejected(stack: Callable[..., Recording]) -> None:
    error = stack("local", {"gpu.chart": "gpu-operator"}, fails=True).error
    assert "gpu.chart: a chart for GPUs on a pool without GPUs: got 'gpu-operator'" in str(error)


def test_the_extracted_kubeconfig_has_only_the_chosen_context(kubeconfig: Path) -> None:
    document = yaml.safe_load(kubeconfigs.extract_context(kubeconfigs.read(kubeconfig), "lab"))
    assert document["current-context"] == "lab"
    assert [item["name"] for item in document["clusters"]] == ["lab"], (
        "the stack must not store credentials of other clusters"
    )


def test_the_extracted_kubeconfig_has_absolute_file_paths(kubeconfig: Path) -> None:
    document = yaml.safe_load(kubeconfigs.extract_context(kubeconfigs.read(kubeconfig), "laptop"))
    authority = document["clusters"][0]["cluster"]["certificate-authority"]
    assert authority == str((kubeconfig.parent / "ca.crt").resolve())
