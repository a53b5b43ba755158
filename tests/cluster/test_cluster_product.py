"""The product's own manifests for every cloud and launcher on a real control plane with the real operators.

They come from the golden files of `tests/workloads`, whose tests compare them with the program's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster_build
import pytest
import yaml
from cluster_manifests import cpu_node, gpu_node
from cluster_operators import JOBSET, PYTORCHJOB, TRAINER, Operator
from cluster_plane import Plane, wait_for
from test_cluster_jobs import bound, condition, pods, waiting

Manifest = dict[str, Any]
GOLDEN = Path(__file__).resolve().parents[1] / "workloads" / "golden"
STACKS = sorted(path.stem for path in GOLDEN.glob("*.yaml") if "-" not in path.stem)
JOBS = sorted(path.stem for path in GOLDEN.glob("*-*.yaml"))


def golden(name: str, namespace: str) -> dict[str, Manifest]:
    """Return the manifests of a golden file by their keys, moved to a test's namespace."""
    found: dict[str, Manifest] = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    for item in found.values():
        if "namespace" in item["metadata"]:
            item["metadata"]["namespace"] = namespace
    return found


def template(job: Manifest) -> Manifest:
    """Return the pod template of an Indexed Job or a PyTorchJob."""
    spec = job["spec"]
    found: Manifest = spec["template"] if "template" in spec else spec["pytorchReplicaSpecs"]["Worker"]["template"]
    return found


def with_end(job: Manifest, **annotations: str) -> Manifest:
    """Return the job with annotations that control in kwok how its pods end."""
    metadata = template(job)["metadata"]
    metadata["annotations"] = metadata.get("annotations", {}) | {f"test/{key}": to for key, to in annotations.items()}
    return job


def claim(namespace: str) -> list[Manifest]:
    """Return the volume and the claim of the shared storage that every pod mounts."""
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": namespace}
    size = {"storage": "1Gi"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": namespace},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "capacity": size,
                "hostPath": {"path": "/data"},
                "storageClassName": "",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "datasets", "namespace": namespace},
            "spec": {**spec, "resources": {"requests": size}},
        },
    ]


@pytest.fixture(scope="module")
def kinds(plane: Plane, operators: Callable[[Operator], None]) -> None:
    """Install all kinds of the product: three operators with webhooks, and the CRDs of Kueue and Prometheus."""
    for operator in (PYTORCHJOB, JOBSET, TRAINER):
        operators(operator)
    kueue = cluster_build.source("crds", "sigs.k8s.io/kueue") / "config" / "components" / "crd" / "bases"
    prometheus = cluster_build.source("crds", "github.com/prometheus-operator/prometheus-operator")
    monitor = prometheus / "example" / "prometheus-operator-crd" / "monitoring.coreos.com_podmonitors.yaml"
    plane.kubectl("apply", "--server-side", f"--filename={kueue}", f"--filename={monitor}")
    plane.wait_for_crds()


def matching_node(job: Manifest) -> Callable[[str], Manifest]:
    """Return a builder of nodes for this job: with the labels that it selects and the devices that a pod requests."""
    spec = template(job)["spec"]
    limits = {key: value for key, value in spec["containers"][0]["resources"]["limits"].items() if key != "memory"}
    return lambda name: gpu_node(name, spec["nodeSelector"], limits)


@pytest.mark.parametrize("name", JOBS)
def test_a_launchers_objects_are_accepted_and_its_job_starts(
    plane: Plane, open_namespace: str, kinds: None, name: str
) -> None:
    companions = golden(name.split("-")[0], open_namespace)
    launched = golden(name, open_namespace)
    before = [item for key, item in launched.items() if key != "job"]
    plane.apply([companions["account"], companions["config"], companions["quota"], *before])
    plane.apply([launched["job"]])
    wait_for("pods of the job", lambda: pods(plane, open_namespace))
    refused = [
        event["message"]
        for event in plane.get("events", "--namespace", open_namespace)
        if event["reason"] in ("FailedCreate", "FailedCreatePod")
    ]
    assert refused == [], "a controller could not create an object of the job"


@pytest.mark.parametrize("name", STACKS)
def test_a_stacks_companions_are_accepted(plane: Plane, open_namespace: str, kinds: None, name: str) -> None:
    found = golden(name, open_namespace)
    assert {item["kind"] for item in found.values()} >= {"NetworkPolicy", "ResourceQuota", "PodMonitor", "ClusterQueue"}
    plane.apply(list(found.values()))
    cluster_wide = [item for item in found.values() if "namespace" not in item["metadata"]]
    for item in cluster_wide:
        plane.kubectl("delete", item["kind"].lower(), item["metadata"]["name"])


def test_each_pod_of_a_gpu_stacks_job_has_a_node_with_all_its_devices(
    plane: Plane, open_namespace: str, gpu_nodes: Callable[..., list[str]]
) -> None:
    companions, launched = golden("aws", open_namespace), golden("aws-job", open_namespace)
    job = with_end(launched["job"], end="never")
    count = job["spec"]["completions"]
    nodes = gpu_nodes(count, matching_node(job))
    plane.apply([*claim(open_namespace), companions["account"], companions["config"], companions["quota"]])
    plane.apply([*(item for key, item in launched.items() if key != "job"), job])
    placed = wait_for("placed pods", lambda: len(found := bound(plane, open_namespace)) == count and found)
    name = job["metadata"]["name"]
    assert sorted(placed) == [f"{name}-{number}" for number in range(count)]
    assert sorted(placed.values()) == nodes
    arguments = template(job)["spec"]["containers"][0]["args"]
    assert any(f"{name}-0.{template(job)['spec']['subdomain']}:" in each for each in arguments), (
        "the rendezvous endpoint must be an existing pod"
    )


def test_the_job_waits_for_gpus_if_a_node_is_missing(
    plane: Plane, open_namespace: str, gpu_nodes: Callable[..., list[str]]
) -> None:
    companions, launched = golden("aws", open_namespace), golden("aws-job", open_namespace)
    job = with_end(launched["job"], end="never")
    gpu_nodes(1, matching_node(job))
    plane.apply([*claim(open_namespace), companions["account"], companions["config"], companions["quota"]])
    plane.apply([*(item for key, item in launched.items() if key != "job"), job])
    # Until the claim is bound, the scheduler names the claim first.
    messages = lambda: [each for each in waiting(plane, open_namespace) if "Insufficient nvidia.com/gpu" in each]  # noqa: E731
    wait_for("one pod that waits for GPUs", lambda: len(messages()) == 1)


def test_a_local_job_passes_the_restricted_level_and_completes(
    plane: Plane, namespace: str, gpu_nodes: Callable[..., list[str]]
) -> None:
    companions, launched = golden("local", namespace), golden("local-job", namespace)
    gpu_nodes(2, cpu_node)
    plane.apply([*claim(namespace), companions["account"], companions["config"], companions["quota"]])
    plane.apply(list(launched.values()))
    name = launched["job"]["metadata"]["name"]
    job = lambda: plane.get("job", name, "--namespace", namespace)  # noqa: E731
    wait_for("completed job", lambda: condition(job(), "Complete").get("status") == "True")
    plane.kubectl("delete", "persistentvolume", namespace, "--wait=false")
