"""TensorBoard on the logs of all runs; `python -m workloads tensorboard` opens it."""

from __future__ import annotations

from workloads.facts import COMPONENT_LABEL, Facts
from workloads.objects.manifest import NO_WAIT, Manifest, build_manifest, component_labels
from workloads.objects.pod import helper_pod

TENSORBOARD = "tensorboard"
PORT = 6006


def build(facts: Facts) -> list[Manifest]:
    """Return the Deployment, which uses the trainer's image, and its Service."""
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
    # Pulumi does not wait: the nodes may still pull the image, and no training depends on TensorBoard.
    labels = component_labels(facts, TENSORBOARD)

    def build_object(api_version: str, kind: str, spec: Manifest) -> Manifest:
        """Return one of the two objects."""
        body = {"spec": spec}
        return build_manifest(facts, api_version, kind, TENSORBOARD, body, labels=labels, annotations=NO_WAIT)

    return [build_object("apps/v1", "Deployment", deployment), build_object("v1", "Service", service)]
