"""Storage of an AWS stack: bucket, file system, and the rights to use them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aws_stack import (
    ASSOCIATION,
    GROUP,
    LUSTRE,
    NODES,
    RELEASE,
    ROLE,
    Run,
    addons_by_name,
    all_statements,
    read_statements,
)
from provider_mocks.recording import Recording


def test_the_bucket_is_private_encrypted_versioned_and_tls_only(stack: Run) -> None:
    recording = stack("aws")
    blocked = recording.one("aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock").inputs
    keys = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    assert all(blocked[key] is True for key in keys)
    versioning = recording.one("aws:s3/bucketVersioning:BucketVersioning").inputs
    assert versioning["versioningConfiguration"]["status"] == "Enabled"
    (statement,) = read_statements(recording.one("aws:s3/bucketPolicy:BucketPolicy").inputs["policy"])
    assert statement["Effect"] == "Deny"
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert len(statement["Resource"]) == 2, "the bucket and its objects"


def test_kept_checkpoints_do_not_depend_on_a_key_of_the_stack(stack: Run) -> None:
    name = "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
    (rule,) = stack("aws").one(name).inputs["rules"]
    assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}


@pytest.mark.parametrize(("on_destroy", "kept"), [("keep", True), ("delete", False)])
def test_the_bucket_is_kept_with_its_protections_or_deleted_with_its_content(
    stack: Run, on_destroy: str, kept: bool
) -> None:
    recording = stack("aws", {"storage.on_destroy": on_destroy})
    parts = [item for item in recording.registrations if item.type.startswith("aws:s3/")]
    assert len(parts) == 8
    assert {item.retained for item in parts} == {kept}, "a kept bucket must not lose its policy or become public"
    assert recording.one("aws:s3/bucket:Bucket").inputs["forceDestroy"] is not kept
    others = [item for item in recording.registrations if item not in parts and item.retained]
    assert not others, "another retained resource would be billed after destroy"


def test_old_versions_and_unfinished_uploads_expire(stack: Run) -> None:
    rule, _ = _lifecycle(stack("aws"))
    assert rule["noncurrentVersionExpiration"]["noncurrentDays"] == 30
    assert rule["abortIncompleteMultipartUpload"]["daysAfterInitiation"] == 7


def test_versions_of_a_growing_log_expire_after_a_day(stack: Run) -> None:
    _, logs = _lifecycle(stack("aws"))
    assert (logs["filter"]["prefix"], logs["noncurrentVersionExpiration"]["noncurrentDays"]) == ("datasets/work/", 1), (
        "FSx uploads a log again each time that it is closed"
    )


def test_the_default_class_of_disks_is_encrypted_and_prometheus_uses_it(stack: Run) -> None:
    recording = stack("aws")
    found = recording.one("kubernetes:storage.k8s.io/v1:StorageClass")
    assert found.inputs["parameters"] == {"type": "gp3", "encrypted": "true"}
    assert found.inputs["metadata"]["annotations"] == {"storageclass.kubernetes.io/is-default-class": "true"}
    spec = recording.one(RELEASE, "aws-addons-kube-prometheus-stack").inputs["values"]["prometheus"]["prometheusSpec"]
    claim = spec["storageSpec"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == found.inputs["metadata"]["name"]
    assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete", "`destroy` would leave the disk"


def test_the_driver_of_disks_outlives_their_claims_by_the_deletion_of_the_gpu_nodes(stack: Run) -> None:
    recording = stack("aws")
    driver = addons_by_name(recording)["aws-ebs-csi-driver"]
    assert recording.needs(recording.one(RELEASE, "aws-addons-kube-prometheus-stack"), driver)
    assert recording.needs(recording.one(NODES, "aws-cluster-gpu-nodes"), driver), (
        "deleted at once, the driver could not delete the volumes of the claims"
    )
    tags = json.loads(driver.inputs["configurationValues"])["controller"]["extraVolumeTags"]
    assert tags["stack"] == "aws", "a volume that is left behind could not be found"


def test_old_checkpoints_expire_if_configured_and_datasets_never(stack: Run) -> None:
    rules = _lifecycle(stack("aws", {"storage.expire_checkpoints_after_days": 90}))
    expiring = [rule for rule in rules if "expiration" in rule]
    assert [(rule["filter"]["prefix"], rule["expiration"]["days"]) for rule in expiring] == [("checkpoints/", 90)]


def _lifecycle(recording: Recording) -> list[dict[str, Any]]:
    name = "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
    return list(recording.one(name).inputs["rules"])


def test_the_file_system_is_persistent_lustre_of_the_configured_size_and_throughput(stack: Run) -> None:
    overrides = {"storage.size_gib": 4800, "storage.throughput_mb_per_second_per_tib": 500}
    inputs = stack("aws", overrides).one(LUSTRE).inputs
    assert inputs["deploymentType"] == "PERSISTENT_2"
    assert (inputs["storageCapacity"], inputs["perUnitStorageThroughput"]) == (4800, 500)
    assert inputs["kmsKeyId"].startswith("arn:aws:kms:")
    assert inputs["skipFinalBackup"] is True, "a backup would outlive the stack and be billed"


def test_datasets_are_synchronised_but_deleting_a_file_keeps_the_object(stack: Run) -> None:
    inputs = stack("aws").one("aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation").inputs
    assert inputs["dataRepositoryPath"] == "s3://aws-storage-bucket-0a1b2c3/datasets/"
    assert inputs["s3"]["autoImportPolicy"]["events"] == ["NEW", "CHANGED", "DELETED"]
    assert "DELETED" not in inputs["s3"]["autoExportPolicy"]["events"], "the file system is a cache of the bucket"


def test_lustre_ports_are_open_to_nodes_and_file_servers_only(stack: Run) -> None:
    inputs = stack("aws").one(GROUP, "aws-storage-lustre-clients").inputs
    for rules in (inputs["ingress"], inputs["egress"]):
        assert [(rule["fromPort"], rule["toPort"]) for rule in rules] == [(988, 988), (1018, 1023)]
        assert all(rule["securityGroups"] == ["sg-aws-cluster-eks"] and rule["self"] for rule in rules)


def test_the_volume_refers_to_the_file_system_as_the_csi_driver_requires(stack: Run) -> None:
    spec = stack("aws").one("kubernetes:core/v1:PersistentVolume").inputs["spec"]
    assert spec["csi"]["driver"] == "fsx.csi.aws.com"
    assert spec["csi"]["volumeHandle"] == "aws-storage-lustre-id"
    assert spec["csi"]["volumeAttributes"]["mountname"] == "abcdefgh"
    assert spec["mountOptions"] == ["flock"]


def test_no_policy_has_wildcard_actions_or_changing_actions_on_all_resources(stack: Run) -> None:
    allowed = [item for item in all_statements(stack("aws")) if item["Effect"] == "Allow"]
    assert len(allowed) >= 10
    for item in allowed:
        assert not [action for action in item["Action"] if "*" in action], item
        if "*" in item.get("Resource", []):
            changes = [
                action for action in item["Action"] if not action.partition(":")[2].startswith(("Describe", "Get"))
            ]
            assert not changes, item


def test_roles_have_only_narrow_managed_policies(stack: Run) -> None:
    attached = stack("aws").of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    names = {item.inputs["policyArn"].rpartition("/")[2] for item in attached}
    assert names == {
        "AmazonEKSWorkerNodePolicy",
        "AmazonEC2ContainerRegistryPullOnly",
        "AmazonEKS_CNI_Policy",
        "AmazonEBSCSIDriverPolicy",
        "CloudWatchAgentServerPolicy",
    }


def test_the_trainer_can_write_checkpoints_and_read_datasets_only(stack: Run) -> None:
    recording = stack("aws")
    statements = read_statements(
        recording.one("aws:iam/rolePolicy:RolePolicy", "aws-storage-trainer-policy").inputs["policy"]
    )
    bucket = "arn:aws:s3:::aws-storage-bucket-0a1b2c3"
    by_resource = {item["Resource"][0]: set(item["Action"]) for item in statements}
    assert set(by_resource) == {bucket, f"{bucket}/checkpoints/*", f"{bucket}/datasets/*"}
    assert by_resource[f"{bucket}/datasets/*"] == {"s3:GetObject"}
    assert "s3:DeleteObject" in by_resource[f"{bucket}/checkpoints/*"], "keep-last-N deletes"


def test_the_trainers_service_account_has_its_role_through_pod_identity(stack: Run) -> None:
    recording = stack("aws", {"namespace": "ranking"})
    inputs = recording.one(ASSOCIATION, "aws-storage-trainer-identity").inputs
    assert (inputs["namespace"], inputs["serviceAccount"]) == ("ranking", "trainer")
    (trust,) = read_statements(recording.one(ROLE, "aws-storage-trainer-role").inputs["assumeRolePolicy"])
    assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert trust["Action"] == ["sts:AssumeRole", "sts:TagSession"], "Pod Identity tags its sessions"


def test_arns_use_the_partition_of_the_region(stack: Run) -> None:
    recording = stack("aws", {"aws:region": "us-gov-west-1"})
    arns = [item.inputs["policyArn"] for item in recording.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")]
    assert arns
    assert all(arn.startswith("arn:aws-us-gov:iam::aws:policy/") for arn in arns)
