"""All objects of a stack's training, in the order of their creation."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.facts import Facts
from workloads.launchers import load
from workloads.objects import dataset, job_support, netcheck, queue, tensorboard
from workloads.objects.manifest import Manifest
from workloads.objects.network_policy import network_policy

#: Keys of `build_manifests` for the objects that others wait for.
ACCOUNT, QUOTA, NETWORK_POLICY, CONFIG = "account", "quota", "network-policy", "config"
DATASET, NETCHECK, JOB = "dataset", "netcheck", "job"


def build_manifests(facts: Facts) -> dict[str, Manifest]:
    """Return the objects by their logical names.

    The names depend on the settings only, never on a value that a cloud computes.
    """
    config = job_support.config_map(facts)
    found = {
        ACCOUNT: job_support.service_account(facts),
        QUOTA: job_support.resource_quota(facts),
        NETWORK_POLICY: network_policy(facts),
        CONFIG: config,
    }
    if facts.queued:
        found |= _by_kind("queue", queue.build(facts))
    if facts.monitored:
        found["monitor"] = job_support.pod_monitor(facts)
    if facts.job.tensorboard.enabled:
        found |= _by_kind("tensorboard", tensorboard.build(facts))
    if facts.job.dataset.source:
        found[DATASET] = dataset.build(facts)
    if facts.has_netcheck:
        service, job = netcheck.build(facts)
        found |= {"netcheck-service": service, NETCHECK: job}
    launched = load(facts.job.launcher).build(facts, config["metadata"]["name"])
    found |= _by_kind("job", launched.dependencies)
    if budget := job_support.disruption_budget(facts):
        found["budget"] = budget
    if launched.job is not None:
        found[JOB] = launched.job
    return found


def _by_kind(prefix: str, manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the objects by the names `<prefix>-<kind>`."""
    return {f"{prefix}-{item['kind'].lower()}": item for item in manifests}
