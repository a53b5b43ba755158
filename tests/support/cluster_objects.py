"""Kubernetes objects of a run, for the tests of `python -m workloads`."""

from __future__ import annotations

import json
from typing import Any

from fake_cluster import FakeCluster

NAMESPACE, RUN, NAME = "training", "criteo", "criteo-1a2b3c4d"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PYTORCHJOBS = f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
TRAINJOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
WORKLOADS = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
NODES = "/api/v1/nodes"
COLLECTIONS = {"Job": JOBS, "PyTorchJob": PYTORCHJOBS, "TrainJob": TRAINJOBS}
OWNER = {
    "Job": "batch.kubernetes.io/job-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}
INDEX = {
    "Job": "batch.kubernetes.io/job-completion-index",
    "PyTorchJob": "training.kubeflow.org/replica-index",
    "TrainJob": "batch.kubernetes.io/job-completion-index",
}
LABELS = {"torchrec-cloud/run": RUN, "app.kubernetes.io/component": "training"}
GPU_TAINT = [{"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}]


def condition(kind: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": "True", **more}


def job(
    cluster: FakeCluster, kind: str = "Job", nodes: int = 2, *, conditions: list[Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """Add the run's job; `spec` extends the fields that its kind needs."""
    base: dict[str, Any] = {
        "Job": {"parallelism": nodes, "completions": nodes},
        "PyTorchJob": {"pytorchReplicaSpecs": {"Worker": {"replicas": nodes}}, "runPolicy": {"backoffLimit": 3}},
        "TrainJob": {"trainer": {"numNodes": nodes}},
    }[kind]
    body = {
        "metadata": {"name": NAME, "labels": dict(LABELS)},
        "spec": base | spec,
        "status": {"conditions": conditions or []},
    }
    return cluster.add(COLLECTIONS[kind], body)


def pod(
    cluster: FakeCluster,
    index: int = 0,
    phase: str = "Running",
    kind: str = "Job",
    *,
    name: str | None = None,
    container: dict[str, Any] | None = None,
    made: str = "2026-11-21T10:00:00Z",
    **status: Any,
) -> dict[str, Any]:
    """Add one pod of the run; `container` is its container's state, `status` adds fields of the status."""
    spec = {
        "containers": [
            {
                "name": "trainer",
                "image": "registry.example/trainer@sha256:abc",
                "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "64Gi"}},
            }
        ],
        "tolerations": GPU_TAINT,
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    }
    statuses = []
    if phase != "Pending" or container:
        state = {"running": {}} if container is None else container
        ready = phase == "Running" and container is None
        statuses = [
            {
                "name": "trainer",
                "ready": ready,
                "restartCount": 0,
                **({"state": state} if "state" not in state else state),
            }
        ]
    if phase != "Pending":
        spec["nodeName"] = f"gpu-{index}"
    metadata = {
        "name": name or f"{NAME}-{index}-x{index}y",
        "labels": {**LABELS, OWNER[kind]: NAME, INDEX[kind]: str(index)},
        "creationTimestamp": made,
    }
    body = {"phase": phase, "containerStatuses": statuses, **status}
    return cluster.add(PODS, {"metadata": metadata, "spec": spec, "status": body})


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def node(cluster: FakeCluster, name: str, gpus: int = 8) -> None:
    cluster.add(
        NODES, {"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "96"}}}
    )


def event(cluster: FakeCluster, about: str, reason: str, message: str, kind: str = "Warning") -> None:
    cluster.add(
        EVENTS,
        {
            "metadata": {"name": f"{about}.{reason}"},
            "involvedObject": {"name": about},
            "type": kind,
            "reason": reason,
            "message": message,
            "lastTimestamp": "2026-11-21T10:01:00Z",
        },
    )


def line(kind: str, **fields: Any) -> str:
    """Return one JSON line of the trainer."""
    return json.dumps({"event": kind, "time": 1_795_255_200.0, **fields})


TRAIN = {
    "step": 340,
    "position": 2_785_280,
    "loss": 0.4321,
    "ne": 0.81,
    "auc": 0.7654,
    "samples_per_second": 1_234_567.0,
    "memory_gib": 41.5,
}
