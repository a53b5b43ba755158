"""`batch/v1` Indexed Job with a headless service: needs no operator; the pod of index 0 hosts the rendezvous."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.launchers import JobObjects
from workloads.objects.arguments import TRAIN, launch_arguments, queue_labels
from workloads.objects.indexed_job import indexed_job
from workloads.objects.job_support import headless_service
from workloads.objects.manifest import training_labels


def build(facts: Facts, config_map: str) -> JobObjects:
    """Return the Job and the service that gives its pods names."""
    run, labels = facts.job.run, training_labels(facts)

    def args(name: str) -> list[str]:
        """Return the container's arguments in a job with this name."""
        return launch_arguments(facts, name, f"{name}-0.{run}", TRAIN)

    job = indexed_job(facts, run, labels, args, config_map=config_map, subdomain=run, await_completion=False)
    job["metadata"]["labels"] |= queue_labels(facts)
    return JobObjects(job, (headless_service(facts, run, labels),))
