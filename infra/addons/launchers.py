"""The operator that each launcher needs, and Kueue's integration with what it makes."""

from __future__ import annotations

import json

from infra.contract import ChartRequest

#: Launchers that are missing here run on plain Jobs.
_OPERATORS = {"pytorchjob": "training-operator", "trainjob": "kubeflow-trainer"}

#: What Kueue must watch for each launcher, by the names in its configuration.
_FRAMEWORKS = {
    "job": ["batch/job"],
    "torchx": ["batch/job"],
    "pytorchjob": ["kubeflow.org/pytorchjob"],
    "trainjob": ["trainer.kubeflow.org/trainjob", "jobset.x-k8s.io/jobset"],
}


def operator(launcher: str) -> ChartRequest | None:
    """The chart that serves the launcher's kind of job; None for plain Jobs."""
    key = _OPERATORS.get(launcher)
    return ChartRequest(key) if key else None


def kueue(launcher: str) -> ChartRequest:
    """Kueue watching the launcher's kind only, and no job that names no queue.

    The chart takes its configuration as one text, so all of it is given: the ports and the lease are the chart's own.
    """
    configuration = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443"},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        "manageJobsWithoutQueueName": False,
        "integrations": {"frameworks": _FRAMEWORKS[launcher]},
    }
    # JSON is YAML: no second writer is needed for a text that a person never edits.
    return ChartRequest(
        "kueue", {"managerConfig": {"controllerManagerConfigYaml": json.dumps(configuration, indent=2)}}
    )
