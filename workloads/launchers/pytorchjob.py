"""`PyTorchJob` of the Kubeflow training operator v1: elastic, a lost worker is replaced while the others go on."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.launchers import Launched
from workloads.objects.arguments import TRAIN, queue_labels
from workloads.objects.common import NO_WAIT, manifest, training_labels
from workloads.objects.names import hashed
from workloads.objects.pod import training_pod


def launched(facts: Facts, config_map: str) -> Launched:
    """The PyTorchJob; the operator adds the services and, as `PET_*` variables, what torchrun must know."""
    # The operator's webhook takes a container of this name only.
    pod = training_pod(
        facts,
        labels=training_labels(facts),
        container="pytorch",
        args=["launch", *TRAIN],
        config_map=config_map,
    )
    spec = {
        # Without it torchrun starts one process beside eight GPUs.
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
    job = manifest(
        facts,
        "kubeflow.org/v1",
        "PyTorchJob",
        hashed(facts.job.run, spec),
        {"spec": spec},
        labels=training_labels(facts),
        annotations=NO_WAIT,
    )
    job["metadata"]["labels"] |= queue_labels(facts)
    return Launched(job)
