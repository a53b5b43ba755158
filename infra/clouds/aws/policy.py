"""What the policy pack must know about AWS resource types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from infra.policy_facts import (
    UNKNOWN,
    CloudPolicy,
    NodePool,
    Props,
    Resource,
    dicts,
    is_true,
    listed,
    matches,
    number,
    open_ranges,
    require_flag,
)

_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"

#: Read-only actions: many of them cannot be limited to a resource.
_READ_ONLY = re.compile(r"^[a-z0-9-]+:(Describe|Get|List|BatchGet|Lookup|View)[A-Za-z]*$")
_ADMIN_POLICIES = ("*:policy/AdministratorAccess", "*:policy/PowerUserAccess", "*:policy/IAMFullAccess")


def _encrypted_template(props: Props) -> Iterable[str]:
    for mapping in dicts(props.get("blockDeviceMappings")):
        if "ebs" in mapping and not is_true(mapping["ebs"].get("encrypted")):
            yield f"volume {mapping.get('deviceName')} of new nodes is not encrypted; set ebs.encrypted to true"


def _encrypted_component(props: Props) -> Iterable[str]:
    if not props.get("encryptionConfigKeyArn"):
        yield "Kubernetes secrets are not encrypted with a key of yours; set encryptionConfigKeyArn"


def _encrypted_cluster(props: Props) -> Iterable[str]:
    if not props.get("encryptionConfig"):
        yield "Kubernetes secrets are not encrypted with a key of yours; set encryptionConfig"


def _encrypted_storage_class(props: Props) -> Iterable[str]:
    parameters = props.get("parameters") or {}
    if str(props.get("provisioner", "")).startswith("ebs.csi.") and not is_true(parameters.get("encrypted")):
        yield "volumes of this class are not encrypted; set parameters.encrypted to 'true'"


def _encrypted_bucket(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("rules")):
        if not (rule.get("applyServerSideEncryptionByDefault") or {}).get("sseAlgorithm"):
            yield "no sseAlgorithm; set it to aws:kms or AES256"


def _open_group(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("ingress")):
        ranges = listed(rule.get("cidrBlocks")) + listed(rule.get("ipv6CidrBlocks"))
        yield from open_ranges(ranges, f"ingress to port {_port(rule)} from")


def _port(rule: Props) -> str:
    low, high = int(rule.get("fromPort") or 0), int(rule.get("toPort") or 0)
    return str(low) if low == high else f"{low}-{high}"


def _open_group_rule(props: Props) -> Iterable[str]:
    if props.get("type", "ingress") == "ingress":
        keys = ("cidrBlocks", "ipv6CidrBlocks", "cidrIpv4", "cidrIpv6")
        yield from open_ranges([item for key in keys for item in listed(props.get(key))], "ingress from")


def _open_cluster(props: Props) -> Iterable[str]:
    config = props.get("vpcConfig") or props
    if config.get("endpointPublicAccess", True) and "publicAccessCidrs" not in config:
        yield "the API server is open to the internet: set endpointPublicAccess to false, or publicAccessCidrs"
    yield from open_ranges(listed(config.get("publicAccessCidrs")), "the API server is open to")


def _public_template(props: Props) -> Iterable[str]:
    for interface in dicts(props.get("networkInterfaces")):
        if str(interface.get("associatePublicIpAddress", "")).lower() == "true":
            yield "nodes get public addresses: remove associatePublicIpAddress"


def _public_subnet(props: Props) -> Iterable[str]:
    if props.get("mapPublicIpOnLaunch"):
        yield "machines in this subnet get public addresses: set mapPublicIpOnLaunch to false"


def _open_bucket(props: Props) -> Iterable[str]:
    for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
        if props.get(key, True) is not True:
            yield f"{key} is off: a bucket could be made public"


def _document(text: Any, *, of_resource: bool) -> Iterable[str]:
    """Check the statements of a policy; the policy of a resource, such as a bucket or a key, names principals."""
    if not text or text is UNKNOWN:
        return
    document = json.loads(text) if isinstance(text, str) else text
    for statement in dicts(document.get("Statement")):
        if statement.get("Effect") == "Allow":
            yield from _broad_actions(statement, of_resource=of_resource)
            principals = statement.get("Principal")
            names = principals.get("AWS") if isinstance(principals, dict) else principals
            if of_resource and "*" in listed(names) and not statement.get("Condition"):
                yield "principal *: name who may do this"


def _broad_actions(statement: Props, *, of_resource: bool) -> Iterable[str]:
    actions = [str(action) for action in listed(statement.get("Action"))]
    for action in actions:
        if action.endswith(":*") or action == "*":
            yield f"action {action}: name the actions that are needed"
    if "NotAction" in statement or "NotResource" in statement:
        yield "NotAction and NotResource allow all but a few: name what is needed"
    if not of_resource and "*" in listed(statement.get("Resource")):
        changing = [action for action in actions if not _READ_ONLY.match(action)]
        if changing:
            yield f"{', '.join(changing)} on resource *: name the resources"


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
    if matches(str(props.get("policyArn")), _ADMIN_POLICIES):
        yield f"{props['policyArn']} allows everything: attach a narrower policy"


def _node_group(props: Props, dependencies: Sequence[Resource]) -> Iterable[NodePool]:
    """Yield the pool of a node group, whose launch template may hold the instance type."""
    templates = [item.props for item in dependencies if item.type == _TEMPLATE]
    types = listed(props.get("instanceTypes")) or [template.get("instanceType") for template in templates]
    scaling = props.get("scalingConfig") or {}
    yield NodePool(str(types[0] if types else "unknown"), number(scaling.get("maxSize")))


POLICY = CloudPolicy(
    types=("aws:*",),
    component_types=("eks:*",),
    encryption={
        "aws:ebs/volume:Volume": require_flag("encrypted", "a disk"),
        _TEMPLATE: _encrypted_template,
        "aws:efs/fileSystem:FileSystem": require_flag("encrypted", "a file system"),
        "aws:eks/cluster:Cluster": _encrypted_cluster,
        "aws:rds/instance:Instance": require_flag("storageEncrypted", "a database"),
        "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": _encrypted_bucket,
        "eks:index:Cluster": _encrypted_component,
        "kubernetes:storage.k8s.io/v1:StorageClass": _encrypted_storage_class,
    },
    exposure={
        _TEMPLATE: _public_template,
        "aws:ec2/securityGroup:SecurityGroup": _open_group,
        "aws:ec2/securityGroupRule:SecurityGroupRule": _open_group_rule,
        "aws:ec2/subnet:Subnet": _public_subnet,
        "aws:eks/cluster:Cluster": _open_cluster,
        "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": _open_bucket,
        "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _open_group_rule,
        "eks:index:Cluster": _open_cluster,
    },
    rights={
        "aws:iam/policy:Policy": _policy,
        "aws:iam/role:Role": _role,
        "aws:iam/rolePolicy:RolePolicy": _policy,
        "aws:iam/rolePolicyAttachment:RolePolicyAttachment": _attachment,
        "aws:iam/userPolicy:UserPolicy": _policy,
        "aws:kms/key:Key": _resource_policy,
        "aws:s3/bucketPolicy:BucketPolicy": _resource_policy,
    },
    node_pools={"aws:eks/nodeGroup:NodeGroup": _node_group},
    untaggable=(
        "aws:autoscaling/tag:Tag",
        "aws:ec2/route:Route",
        "aws:*Association",
        "aws:*Attachment",
        "aws:ecr/*Policy",
        "aws:iam/rolePolicy:RolePolicy",
        "aws:iam/userPolicy:UserPolicy",
        "aws:kms/alias:Alias",
        "aws:s3/bucket[A-Z]*",
    ),
    taggable=(
        "aws:ec2/vpcEndpoint*:VpcEndpoint",
        "aws:eks/podIdentityAssociation:PodIdentityAssociation",
        "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
        "aws:s3/bucketObjectv2:BucketObjectv2",
    ),
    # pulumi-eks does not tag the role of the control plane.
    untagged_names=("*-eksRole*",),
    zone=re.compile(r"^([a-z]{2}(?:-[a-z]+)+-\d)[a-z]$"),
    internal_load_balancers=(
        "service.beta.kubernetes.io/aws-load-balancer-scheme",
        "service.beta.kubernetes.io/aws-load-balancer-internal",
    ),
)
