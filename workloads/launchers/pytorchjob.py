"""`PyTorchJob` of the Kubeflow training operator v1: elastic; a lost worker is replaced while the others continue."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.launchers import JobObjects
from workloads.objects.arguments import TRAIN, queue_labels
from workloads.objects.manifest import NO_WAIT, build_manifest, hashed_name, training_labels
from workloads.objects.pod import training_pod


def build(facts: Facts, config_map: str) -> JobObjects:
    """Return the PyTorchJob; the operator adds the services and torchrun's options as `PET_*` variables."""
    labels = training_labels(facts)
    # The operator's webhook requires this container name.
    pod = training_pod(facts, labels=labels, container="pytorch", args=["launch", *TRAIN], config_map=config_map)
    spec = {
        # Without it torchrun starts one process on a node with eight GPUs.
        "nprocPerNode": str(facts.processes_per_node),
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": facts.min_nodes,
            "maxReplicas": facts.nodes,
            "maxRestarts": facts.job.max_restarts,
        },
        "pytorchReplicaSpecs": {
            "Worker": {"replicas": facts.nodes, "restartPolicy": "OnFailure", "template": pod},
        },
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": facts.job.max_restarts},
    }
    name = hashed_name(facts.job.run, spec)
    labels |= queue_labels(facts)
    body = {"spec": spec}
    job = build_manifest(facts, "kubeflow.org/v1", "PyTorchJob", name, body, labels=labels, annotations=NO_WAIT)
    return JobObjects(job)
