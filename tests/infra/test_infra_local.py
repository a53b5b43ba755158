"""An existing cluster: what is registered on it, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from provider_mocks.recording import Recording

from infra.clouds.local import kubeconfig as reading

PV = "kubernetes:core/v1:PersistentVolume"
PVC = "kubernetes:core/v1:PersistentVolumeClaim"
NAMESPACE = "kubernetes:core/v1:Namespace"


def test_a_host_path_becomes_a_volume_that_kubernetes_never_deletes(stack: Callable[..., Recording]) -> None:
    recording = stack("local")
    spec = recording.one(PV).inputs["spec"]
    assert spec["hostPath"]["path"] == "/var/lib/torchrec-cloud"
    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert recording.one(PVC).inputs["spec"]["storageClassName"] == "", (
        "the default provisioner must not take the claim"
    )


def test_a_storage_class_needs_no_volume_of_ours(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"storage.host_path": None, "storage.storage_class": "fast"})
    assert recording.of_type(PV) == []
    assert recording.one(PVC).inputs["spec"]["storageClassName"] == "fast"


def test_without_either_the_clusters_default_class_is_used(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"storage.host_path": None})
    assert "storageClassName" not in recording.one(PVC).inputs["spec"]


@pytest.mark.parametrize(("on_destroy", "kept"), [("keep", True), ("delete", False)])
def test_a_claim_that_is_kept_keeps_its_namespace(stack: Callable[..., Recording], on_destroy: str, kept: bool) -> None:
    recording = stack("local", {"storage.host_path": None, "storage.on_destroy": on_destroy})
    assert recording.one(PVC).retained is kept
    assert recording.one(NAMESPACE).retained is kept, "deleting the namespace would delete the claim in it"


def test_up_does_not_wait_for_a_claim_that_binds_on_first_use(stack: Callable[..., Recording]) -> None:
    annotations = stack("local").one(PVC).inputs["metadata"]["annotations"]
    assert annotations["pulumi.com/skipAwait"] == "true"


def test_a_cpu_cluster_costs_nothing_and_gets_no_gpu_software(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"addons.monitoring": True})
    assert recording.exports["hourly_cost_usd"]["on_demand"] == 0
    assert {item.inputs["name"] for item in recording.of_type("kubernetes:helm.sh/v3:Release")} == {
        "kube-prometheus-stack"
    }


def test_gpus_without_a_plugin_get_the_chart_that_was_chosen(stack: Callable[..., Recording]) -> None:
    gpus = {"gpu.gpus_per_node": 8, "gpu.hbm_gib_per_gpu": 80, "gpu.chart": "gpu-operator"}
    releases = stack("local", gpus).of_type("kubernetes:helm.sh/v3:Release")
    assert {item.inputs["name"] for item in releases} == {"gpu-operator"}


def test_gpu_software_without_gpus_is_refused(stack: Callable[..., Recording]) -> None:
    assert "gpu.chart = 'gpu-operator': needs GPUs" in str(
        stack("local", {"gpu.chart": "gpu-operator"}, fails=True).error
    )


def test_only_the_chosen_context_leaves_the_kubeconfig(kubeconfig: Path) -> None:
    document = yaml.safe_load(reading.only(reading.read(kubeconfig), "lab"))
    assert document["current-context"] == "lab"
    assert [item["name"] for item in document["clusters"]] == ["lab"], (
        "other clusters' credentials are none of our business"
    )


def test_files_that_a_kubeconfig_names_are_found_from_anywhere(kubeconfig: Path) -> None:
    document = yaml.safe_load(reading.only(reading.read(kubeconfig), "laptop"))
    authority = document["clusters"][0]["cluster"]["certificate-authority"]
    assert authority == str((kubeconfig.parent / "ca.crt").resolve())
