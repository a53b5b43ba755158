"""Operators on any cluster: which are installed, with which values and in which order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
import pytest
from provider_mocks.recording import PROJECT, Recording, record

from infra import catalog
from infra.addons import fabric, gpu, launchers, monitoring
from infra.addons.addons import Addons
from infra.contract import (
    GPU_LABEL,
    GPU_TAINT,
    ChartRequest,
    Cluster,
    Fabric,
    GpuPool,
    Identity,
    Registry,
    Storage,
    Toleration,
)
from infra.monitoring.board import dashboard
from infra.outputs import export_all
from infra.stack import parse

SPOT = Toleration("example.com/spot", "spot")
RELEASE = "kubernetes:helm.sh/v3:Release"


def _cluster(
    gpu_chart: ChartRequest | None, fabric_chart: ChartRequest | None, exports_metrics: bool = False
) -> Cluster:
    provider = k8s.Provider("provider", kubeconfig="{}")
    pool = GpuPool(
        instance=catalog.instances()[0],
        num_nodes_min=0,
        num_nodes_desired=2,
        num_nodes_max=2,
        node_selector=GPU_LABEL,
        tolerations=(GPU_TAINT, SPOT),
        resource_limits={"nvidia.com/gpu": "8"},
        shared_memory_gib=8,
        chart=gpu_chart,
        exports_metrics=exports_metrics,
    )
    return Cluster(
        name="c",
        kubeconfig=pulumi.Output.secret("{}"),
        provider=provider,
        namespace="training",
        gpu=pool,
        fabric=Fabric("f", chart=fabric_chart),
        storage=Storage("datasets", "/data", 1, "ReadWriteMany"),
        identity=Identity(),
        bucket_uri="s3://b",
        checkpoint_uri="s3://b/checkpoints",
        registry=Registry(None),
        labels={"owner": "me"},
        before_operators=(provider,),
    )


@pytest.fixture
def install() -> Callable[..., Recording]:
    """Return a function that records the add-ons of one cluster and a job that depends on them."""

    def run(launcher: str = "job", monitored: bool = False, queued: bool = False, **cluster: Any) -> Recording:
        def program() -> None:
            target = _cluster(
                cluster.get("gpu_chart"), cluster.get("fabric_chart"), cluster.get("exports_metrics", False)
            )
            addons = Addons("a", target, launcher=launcher, monitored=monitored, queued=queued)
            k8s.core.v1.ConfigMap("job", data={}, opts=pulumi.ResourceOptions(depends_on=list(addons.ready)))

        recording = record(program, {}, "test")
        if recording.error:
            raise recording.error
        return recording

    return run


def _releases(recording: Recording) -> set[str]:
    return {item.inputs["name"] for item in recording.of_type(RELEASE)}


def test_a_cluster_without_needs_gets_no_operators(install: Callable[..., Recording]) -> None:
    recording = install()
    assert [item.type for item in recording.registrations if item.name.startswith("a-")] == []


@pytest.mark.parametrize(
    ("launcher", "release", "kustomization"),
    [("job", set(), 0), ("torchx", set(), 0), ("trainjob", {"kubeflow-trainer"}, 0), ("pytorchjob", set(), 1)],
)
def test_only_the_launchers_operator_is_installed(
    install: Callable[..., Recording], launcher: str, release: set[str], kustomization: int
) -> None:
    recording = install(launcher)
    assert _releases(recording) == release
    assert len(recording.of_type("kubernetes:kustomize/v2:Directory")) == kustomization


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("launcher", ["trainjob", "pytorchjob"])
def test_a_job_is_destroyed_before_every_operator(
    install: Callable[..., Recording], launcher: str, queued: bool
) -> None:
    recording = install(launcher, monitored=True, queued=queued)
    job = recording.one("kubernetes:core/v1:ConfigMap", "job")
    operators = recording.of_type(RELEASE) + recording.of_type("kubernetes:kustomize/v2:Directory")
    assert operators
    assert all(recording.needs(job, operator) for operator in operators), (
        "an operator that is deleted first leaves finalizers behind"
    )


def test_custom_resources_are_destroyed_before_their_operator(install: Callable[..., Recording]) -> None:
    recording = install(fabric_chart=fabric.network_operator())
    policy = recording.one("kubernetes:mellanox.com/v1alpha1:NicClusterPolicy")
    operator = recording.one(RELEASE)
    namespace = recording.one("kubernetes:core/v1:Namespace")
    assert recording.needs(policy, operator)
    assert recording.needs(operator, namespace)
    assert not recording.needs(operator, policy), "this test must be able to fail"


def test_the_fabrics_driver_is_installed_before_the_gpus(install: Callable[..., Recording]) -> None:
    operator = gpu.gpu_operator((GPU_TAINT,), installs_driver=True, finds_features=False, rdma=True)
    recording = install(gpu_chart=operator, fabric_chart=fabric.network_operator())
    by_name = {item.inputs["name"]: item for item in recording.of_type(RELEASE)}
    assert recording.needs(by_name["gpu-operator"], by_name["network-operator"])
    assert by_name["gpu-operator"].inputs["values"]["nfd"] == {"enabled": False}, "two feature discoveries conflict"


def test_the_gpu_exporter_uses_the_runtime_of_an_operator_that_installs_the_driver(
    install: Callable[..., Recording],
) -> None:
    operator = gpu.gpu_operator((GPU_TAINT,), installs_driver=True, finds_features=True, rdma=False)
    recording = install(monitored=True, gpu_chart=operator)
    by_name = {item.inputs["name"]: item for item in recording.of_type(RELEASE)}
    exporter = by_name["dcgm-exporter"]
    assert exporter.inputs["values"]["runtimeClassName"] == "nvidia", "it requests no GPU, so CDI would give it none"
    assert recording.needs(exporter, by_name["gpu-operator"]), "the operator creates the RuntimeClass"


@pytest.mark.parametrize(
    "chart",
    [
        None,
        gpu.device_plugin((GPU_TAINT,)),
        gpu.gpu_operator((GPU_TAINT,), installs_driver=False, finds_features=True, rdma=False),
    ],
)
def test_the_gpu_exporter_uses_the_default_runtime_of_a_node_image_with_a_driver(
    install: Callable[..., Recording], chart: ChartRequest | None
) -> None:
    recording = install(monitored=True, gpu_chart=chart)
    by_name = {item.inputs["name"]: item for item in recording.of_type(RELEASE)}
    assert "runtimeClassName" not in by_name["dcgm-exporter"].inputs["values"]


def test_operators_depend_on_the_nodes(install: Callable[..., Recording]) -> None:
    recording = install("trainjob")
    assert recording.needs(recording.one(RELEASE), recording.one("pulumi:providers:kubernetes"))


def test_kueue_is_installed_after_the_operator_whose_jobs_it_watches(install: Callable[..., Recording]) -> None:
    recording = install("pytorchjob", queued=True)
    assert recording.needs(recording.one(RELEASE), recording.one("kubernetes:kustomize/v2:Directory"))


@pytest.mark.parametrize(
    ("launcher", "watched"),
    [("job", "batch/job"), ("pytorchjob", "kubeflow.org/pytorchjob"), ("trainjob", "trainer.kubeflow.org/trainjob")],
)
def test_kueue_watches_the_launchers_kind_of_job(launcher: str, watched: str) -> None:
    values: Any = launchers.kueue(launcher).values
    configuration = json.loads(values["managerConfig"]["controllerManagerConfigYaml"])
    assert watched in configuration["integrations"]["frameworks"]
    assert configuration["manageJobsWithoutQueueName"] is False, "operators' own jobs must not wait for a queue"


def test_monitoring_installs_prometheus_the_gpu_exporter_and_the_dashboard(install: Callable[..., Recording]) -> None:
    recording = install(monitored=True)
    assert _releases(recording) == {"kube-prometheus-stack", "dcgm-exporter"}
    board = recording.one("kubernetes:core/v1:ConfigMap", "a-dashboard")
    assert board.inputs["metadata"]["labels"] == {"grafana_dashboard": "1"}, "Grafana's sidecar finds it by this label"


def test_a_cluster_that_exports_gpu_metrics_gets_no_second_exporter(install: Callable[..., Recording]) -> None:
    assert _releases(install(monitored=True, exports_metrics=True)) == {"kube-prometheus-stack"}


def test_prometheus_uses_monitors_of_other_releases() -> None:
    values: Any = monitoring.prometheus_stack().values
    spec = values["prometheus"]["prometheusSpec"]
    assert spec["podMonitorSelectorNilUsesHelmValues"] is False, "the trainer's PodMonitor is not part of this release"


def test_the_dashboard_shows_training_and_gpus() -> None:
    board: Any = dashboard()
    queries = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    assert "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" in queries
    assert "trainer_samples_per_second" in queries
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("request_of", [gpu.device_plugin, fabric.efa_device_plugin])
def test_a_device_plugin_tolerates_every_taint_of_its_pool(request_of: Callable[..., ChartRequest]) -> None:
    values: Any = request_of((GPU_TAINT, SPOT)).values
    assert values["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
        {"key": "example.com/spot", "operator": "Equal", "value": "spot", "effect": "NoSchedule"},
    ], "the charts' defaults leave spot nodes without a plugin, and so without GPUs"


def test_feature_discovery_and_drivers_tolerate_a_spot_taint() -> None:
    network = fabric.network_operator(tolerations=(GPU_TAINT, SPOT))
    alone = gpu.gpu_operator((GPU_TAINT, SPOT), installs_driver=True, finds_features=True, rdma=False)
    for request in (network, alone):
        values: Any = request.values
        assert SPOT.manifest in values["node-feature-discovery"]["worker"]["tolerations"], "no label, so no driver"
    policy: Any = network.resources[0].spec
    assert SPOT.manifest in policy["tolerations"], "the InfiniBand driver's DaemonSet would not run on spot nodes"


def test_one_rdma_device_is_advertised_for_each_virtual_function() -> None:
    policy = fabric.network_operator("ib").resources[0]
    plugin: Any = policy.spec["sriovDevicePlugin"]
    (resource,) = json.loads(plugin["config"])["resourceList"]
    assert (resource["resourcePrefix"], resource["resourceName"]) == ("rdma", "ib")


def test_pulumi_creates_every_namespace_with_a_pod_security_level(install: Callable[..., Recording]) -> None:
    recording = install("trainjob", monitored=True, queued=True, gpu_chart=gpu.device_plugin((GPU_TAINT,)))
    namespaces = recording.of_type("kubernetes:core/v1:Namespace")
    created = {item.inputs["metadata"]["name"]: item.inputs["metadata"]["labels"] for item in namespaces}
    used = {item.inputs["namespace"] for item in recording.of_type(RELEASE)} - {"kube-system"}
    assert used == set(created), "a namespace that Helm creates remains after destroy"
    assert all(labels["pod-security.kubernetes.io/enforce"] and labels["owner"] == "me" for labels in created.values())
    assert created["nvidia-device-plugin"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_a_kubeconfig_in_plain_text_is_exported_as_a_secret(kubeconfig: Path) -> None:
    config = {f"{PROJECT}:cloud": "local", f"{PROJECT}:tags": '{"owner": "me", "cost_centre": "tests"}'}
    settings = parse(config, PROJECT, "test", {}).settings

    def program() -> None:
        plain = dataclasses.replace(_cluster(None, None), kubeconfig=pulumi.Output.from_input("{}"))
        export_all(plain, settings)

    assert "kubeconfig" in record(program, {}, "test").secret_exports
