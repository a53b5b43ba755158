"""Whose a resource is, and who pays for it: tags, or labels, on all that a cloud can tag."""

from __future__ import annotations

from collections.abc import Iterable

from infra.policy.reading import UNKNOWN, Config, Resource, is_shell, matches, resource_rule, strings

_CLOUDS = ("aws:*", "azure-native:*", "eks:*", "gcp:*")
#: Where the three clouds keep them.
_KEYS = ("tags", "labels", "resourceLabels", "userLabels")
_WITHIN = {"gcp:container/nodePool:NodePool": "nodeConfig"} | {
    f"azure-native:machinelearningservices:{kind}": "properties"
    for kind in ("Datastore", "EnvironmentContainer", "EnvironmentVersion", "Job")
}
_UNTAGGABLE = (
    "aws:autoscaling/tag:Tag",
    "aws:ec2/route:Route",
    "aws:*Association",
    "aws:*Attachment",
    "aws:ecr/*Policy",
    "aws:iam/rolePolicy:RolePolicy",
    "aws:iam/userPolicy:UserPolicy",
    "aws:kms/alias:Alias",
    "aws:s3/bucket[A-Z]*",
    "azure-native:authorization:*",
    "azure-native:containerservice:MaintenanceConfiguration",
    "azure-native:managedidentity:FederatedIdentityCredential",
    "azure-native:monitor:DataCollectionRuleAssociation",
    "azure-native:monitor:DiagnosticSetting",
    "azure-native:network:PrivateDnsZoneGroup",
    "azure-native:network:SecurityRule",
    "azure-native:network:Subnet",
    "azure-native:storage:BlobContainer",
    "azure-native:storage:ManagementPolicy",
    "gcp:*IAM*",
    "gcp:*Iam*",
    "gcp:compute/firewall:Firewall",
    "gcp:compute/network:Network",
    "gcp:compute/resourcePolicy:ResourcePolicy",
    "gcp:compute/router*",
    "gcp:compute/subnetwork:Subnetwork",
    "gcp:kms/keyRing:KeyRing",
    "gcp:monitoring/dashboard:Dashboard",
    "gcp:projects/service*",
    "gcp:serviceaccount/*",
)
#: Taggable, though a pattern above covers them.
_TAGGABLE = (
    "aws:ec2/vpcEndpoint*:VpcEndpoint",
    "aws:eks/podIdentityAssociation:PodIdentityAssociation",
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
    "aws:s3/bucketObjectv2:BucketObjectv2",
)

_OPTIONS = {
    "required": strings("Keys that each resource must have.", ["project", "stack", "owner", "cost-centre"]),
    "exceptions": strings(
        "Names of resources, as shell patterns: pulumi-eks gives the role of its control plane none.",
        ["*-eksRole*"],
    ),
    "untaggable": strings("Types, as shell patterns, that have no tags, beside those known here.", []),
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Violations of one resource."""
    kind, taggable = resource.type, matches(resource.type, _TAGGABLE)
    if is_shell(resource) or matches(resource.name, config["exceptions"]):
        return
    if not matches(kind, _CLOUDS) or (not taggable and matches(kind, (*_UNTAGGABLE, *config["untaggable"]))):
        return
    props = resource.props.get(_WITHIN[kind]) or {} if kind in _WITHIN else resource.props
    found = [props[key] for key in _KEYS if isinstance(props.get(key), dict)]
    if UNKNOWN in found:
        return
    present = {key for tags in found for key in tags}
    missing = [key for key in config["required"] if key not in present]
    if missing:
        yield f"no tag or label {', '.join(missing)}: give it the stack's labels (settings.labels)"


POLICY = resource_rule("tags-present", "Every resource says whose it is and who pays for it.", check, _OPTIONS)
