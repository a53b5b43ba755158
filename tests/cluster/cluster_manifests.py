"""Small manifests for these tests: fake GPU nodes, and jobs of the same structure as the product's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def gpu_node(
    name: str, labels: Mapping[str, str] | None = None, resources: Mapping[str, str] | None = None
) -> Manifest:
    """Return a node of a GPU pool: label, taint, 8 GPUs and the devices of a fabric's plug-ins."""
    capacity = {"cpu": "192", "memory": "2000Gi", "pods": "110", "ephemeral-storage": "3000Gi", "nvidia.com/gpu": "8"}
    capacity |= {"vpc.amazonaws.com/efa": "32", "rdma/ib": "8", "hugepages-2Mi": "10Gi"}
    capacity |= resources or {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "nvidia.com/gpu.present": "true",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                **(labels or {}),
            },
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [GPU_TAINT]},
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def cpu_node(name: str) -> Manifest:
    """Return a node without GPUs, label and taint, for all other pods."""
    node = gpu_node(name)
    del node["metadata"]["labels"]["nvidia.com/gpu.present"], node["spec"]
    node["status"] = {
        key: {name: value for name, value in capacity.items() if "/" not in name and not name.startswith("huge")}
        for key, capacity in node["status"].items()
    }
    return node


def pod_template(container: str = "pytorch", *, gpus: int = 8, **annotations: str) -> Manifest:
    """Return a restricted pod that fills a GPU node; annotations control in kwok how it ends."""
    return {
        "metadata": {"annotations": {f"test/{key}": value for key, value in annotations.items()}},
        "spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
            "tolerations": [{"operator": "Equal", **GPU_TAINT}],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": container,
                    "image": "trainer:test",
                    "command": ["torchrun", "-m", "trainer"],
                    "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


def indexed_job(namespace: str, nodes: int, name: str = "train", **annotations: str) -> list[Manifest]:
    """Return a headless Service and an Indexed Job of one pod per node, like those of launcher `job`."""
    template = pod_template(**annotations)
    template["metadata"]["labels"] = {"job": name}
    template["spec"]["subdomain"] = name
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job": name}},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "completionMode": "Indexed",
                "completions": nodes,
                "parallelism": nodes,
                "backoffLimit": 6,
                "podFailurePolicy": {
                    "rules": [
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                    ]
                },
                "template": template,
            },
        },
    ]


def pytorchjob(namespace: str, nodes: int, container: str = "pytorch", **annotations: str) -> Manifest:
    """Return an elastic PyTorchJob with one worker per node and eight processes per worker."""
    template = pod_template(container, **annotations)
    del template["spec"]["restartPolicy"]
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train", "namespace": namespace},
        "spec": {
            "nprocPerNode": "8",
            "elasticPolicy": {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": nodes, "maxRestarts": 3},
            "pytorchReplicaSpecs": {"Worker": {"replicas": nodes, "restartPolicy": "OnFailure", "template": template}},
        },
    }


def trainjob(namespace: str, nodes: int, **annotations: str) -> list[Manifest]:
    """Return a TrainJob of Kubeflow Trainer v2 and its TrainingRuntime."""
    template = pod_template("node", **annotations)
    runtime = {
        "mlPolicy": {"numNodes": nodes, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                            "spec": {"template": template},
                        },
                    }
                ]
            }
        },
    }
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "metadata": {"name": "train", "namespace": namespace}}
    spec = {"runtimeRef": {"kind": "TrainingRuntime", "name": "train"}, "trainer": {"numProcPerNode": 8}}
    return [{**head, "kind": "TrainingRuntime", "spec": runtime}, {**head, "kind": "TrainJob", "spec": spec}]
