"""IAM roles for services and pods, with their rights listed action by action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pulumi
import pulumi_aws as aws

#: The services that assume the roles of nodes and, through EKS Pod Identity, of pods.
NODES = "ec2.amazonaws.com"
PODS = "pods.eks.amazonaws.com"


@dataclass(frozen=True)
class Statement:
    """One statement of a policy; the SDK's own class fails to serialise lists of actions."""

    actions: Sequence[str]
    resources: Sequence[pulumi.Input[str]] = ()
    effect: Literal["Allow", "Deny"] = "Allow"
    principal: str | Mapping[str, str] | None = None
    condition: pulumi.Input[Mapping[str, Mapping[str, str]]] | None = None

    @property
    def document(self) -> dict[str, object]:
        """Return the statement in the form that a policy document has."""
        parts: dict[str, object] = {
            "Effect": self.effect,
            "Action": list(self.actions),
            "Resource": list(self.resources),
            "Principal": self.principal,
            "Condition": self.condition,
        }
        return {key: value for key, value in parts.items() if isinstance(value, pulumi.Output) or value}


def policy(statements: Sequence[Statement]) -> pulumi.Output[str]:
    """Return the policy document of these statements as JSON."""
    document = {"Version": "2012-10-17", "Statement": [item.document for item in statements]}
    return pulumi.Output.json_dumps(document, sort_keys=True)


class ServiceRole(pulumi.ComponentResource):
    """A role that one AWS service assumes, with its rights as children.

    A resource that depends on the role also depends on the rights: the network add-on needs them until the last node
    has released its interfaces, or the interfaces stay and block the deletion of the subnet.
    """

    arn: pulumi.Output[str]
    name: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        service: str,
        tags: Mapping[str, str],
        opts: pulumi.ResourceOptions,
        *,
        managed: Sequence[str] = (),
        statements: Sequence[Statement] = (),
    ) -> None:
        super().__init__("torchrec-cloud:aws:ServiceRole", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        actions = ["sts:AssumeRole"] + (["sts:TagSession"] if service == PODS else [])
        trust = Statement(actions, principal={"Service": service})
        role = aws.iam.Role(f"{name}-role", assume_role_policy=policy([trust]), tags=tags, opts=child)
        for arn in managed:
            attachment = f"{name}-{arn.rpartition('/')[2]}"
            aws.iam.RolePolicyAttachment(attachment, role=role.name, policy_arn=arn, opts=child)
        if statements:
            aws.iam.RolePolicy(f"{name}-policy", role=role.name, policy=policy(statements), opts=child)
        self.arn, self.name = role.arn, role.name
        self.register_outputs({"arn": self.arn})


def managed_policy(partition: str, name: str) -> str:
    """Return the ARN of a policy that AWS manages; policies for add-ons have their own path."""
    path = "service-role/" if name in ("AmazonEBSCSIDriverPolicy",) else ""
    return f"arn:{partition}:iam::aws:policy/{path}{name}"
