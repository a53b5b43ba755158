"""The operator that each launcher needs, and Kueue's integration with its jobs."""

from __future__ import annotations

import json

from infra.contract import ChartRequest

#: Launchers without an operator use plain Jobs.
_OPERATORS = {"pytorchjob": "training-operator", "trainjob": "kubeflow-trainer"}

#: The kinds that Kueue must watch for each launcher, by their names in its configuration.
_FRAMEWORKS = {
    "job": ["batch/job"],
    "torchx": ["batch/job"],
    "pytorchjob": ["kubeflow.org/pytorchjob"],
    "trainjob": ["trainer.kubeflow.org/trainjob", "jobset.x-k8s.io/jobset"],
}


def operator(launcher: str) -> ChartRequest | None:
    """Return the chart of the launcher's operator, None for plain Jobs."""
    key = _OPERATORS.get(launcher)
    return ChartRequest(key) if key else None


def kueue(launcher: str) -> ChartRequest:
    """Return Kueue, configured to manage only the launcher's kind of job, and only jobs that name a queue.

    The chart takes its configuration as one string, so this is all of it; ports and lease are the chart's defaults.
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
    # JSON is valid YAML.
    return ChartRequest(
        "kueue", {"managerConfig": {"controllerManagerConfigYaml": json.dumps(configuration, indent=2)}}
    )
