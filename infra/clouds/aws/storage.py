"""The bucket, FSx for Lustre in front of it, the claim that pods mount, and the identity that may use the bucket."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra.clouds.aws.cluster import Cluster
from infra.clouds.aws.identity import Statement, policy
from infra.clouds.aws.network import Network, named
from infra.clouds.aws.settings import Settings
from infra.components.volume import static_volume
from infra.contract import Identity, Storage

#: Folders of the bucket: what the trainer writes, and what FSx shows under the same name.
CHECKPOINTS = "checkpoints"
DATASETS = "datasets"
#: Where the agent of EKS Pod Identity listens on every node.
_POD_IDENTITY_AGENT = "169.254.170.23/32:80"

#: Lustre's ports: https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html
_LUSTRE_PORTS = ((988, 988), (1018, 1023))
_LUSTRE_VERSION = "2.15"
_DAYS_OF_OLD_VERSIONS = 30
_DAYS_OF_UNFINISHED_UPLOADS = 7


class TrainingStorage(pulumi.ComponentResource):
    """`facts` and `identity` for the contract; `bucket_name` is known once the bucket is."""

    facts: Storage
    identity: Identity
    bucket_name: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: Network,
        cluster: Cluster,
        namespace: k8s.core.v1.Namespace,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:aws:Storage", name, None, opts)
        self._name, self._settings, self._tags = name, settings, settings.labels
        self._network, self._cluster = network, cluster
        self._child = pulumi.ResourceOptions(parent=self)
        wanted = settings.storage
        self.facts = Storage(
            claim_name="datasets",
            mount_path=wanted.mount_path,
            size_gib=wanted.size_gib,
            access_mode="ReadWriteMany",
            work_folder=settings.work_folder,
            bucket_folder=settings.bucket_folder,
        )
        self.identity = Identity(endpoints=(_POD_IDENTITY_AGENT,))
        bucket = self._bucket()
        self.bucket_name = bucket.bucket
        file_system = self._file_system()
        self._association(file_system, bucket)
        self._work_folder(bucket)
        drivers = self._drivers()
        self._volume(file_system, namespace, drivers)
        self._trainer_identity(bucket, namespace)
        self.register_outputs({"bucket": self.bucket_name, "file_system": file_system.id})

    def _bucket(self) -> aws.s3.Bucket:
        """The bucket and its protections; what is kept stays protected, so they are kept with it.

        Encrypted by S3's own keys and not by one of this stack: `pulumi destroy` would delete the key of checkpoints
        that it was told to keep.
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
        # S3 refuses two changes of one bucket's policy settings at once, hence the chain.
        in_turn = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[closed, versioning]))
        aws.s3.BucketPolicy(f"{name}-tls-only", bucket=bucket.bucket, policy=_tls_only(bucket), opts=in_turn)
        self._lifecycle(bucket, in_turn)
        return bucket

    def _lifecycle(self, bucket: aws.s3.Bucket, opts: pulumi.ResourceOptions) -> None:
        """Nothing that nobody can see is paid for: old versions, unfinished uploads, checkpoints past their age."""
        days = self._settings.storage.expire_checkpoints_after_days
        rules = [
            aws.s3.BucketLifecycleConfigurationRuleArgs(
                id="leftovers",
                status="Enabled",
                filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
                noncurrent_version_expiration=aws.s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs(
                    noncurrent_days=_DAYS_OF_OLD_VERSIONS
                ),
                abort_incomplete_multipart_upload=aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                    days_after_initiation=_DAYS_OF_UNFINISHED_UPLOADS
                ),
            )
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

    def _file_system(self) -> aws.fsx.LustreFileSystem:
        """Lustre beside the GPU nodes; what it holds is in the bucket too, so it needs no backup of its own."""
        wanted = self._settings.storage
        return aws.fsx.LustreFileSystem(
            f"{self._name}-lustre",
            deployment_type="PERSISTENT_2",
            storage_type="SSD",
            storage_capacity=wanted.size_gib,
            per_unit_storage_throughput=wanted.throughput_mb_per_second_per_tib,
            file_system_type_version=_LUSTRE_VERSION,
            data_compression_type="LZ4",
            subnet_ids=self._network.gpu_subnet.id,
            security_group_ids=[self._lustre_group().id],
            kms_key_id=self._cluster.key.arn,
            automatic_backup_retention_days=0,
            skip_final_backup=True,
            tags=named(self._tags, f"{self._name}-lustre"),
            opts=self._child,
        )

    def _lustre_group(self) -> aws.ec2.SecurityGroup:
        """Lustre between the file system's own servers, and between them and the nodes."""
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

    def _association(self, file_system: aws.fsx.LustreFileSystem, bucket: aws.s3.Bucket) -> None:
        """The bucket's datasets as files, in both directions.

        A file that someone deletes to make room stays in the bucket: it is the source, the file system a cache.
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

    def _work_folder(self, bucket: aws.s3.Bucket) -> None:
        """A folder of the file system that belongs to the trainer's user; all else there is root's.

        Lustre's root cannot be given away by a pod without root's rights. FSx takes owner and permissions of a folder
        from the object that stands for it: "POSIX metadata support for data repositories" in its user guide.
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

    def _drivers(self) -> list[aws.eks.Addon]:
        """CSI drivers. That of FSx only mounts, so it gets no rights: Pulumi makes the file system, no claim does."""
        cluster, name = self._cluster, self._name
        role = cluster.pod_role(f"{name}-ebs", self, managed=["AmazonEBSCSIDriverPolicy"])
        ebs = ("ebs-csi-controller-sa", role)
        return [
            cluster.addon(f"{name}-ebs-csi", "aws-ebs-csi-driver", self, after=cluster.ready, identity=ebs),
            cluster.addon(f"{name}-fsx-csi", "aws-fsx-csi-driver", self, after=cluster.ready),
        ]

    def _volume(
        self,
        file_system: aws.fsx.LustreFileSystem,
        namespace: k8s.core.v1.Namespace,
        drivers: list[aws.eks.Addon],
    ) -> None:
        """The file system as a volume and the claim on it."""
        source = k8s.core.v1.CSIPersistentVolumeSourceArgs(
            driver="fsx.csi.aws.com",
            volume_handle=file_system.id,
            volume_attributes={"dnsname": file_system.dns_name, "mountname": file_system.mount_name},
        )
        opts = pulumi.ResourceOptions(parent=self, provider=self._cluster.provider, depends_on=drivers)
        where, labels = namespace.metadata.name, self._tags
        static_volume(self._name, self.facts, where, labels, opts, csi=source, mount_options=["flock"])

    def _trainer_identity(self, bucket: aws.s3.Bucket, namespace: k8s.core.v1.Namespace) -> None:
        """What the trainer may do: read and write checkpoints, read datasets, and see what there is.

        Listing is not cut to prefixes: S3 then answers 403 instead of 404 for an object that is not there, and a run
        could not tell a first start from a forbidden one. The bucket holds nothing but these two folders.
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
        role = self._cluster.pod_role(f"{self._name}-trainer", self, statements=statements)
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
    """Refuse whoever comes without TLS, whatever else allows it."""
    everything = [bucket.arn, pulumi.Output.concat(bucket.arn, "/*")]
    plain = {"Bool": {"aws:SecureTransport": "false"}}
    return policy([Statement(["s3:*"], everything, effect="Deny", principal="*", condition=plain)])
