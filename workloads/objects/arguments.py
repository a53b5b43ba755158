"""What the trainer's container is told, whoever starts it."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.facts import Facts
from workloads.objects.pod import CONFIG_DIR, CONFIG_FILE

RENDEZVOUS_PORT = 29400
#: Kueue's label: the job waits until all of its pods have room at once.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE = "training"

TRAIN = ("train", "--config", f"{CONFIG_DIR}/{CONFIG_FILE}")


def launch(facts: Facts, identity: str, endpoint: str, command: Sequence[str]) -> list[str]:
    """`trainer launch`, which is torchrun with one line for a mistake: `endpoint` is the pod that keeps the store."""
    nodes = str(facts.nodes) if facts.min_nodes == facts.nodes else f"{facts.min_nodes}:{facts.nodes}"
    return [
        "launch",
        f"--nnodes={nodes}",
        f"--nproc={facts.processes_per_node}",
        f"--max-restarts={facts.job.max_restarts}",
        f"--rdzv-id={identity}",
        f"--rdzv-endpoint={endpoint}:{RENDEZVOUS_PORT}",
        *command,
    ]


def queue_labels(facts: Facts) -> dict[str, str]:
    """The label of a job that Kueue admits; none without Kueue."""
    return {QUEUE_LABEL: QUEUE} if facts.queued else {}
