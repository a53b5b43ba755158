"""The fabric measured by the job's own image on the job's own nodes, before the training."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.launchers.job import indexed_job
from workloads.objects.arguments import launch
from workloads.objects.common import component_labels, headless_service
from workloads.objects.names import Manifest

NETCHECK = "netcheck"


def manifests(facts: Facts) -> list[Manifest]:
    """The service of the pods' names and the Job, which fails where the fabric is slow or another one."""
    wanted = facts.job.netcheck
    labels = component_labels(facts, NETCHECK)
    command = [NETCHECK]
    if wanted.min_gb_per_s:
        command.append(f"--min-gb-per-s={wanted.min_gb_per_s:g}")
    if facts.fabric.expected_log:
        command.append(f"--expect-log={facts.fabric.expected_log}")

    def args(name: str) -> list[str]:
        return launch(facts, name, f"{name}-0.{NETCHECK}", command)

    job = indexed_job(
        facts,
        NETCHECK,
        labels,
        args,
        config_map=None,
        subdomain=NETCHECK,
        waited=wanted.gate,
        deadline_seconds=wanted.timeout_minutes * 60,
    )
    return [headless_service(facts, NETCHECK, labels), job]
