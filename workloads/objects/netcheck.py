"""The netcheck: a Job that measures the fabric with the training's image on the training's nodes."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.objects.arguments import launch_arguments
from workloads.objects.indexed_job import indexed_job
from workloads.objects.job_support import headless_service
from workloads.objects.manifest import Manifest, component_labels

NETCHECK = "netcheck"


def build(facts: Facts) -> list[Manifest]:
    """Return the service of the pods' names, and the Job, which fails if the fabric is slow or not the expected one."""
    settings = facts.job.netcheck
    labels = component_labels(facts, NETCHECK)
    command = [NETCHECK]
    if settings.min_gb_per_s:
        command.append(f"--min-gb-per-s={settings.min_gb_per_s:g}")
    if facts.fabric.expected_log:
        command.append(f"--expect-log={facts.fabric.expected_log}")

    def args(name: str) -> list[str]:
        """Return the container's arguments in a job with this name."""
        return launch_arguments(facts, name, f"{name}-0.{NETCHECK}", command)

    job = indexed_job(
        facts,
        NETCHECK,
        labels,
        args,
        config_map=None,
        subdomain=NETCHECK,
        await_completion=settings.gate,
        deadline_seconds=settings.timeout_minutes * 60,
    )
    return [headless_service(facts, NETCHECK, labels), job]
