"""Encryption at rest wherever it can be left out. Buckets, registries and file systems of the three clouds have no
such switch: their services encrypt always."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from infra.policy.reading import UNKNOWN, Config, Props, Resource, dicts, is_shell, resource_rule


def _flag(key: str, what: str) -> Callable[[Props], Iterable[str]]:
    def check(props: Props) -> Iterable[str]:
        if not _true(props.get(key)):
            yield f"{key} is {props.get(key)!r}: {what} must be encrypted; set {key} to true"

    return check


def _launch_template(props: Props) -> Iterable[str]:
    for mapping in dicts(props.get("blockDeviceMappings")):
        if "ebs" in mapping and not _true(mapping["ebs"].get("encrypted")):
            yield f"volume {mapping.get('deviceName')} of new nodes is not encrypted; set ebs.encrypted to true"


def _eks_component(props: Props) -> Iterable[str]:
    if not props.get("encryptionConfigKeyArn"):
        yield "Kubernetes secrets are encrypted with no key of yours; set encryptionConfigKeyArn"


def _eks(props: Props) -> Iterable[str]:
    if not props.get("encryptionConfig"):
        yield "Kubernetes secrets are encrypted with no key of yours; set encryptionConfig"


def _gke(props: Props) -> Iterable[str]:
    if (props.get("databaseEncryption") or {}).get("state") != "ENCRYPTED":
        yield "Kubernetes secrets are encrypted with no key of yours; set databaseEncryption.state to ENCRYPTED"


def _aks(props: Props) -> Iterable[str]:
    for pool in dicts(props.get("agentPoolProfiles")):
        yield from _flag("enableEncryptionAtHost", f"disks of pool {pool.get('name')}")(pool)


def _storage_class(props: Props) -> Iterable[str]:
    parameters = props.get("parameters") or {}
    if str(props.get("provisioner", "")).startswith("ebs.csi.") and not _true(parameters.get("encrypted")):
        yield "volumes of this class are not encrypted; set parameters.encrypted to 'true'"


def _bucket_encryption(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("rules")):
        if not (rule.get("applyServerSideEncryptionByDefault") or {}).get("sseAlgorithm"):
            yield "no sseAlgorithm; set it to aws:kms or AES256"


_TYPES: dict[str, Callable[[Props], Iterable[str]]] = {
    "aws:ebs/volume:Volume": _flag("encrypted", "a disk"),
    "aws:ec2/launchTemplate:LaunchTemplate": _launch_template,
    "aws:efs/fileSystem:FileSystem": _flag("encrypted", "a file system"),
    "aws:eks/cluster:Cluster": _eks,
    "aws:rds/instance:Instance": _flag("storageEncrypted", "a database"),
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": _bucket_encryption,
    "azure-native:containerservice:AgentPool": _flag("enableEncryptionAtHost", "disks of the nodes"),
    "azure-native:containerservice:ManagedCluster": _aks,
    "eks:index:Cluster": _eks_component,
    "gcp:container/cluster:Cluster": _gke,
    "kubernetes:storage.k8s.io/v1:StorageClass": _storage_class,
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Violations of one resource."""
    del config
    own = None if is_shell(resource) else _TYPES.get(resource.type)
    return own(resource.props) if own else ()


def _true(value: object) -> bool:
    """The engine hands some flags over as text."""
    return value is True or value == "true" or value is UNKNOWN


POLICY = resource_rule("encryption-at-rest", "Disks, volumes and Kubernetes secrets are encrypted at rest.", check)
