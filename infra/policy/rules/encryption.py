"""Rule encryption-at-rest: whatever can be left unencrypted is encrypted.

Buckets, registries and file systems that their service always encrypts have no check.
"""

from __future__ import annotations

from collections.abc import Iterable

from infra.policy import facts
from infra.policy.rule import Config, resource_rule
from infra.policy_facts import Resource


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Yield the violations of one resource."""
    del config
    return facts.violations(resource, lambda cloud: cloud.encryption)


POLICY = resource_rule("encryption-at-rest", "Disks, volumes and Kubernetes secrets are encrypted at rest.", check)
