"""Arguments of the trainer's container and labels of its job that the launchers share."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.facts import Facts
from workloads.objects.pod import CONFIG_DIR, CONFIG_FILE

RENDEZVOUS_PORT = 29400
#: Kueue's label: the job waits until there is capacity for all of its pods.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE = "training"

TRAIN = ("train", "--config", f"{CONFIG_DIR}/{CONFIG_FILE}")


def launch_arguments(facts: Facts, rendezvous_id: str, endpoint: str, command: Sequence[str]) -> list[str]:
    """Return the arguments of `trainer launch`; `endpoint` is the pod that hosts the rendezvous."""
    nodes = str(facts.nodes) if facts.min_nodes == facts.nodes else f"{facts.min_nodes}:{facts.nodes}"
    return [
        "launch",
        f"--nnodes={nodes}",
        f"--nproc={facts.processes_per_node}",
        f"--max-restarts={facts.job.max_restarts}",
        f"--rdzv-id={rendezvous_id}",
        f"--rdzv-endpoint={endpoint}:{RENDEZVOUS_PORT}",
        *command,
    ]


def queue_labels(facts: Facts) -> dict[str, str]:
    """Return the label of a job that Kueue admits; empty without Kueue."""
    return {QUEUE_LABEL: QUEUE} if facts.queued else {}
