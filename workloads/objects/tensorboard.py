"""TensorBoard on the logs of all runs; reach it with `kubectl port-forward`."""

from __future__ import annotations

from workloads.facts import COMPONENT_LABEL, Facts
from workloads.objects.common import NO_WAIT, component_labels, manifest
from workloads.objects.names import Manifest
from workloads.objects.pod import helper_pod

TENSORBOARD = "tensorboard"
PORT = 6006


def manifests(facts: Facts) -> list[Manifest]:
    """The deployment, from the trainer's own image, and a service inside the cluster."""
    selector = {COMPONENT_LABEL: TENSORBOARD}
    runs = f"{facts.storage.work_path}/runs"
    container = {
        "name": TENSORBOARD,
        "command": [TENSORBOARD],
        "args": [f"--logdir={runs}", "--bind_all", f"--port={PORT}", "--load_fast=false"],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
    }
    pod = helper_pod(facts, component=TENSORBOARD, containers=[container], read_only=True)
    deployment = {"replicas": 1, "selector": {"matchLabels": selector}, "template": pod}
    service = {"selector": selector, "ports": [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}]}
    # Neither is waited for: the image may still be on its way to the nodes, and no training depends on it.
    return [
        manifest(
            facts,
            "apps/v1",
            "Deployment",
            TENSORBOARD,
            {"spec": deployment},
            labels=component_labels(facts, TENSORBOARD),
            annotations=NO_WAIT,
        ),
        manifest(
            facts,
            "v1",
            "Service",
            TENSORBOARD,
            {"spec": service},
            labels=component_labels(facts, TENSORBOARD),
            annotations=NO_WAIT,
        ),
    ]
