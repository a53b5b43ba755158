"""`TrainJob` of Kubeflow Trainer v2 with a `TrainingRuntime` of its own: a newer API, still alpha, not elastic yet."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.launchers import JobObjects
from workloads.objects.arguments import TRAIN, queue_labels
from workloads.objects.manifest import NO_WAIT, Manifest, build_manifest, hashed_name, training_labels
from workloads.objects.pod import training_pod

_API = "trainer.kubeflow.org/v1alpha1"
#: The operator requires a job and a container of this name, and this label.
_NODE = "node"
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def build(facts: Facts, config_map: str) -> JobObjects:
    """Return the runtime with the pods, and the TrainJob that starts them; the operator sets `PET_*` variables."""
    labels = training_labels(facts)
    runtime_spec = _runtime_spec(facts, config_map)
    name = hashed_name(facts.job.run, runtime_spec)
    runtime = build_manifest(facts, _API, "TrainingRuntime", name, {"spec": runtime_spec}, labels=labels)
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": facts.nodes, "numProcPerNode": facts.processes_per_node},
    }
    labels |= queue_labels(facts)
    job = build_manifest(facts, _API, "TrainJob", name, {"spec": spec}, labels=labels, annotations=NO_WAIT)
    return JobObjects(job, (runtime,))


def _runtime_spec(facts: Facts, config_map: str) -> Manifest:
    """Return the specification of the runtime."""
    pod = training_pod(
        facts, labels=training_labels(facts), container=_NODE, args=["launch", *TRAIN], config_map=config_map
    )
    pod["spec"]["restartPolicy"] = "OnFailure"
    replicated = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": _STEP},
            "spec": {"backoffLimit": facts.job.max_restarts, "template": pod},
        },
    }
    return {
        # An empty `torch` makes the operator set torchrun's variables; the TrainJob holds the number of processes.
        "mlPolicy": {"numNodes": facts.nodes, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [replicated],
                "failurePolicy": {"maxRestarts": facts.job.max_restarts},
            }
        },
    }
