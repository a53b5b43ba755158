"""`TrainJob` of Kubeflow Trainer v2 with a `TrainingRuntime` of our own: the newer API, alpha, not elastic yet."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.launchers import Launched
from workloads.objects.arguments import TRAIN, queue_labels
from workloads.objects.common import NO_WAIT, manifest, training_labels
from workloads.objects.names import Manifest, hashed
from workloads.objects.pod import training_pod

_API = "trainer.kubeflow.org/v1alpha1"
#: The operator looks for a job and a container of this name, and for this label.
_NODE = "node"
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def launched(facts: Facts, config_map: str) -> Launched:
    """The runtime, which holds the pods, and the TrainJob, which starts them; the operator sets `PET_*` variables."""
    runtime_spec = _runtime_spec(facts, config_map)
    name = hashed(facts.job.run, runtime_spec)
    runtime = manifest(facts, _API, "TrainingRuntime", name, {"spec": runtime_spec}, labels=training_labels(facts))
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": facts.nodes, "numProcPerNode": facts.processes_per_node},
    }
    job = manifest(facts, _API, "TrainJob", name, {"spec": spec}, labels=training_labels(facts), annotations=NO_WAIT)
    job["metadata"]["labels"] |= queue_labels(facts)
    return Launched(job, (runtime,))


def _runtime_spec(facts: Facts, config_map: str) -> Manifest:
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
        # Present and empty: it makes the operator set torchrun's variables; how many processes is the TrainJob's.
        "mlPolicy": {"numNodes": facts.nodes, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [replicated],
                "failurePolicy": {"maxRestarts": facts.job.max_restarts},
            }
        },
    }
