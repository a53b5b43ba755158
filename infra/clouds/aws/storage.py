"""The bucket, FSx for Lustre linked to it, the claim that pods mount, and the trainer's access to the bucket."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra.clouds.aws.cluster import EksCluster
from infra.clouds.aws.identity import Statement, policy
from infra.clouds.aws.network import Network, named
from infra.clouds.aws.settings import Settings
from infra.components.volume import static_volume
from infra.contract import Identity, Storage

#: Folders of the bucket: the trainer writes to the first, FSx mirrors the second under the same name.
CHECKPOINTS = "checkpoints"
DATASETS = "datasets"
#: The cluster's default storage class, of encrypted EBS volumes; EKS creates no default.
DISK_CLASS = "gp3"
#: The address of the EKS Pod Identity agent on every node.
_POD_IDENTITY_AGENT = "169.254.170.23/32:80"

#: Lustre's ports: https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html
_LUSTRE_PORTS = ((988, 988), (1018, 1023))
_LUSTRE_VERSION = "2.15"
_DAYS_OF_OLD_VERSIONS = 30
#: FSx uploads a growing log as a whole each time that it is closed, and the bucket keeps every upload as a version.
_DAYS_OF_OLD_LOGS = 1
_DAYS_OF_UNFINISHED_UPLOADS = 7


class TrainingStorage(pulumi.ComponentResource):
    """The storage of a cluster: `facts` and `identity` for the contract, the bucket's name, the class of disks."""

    facts: Storage
    identity: Identity
    bucket_name: pulumi.Output[str]
    disk_class: k8s.storage.v1.StorageClass

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: Network,
        cluster: EksCluster,
        namespace: k8s.core.v1.Namespace,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:aws:Storage", name, None, opts)
        self._name, self._settings, self._tags = name, settings, settings.labels
        self._network, self._cluster = network, cluster
        self._child = pulumi.ResourceOptions(parent=self)
        self.facts = Storage(
            claim_name="datasets",
            mount_path=settings.storage.mount_path,
            size_gib=settings.storage.size_gib,
            access_mode="ReadWriteMany",
            work_folder=settings.work_folder,
            bucket_folder=settings.bucket_folder,
        )
        self.identity = Identity(endpoints=(_POD_IDENTITY_AGENT,))
        bucket = self._create_bucket()
        self.bucket_name = bucket.bucket
        file_system = self._create_file_system()
        self._link_datasets(file_system, bucket)
        self._create_work_folder(bucket)
        ebs, fsx = self._install_drivers()
        self.disk_class = self._create_disk_class(ebs)
        self._create_volume(file_system, namespace, [fsx])
        self._grant_trainer_access(bucket, namespace)
        self.register_outputs({"bucket": self.bucket_name, "file_system": file_system.id})

    def _create_bucket(self) -> aws.s3.Bucket:
        """Create the bucket and its protections, which are kept on destroy if the bucket is.

        S3's own keys encrypt it: `pulumi destroy` would delete a key of this stack while it keeps the checkpoints.
        """
        keep = self._settings.storage.on_destroy == "keep"
        opts = pulumi.ResourceOptions(parent=self, retain_on_delete=keep)
        name = self._name
        bucket = aws.s3.Bucket(f"{name}-bucket", force_destroy=not keep, tags=self._tags, opts=opts)
        aws.s3.BucketOwnershipControls(
            f"{name}-ownership",
            bucket=bucket.bucket,
            rule=aws.s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
            opts=opts,
        )
        closed = aws.s3.BucketPublicAccessBlock(
            f"{name}-private",
            bucket=bucket.bucket,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=opts,
        )
        aws.s3.BucketServerSideEncryptionConfiguration(
            f"{name}-encryption",
            bucket=bucket.bucket,
            rules=[
                aws.s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    apply_server_side_encryption_by_default=aws.s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
                        sse_algorithm="AES256"
                    )
                )
            ],
            opts=opts,
        )
        versioning = aws.s3.BucketVersioning(
            f"{name}-versioning",
            bucket=bucket.bucket,
            versioning_configuration=aws.s3.BucketVersioningVersioningConfigurationArgs(status="Enabled"),
            opts=opts,
        )
        # S3 rejects concurrent changes of one bucket's policy settings, so they are created one after the other.
        after = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[closed, versioning]))
        aws.s3.BucketPolicy(f"{name}-tls-only", bucket=bucket.bucket, policy=_tls_only(bucket), opts=after)
        self._create_lifecycle(bucket, after)
        return bucket

    def _create_lifecycle(self, bucket: aws.s3.Bucket, opts: pulumi.ResourceOptions) -> None:
        """Expire old versions, sooner those of logs, unfinished uploads, and checkpoints past their configured age."""
        days = self._settings.storage.expire_checkpoints_after_days
        rules = [
            aws.s3.BucketLifecycleConfigurationRuleArgs(
                id="leftovers",
                status="Enabled",
                filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
                noncurrent_version_expiration=_old_versions(_DAYS_OF_OLD_VERSIONS),
                abort_incomplete_multipart_upload=aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                    days_after_initiation=_DAYS_OF_UNFINISHED_UPLOADS
                ),
            ),
            aws.s3.BucketLifecycleConfigurationRuleArgs(
                id="old-logs",
                status="Enabled",
                filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=f"{self._settings.work_folder}/"),
                noncurrent_version_expiration=_old_versions(_DAYS_OF_OLD_LOGS),
            ),
        ]
        if days:
            rules.append(
                aws.s3.BucketLifecycleConfigurationRuleArgs(
                    id="old-checkpoints",
                    status="Enabled",
                    filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=f"{CHECKPOINTS}/"),
                    expiration=aws.s3.BucketLifecycleConfigurationRuleExpirationArgs(days=days),
                )
            )
        aws.s3.BucketLifecycleConfiguration(f"{self._name}-lifecycle", bucket=bucket.bucket, rules=rules, opts=opts)

    def _create_file_system(self) -> aws.fsx.LustreFileSystem:
        """Create a Lustre file system in the GPU nodes' subnet; it has no backups because the bucket has the data."""
        settings = self._settings.storage
        return aws.fsx.LustreFileSystem(
            f"{self._name}-lustre",
            deployment_type="PERSISTENT_2",
            storage_type="SSD",
            storage_capacity=settings.size_gib,
            per_unit_storage_throughput=settings.throughput_mb_per_second_per_tib,
            file_system_type_version=_LUSTRE_VERSION,
            data_compression_type="LZ4",
            subnet_ids=self._network.gpu_subnet.id,
            security_group_ids=[self._create_lustre_group().id],
            kms_key_id=self._cluster.key.arn,
            automatic_backup_retention_days=0,
            skip_final_backup=True,
            tags=named(self._tags, f"{self._name}-lustre"),
            opts=self._child,
        )

    def _create_lustre_group(self) -> aws.ec2.SecurityGroup:
        """Create a group that allows Lustre traffic between the file system's servers and with the nodes."""
        nodes = [self._cluster.security_group_id]
        return aws.ec2.SecurityGroup(
            f"{self._name}-lustre-clients",
            description="Lustre between FSx and the nodes",
            vpc_id=self._network.vpc.id,
            ingress=[
                aws.ec2.SecurityGroupIngressArgs(
                    protocol="tcp", from_port=first, to_port=last, security_groups=nodes, self=True
                )
                for first, last in _LUSTRE_PORTS
            ],
            egress=[
                aws.ec2.SecurityGroupEgressArgs(
                    protocol="tcp", from_port=first, to_port=last, security_groups=nodes, self=True
                )
                for first, last in _LUSTRE_PORTS
            ],
            revoke_rules_on_delete=True,
            tags=named(self._tags, f"{self._name}-lustre-clients"),
            opts=self._child,
        )

    def _link_datasets(self, file_system: aws.fsx.LustreFileSystem, bucket: aws.s3.Bucket) -> None:
        """Synchronise the bucket's datasets and the file system in both directions.

        A file deleted to free space stays in the bucket: the bucket is the source, the file system a cache.
        """
        aws.fsx.DataRepositoryAssociation(
            f"{self._name}-datasets",
            file_system_id=file_system.id,
            file_system_path=f"/{self._settings.bucket_folder}",
            data_repository_path=pulumi.Output.concat("s3://", bucket.bucket, f"/{DATASETS}/"),
            batch_import_meta_data_on_create=True,
            s3=aws.fsx.DataRepositoryAssociationS3Args(
                auto_import_policy=aws.fsx.DataRepositoryAssociationS3AutoImportPolicyArgs(
                    events=["NEW", "CHANGED", "DELETED"]
                ),
                auto_export_policy=aws.fsx.DataRepositoryAssociationS3AutoExportPolicyArgs(events=["NEW", "CHANGED"]),
            ),
            tags=self._tags,
            opts=self._child,
        )

    def _create_work_folder(self, bucket: aws.s3.Bucket) -> None:
        """Create the one folder of the file system that belongs to the trainer's user; root owns everything else.

        A pod without root's rights cannot change the owner of Lustre's root. FSx reads a folder's owner and permissions
        from its object in the bucket: "POSIX metadata support for data repositories" in the FSx user guide.
        """
        keep = self._settings.storage.on_destroy == "keep"
        aws.s3.BucketObjectv2(
            f"{self._name}-work-folder",
            bucket=bucket.bucket,
            key=f"{self._settings.work_folder}/",
            content="",
            metadata={"file-owner": "10001", "file-group": "0", "file-permissions": "0042775"},
            tags=self._tags,
            opts=pulumi.ResourceOptions(parent=self, retain_on_delete=keep),
        )

    def _install_drivers(self) -> tuple[aws.eks.Addon, aws.eks.Addon]:
        """Install the CSI drivers of EBS and FSx, whose file system Pulumi creates, so that driver needs no rights.

        The tags make the volumes of claims part of the stack's costs, and show what a failed deletion left behind.
        """
        cluster, name = self._cluster, self._name
        role = cluster.create_pod_role(f"{name}-ebs", self, managed=["AmazonEBSCSIDriverPolicy"])
        ebs = ("ebs-csi-controller-sa", role)
        tags = {"controller": {"extraVolumeTags": dict(self._tags)}}
        return (
            cluster.create_addon(
                f"{name}-ebs-csi",
                "aws-ebs-csi-driver",
                self,
                after=cluster.ready,
                identity=ebs,
                configuration=tags,
            ),
            cluster.create_addon(f"{name}-fsx-csi", "aws-fsx-csi-driver", self, after=cluster.ready),
        )

    def _create_disk_class(self, driver: aws.eks.Addon) -> k8s.storage.v1.StorageClass:
        """Create the default storage class, encrypted with the account's key for EBS, in the zone of its first pod."""
        return k8s.storage.v1.StorageClass(
            f"{self._name}-disks",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name=DISK_CLASS,
                annotations={"storageclass.kubernetes.io/is-default-class": "true"},
            ),
            provisioner="ebs.csi.aws.com",
            parameters={"type": "gp3", "encrypted": "true"},
            volume_binding_mode="WaitForFirstConsumer",
            allow_volume_expansion=True,
            reclaim_policy="Delete",
            opts=pulumi.ResourceOptions(parent=self, provider=self._cluster.provider, depends_on=[driver]),
        )

    def _create_volume(
        self,
        file_system: aws.fsx.LustreFileSystem,
        namespace: k8s.core.v1.Namespace,
        drivers: list[aws.eks.Addon],
    ) -> None:
        """Create a volume over the file system and the claim that pods mount."""
        source = k8s.core.v1.CSIPersistentVolumeSourceArgs(
            driver="fsx.csi.aws.com",
            volume_handle=file_system.id,
            volume_attributes={"dnsname": file_system.dns_name, "mountname": file_system.mount_name},
        )
        opts = pulumi.ResourceOptions(parent=self, provider=self._cluster.provider, depends_on=drivers)
        static_volume(
            self._name, self.facts, namespace.metadata.name, self._tags, opts, csi=source, mount_options=["flock"]
        )

    def _grant_trainer_access(self, bucket: aws.s3.Bucket, namespace: k8s.core.v1.Namespace) -> None:
        """Let the trainer read and write checkpoints, read datasets and list the bucket.

        Listing is not limited to prefixes: S3 would then return 403 instead of 404 for a missing object, and a run
        could not distinguish a first start from a denied one. The bucket holds only these two folders.
        """
        arn = bucket.arn
        statements = [
            Statement(["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"], [arn]),
            Statement(
                [
                    "s3:GetObject",
                    "s3:PutObject",
                    "s3:DeleteObject",
                    "s3:AbortMultipartUpload",
                    "s3:ListMultipartUploadParts",
                ],
                [pulumi.Output.concat(arn, f"/{CHECKPOINTS}/*")],
            ),
            Statement(["s3:GetObject"], [pulumi.Output.concat(arn, f"/{DATASETS}/*")]),
        ]
        role = self._cluster.create_pod_role(f"{self._name}-trainer", self, statements=statements)
        aws.eks.PodIdentityAssociation(
            f"{self._name}-trainer-identity",
            cluster_name=self._cluster.name,
            namespace=namespace.metadata.name,
            service_account=self.identity.service_account,
            role_arn=role.arn,
            tags=self._tags,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[role]),
        )


def _tls_only(bucket: aws.s3.Bucket) -> pulumi.Output[str]:
    """Return a policy that denies every request without TLS, whatever else allows it."""
    everything = [bucket.arn, pulumi.Output.concat(bucket.arn, "/*")]
    plain = {"Bool": {"aws:SecureTransport": "false"}}
    return policy([Statement(["s3:*"], everything, effect="Deny", principal="*", condition=plain)])


def _old_versions(days: int) -> aws.s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs:
    """Return an expiration of versions that a newer one replaced this many days ago."""
    return aws.s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs(noncurrent_days=days)
