"""Quotas of an account and how much of them is in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from infra.clouds.aws.doctor.clients import Clients


def find_quota(clients: Clients, service: str, code: str) -> Mapping[str, Any]:
    """Return the account's quota, or the default where the account never requested an increase."""
    quotas = clients("service-quotas")
    try:
        found: Mapping[str, Any] = quotas.get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    except quotas.exceptions.NoSuchResourceException:
        found = quotas.get_aws_default_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    return found


def count_used_vcpus(clients: Clients, classes: str, *, spot: bool, own_cluster: str | None) -> int:
    """Count the vCPUs of running instances of some classes, without those of the stack's own cluster.

    `classes` are first letters of instance types, such as "acd", or the first two characters of one type, such as "p4".
    """
    running: Counter[str] = Counter()
    for instance in _running_instances(clients):
        kind = str(instance["InstanceType"])
        in_class = kind.startswith(classes) if len(classes) <= 2 else kind[:1] in classes
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        is_own = own_cluster is not None and tags.get("eks:cluster-name") == own_cluster
        if in_class and not is_own and (instance.get("InstanceLifecycle") == "spot") == spot:
            running[kind] += 1
    vcpus = find_vcpus(clients, sorted(running)) if running else {}
    return sum(count * vcpus[kind] for kind, count in running.items())


def find_vcpus(clients: Clients, kinds: list[str]) -> dict[str, int]:
    """Return the default number of vCPUs by instance type, which quotas count for every instance."""
    pages = clients("ec2").get_paginator("describe_instance_types").paginate(InstanceTypes=kinds)
    return {
        str(item["InstanceType"]): int(item["VCpuInfo"]["DefaultVCpus"])
        for page in pages
        for item in page["InstanceTypes"]
    }


def _running_instances(clients: Clients) -> Iterator[Mapping[str, Any]]:
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    for page in clients("ec2").get_paginator("describe_instances").paginate(Filters=states):
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]
