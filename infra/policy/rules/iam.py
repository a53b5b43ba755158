"""No right to everything: neither every action, nor every resource, nor a role that amounts to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from infra.policy.reading import UNKNOWN, Config, Props, Resource, dicts, listed, matches, resource_rule, strings

#: Actions that only look: many of them have no resource to narrow them to.
_LOOKS = re.compile(r"^[a-z0-9-]+:(Describe|Get|List|BatchGet|Lookup|View)[A-Za-z]*$")
#: https://learn.microsoft.com/azure/role-based-access-control/built-in-roles: Owner, Contributor, User Access
#: Administrator, Role Based Access Control Administrator.
_AZURE_ROLES = {
    "8e3af657-a8ff-443c-a75c-2fe8c4bcb635": "Owner",
    "b24988ac-6180-42a0-ab88-20f7382dd24c": "Contributor",
    "18d7d88d-d35e-4fb5-a5c3-7773c20a72d9": "User Access Administrator",
    "f58310d9-a9f6-439a-9e8d-f62e7b41a168": "Role Based Access Control Administrator",
}
_GCP_ROLES = {"roles/owner", "roles/editor", "roles/iam.securityAdmin", "roles/resourcemanager.projectIamAdmin"}
_GCP_ANYONE = {"allUsers", "allAuthenticatedUsers"}
_AWS_ROLES = ("*:policy/AdministratorAccess", "*:policy/PowerUserAccess", "*:policy/IAMFullAccess")


def _document(text: Any, *, of_resource: bool) -> Iterable[str]:
    """Statements of an AWS policy; that of a resource (bucket, key) names who, and its own resource is itself."""
    if not text or text is UNKNOWN:
        return
    document = json.loads(text) if isinstance(text, str) else text
    for statement in dicts(document.get("Statement")):
        if statement.get("Effect") != "Allow":
            continue
        actions = [str(action) for action in listed(statement.get("Action"))]
        for action in actions:
            if action.endswith(":*") or action == "*":
                yield f"action {action}: name the actions that are needed"
        if "NotAction" in statement or "NotResource" in statement:
            yield "NotAction and NotResource allow all but a few: name what is needed"
        if not of_resource and "*" in listed(statement.get("Resource")):
            acting = [action for action in actions if not _LOOKS.match(action)]
            if acting:
                yield f"{', '.join(acting)} on resource *: name the resources"
        principals = statement.get("Principal")
        named = principals.get("AWS") if isinstance(principals, dict) else principals
        if of_resource and "*" in listed(named) and not statement.get("Condition"):
            yield "principal *: name who may do this"


def _policy(props: Props) -> Iterable[str]:
    return _document(props.get("policy"), of_resource=False)


def _resource_policy(props: Props) -> Iterable[str]:
    return _document(props.get("policy"), of_resource=True)


def _role(props: Props) -> Iterable[str]:
    yield from _document(props.get("assumeRolePolicy"), of_resource=True)
    for inline in dicts(props.get("inlinePolicies")):
        yield from _document(inline.get("policy"), of_resource=False)
    for arn in listed(props.get("managedPolicyArns")):
        yield from _attachment({"policyArn": arn})


def _attachment(props: Props) -> Iterable[str]:
    if matches(str(props.get("policyArn")), _AWS_ROLES):
        yield f"{props['policyArn']} allows everything: attach a narrower policy"


def _azure_assignment(props: Props) -> Iterable[str]:
    name = _AZURE_ROLES.get(str(props.get("roleDefinitionId")).rpartition("/")[2].lower())
    if name:
        yield f"role {name}: assign a narrower one"


def _azure_definition(props: Props) -> Iterable[str]:
    for permission in dicts(props.get("permissions")):
        for action in listed(permission.get("actions")) + listed(permission.get("dataActions")):
            if str(action) == "*" or (str(action).endswith("/*") and str(action).count("/") < 2):
                yield f"action {action}: name the actions that are needed"


def _gcp(props: Props) -> Iterable[str]:
    if props.get("role") in _GCP_ROLES:
        yield f"{props['role']}: grant a narrower role"
    for member in [*listed(props.get("member")), *listed(props.get("members"))]:
        if member in _GCP_ANYONE:
            yield f"{member}: name who is meant"


def _kubernetes(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("rules")):
        if "*" in listed(rule.get("verbs")) and "*" in listed(rule.get("resources")):
            yield "all verbs on all resources: name those that are needed"


_TYPES: dict[str, Callable[[Props], Iterable[str]]] = {
    "aws:iam/policy:Policy": _policy,
    "aws:iam/role:Role": _role,
    "aws:iam/rolePolicy:RolePolicy": _policy,
    "aws:iam/rolePolicyAttachment:RolePolicyAttachment": _attachment,
    "aws:iam/userPolicy:UserPolicy": _policy,
    "aws:kms/key:Key": _resource_policy,
    "aws:s3/bucketPolicy:BucketPolicy": _resource_policy,
    "azure-native:authorization:RoleAssignment": _azure_assignment,
    "azure-native:authorization:RoleDefinition": _azure_definition,
    "kubernetes:rbac.authorization.k8s.io/v1:ClusterRole": _kubernetes,
    "kubernetes:rbac.authorization.k8s.io/v1:Role": _kubernetes,
}
_GCP_GRANT = re.compile(r"^gcp:.*(IAM|Iam)(Member|Binding)$")

_OPTIONS = {"exceptions": strings("Names of resources that may have such rights, as shell patterns.", [])}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Violations of one resource."""
    if matches(resource.name, config["exceptions"]):
        return ()
    own = _gcp if _GCP_GRANT.match(resource.type) else _TYPES.get(resource.type)
    return own(resource.props) if own else ()


POLICY = resource_rule(
    "no-wildcard-rights", "No policy or role allows every action, every resource or everyone.", check, _OPTIONS
)
