"""Every object of a stack's training, in one place and in order: the pure heart of this package."""

from __future__ import annotations

from workloads import netcheck
from workloads.facts import Facts
from workloads.launchers import load
from workloads.objects import common as objects
from workloads.objects import dataset, queue, tensorboard
from workloads.objects.names import Manifest
from workloads.objects.network_policy import network_policy

#: Keys of `manifests` that others wait for.
ACCOUNT, CONFIG, DATASET, NETCHECK, JOB = "account", "config", "dataset", "netcheck", "job"


def manifests(facts: Facts) -> dict[str, Manifest]:
    """The objects by their logical names, in the order in which they are created.

    Which names there are depends on settings alone, never on what a cloud computes.
    """
    config = objects.config_map(facts)
    found = {
        ACCOUNT: objects.service_account(facts),
        "quota": objects.resource_quota(facts),
        "network-policy": network_policy(facts),
        CONFIG: config,
    }
    if facts.queued:
        found |= _named("queue", queue.manifests(facts))
    if facts.monitored:
        found["monitor"] = objects.pod_monitor(facts)
    if facts.job.tensorboard.enabled:
        found |= _named("tensorboard", tensorboard.manifests(facts))
    if facts.job.dataset.source:
        found[DATASET] = dataset.job(facts)
    if facts.job.netcheck.enabled:
        service, job = netcheck.manifests(facts)
        found |= {"netcheck-service": service, NETCHECK: job}
    launched = load(facts.job.launcher).launched(facts, config["metadata"]["name"])
    found |= _named("job", launched.before)
    found["budget"] = objects.disruption_budget(facts)
    if launched.job is not None:
        found[JOB] = launched.job
    return found


def _named(prefix: str, objects_of_one: list[Manifest] | tuple[Manifest, ...]) -> dict[str, Manifest]:
    return {f"{prefix}-{item['kind'].lower()}": item for item in objects_of_one}
