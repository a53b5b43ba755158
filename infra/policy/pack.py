"""All rules, in the order in which `pulumi policy` lists them."""

from __future__ import annotations

from pulumi_policy import Policy

from infra.policy.rules import cost, encryption, exposure, iam, images, pods, regions, tags

POLICIES: list[Policy] = [
    encryption.POLICY,
    exposure.POLICY,
    iam.POLICY,
    tags.POLICY,
    regions.POLICY,
    cost.POLICY,
    pods.POLICY,
    images.POLICY,
]
