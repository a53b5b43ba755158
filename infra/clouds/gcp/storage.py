"""The bucket of checkpoints, Filestore for datasets, and the trainer's identity."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as k8s

from infra.clouds.gcp.cluster import Cluster
from infra.clouds.gcp.network import Network
from infra.clouds.gcp.settings import Settings, account_id
from infra.components.volume import static_volume
from infra.contract import Identity, Storage

#: Folders of the bucket: the trainer writes checkpoints and reads both.
CHECKPOINTS = "checkpoints"
DATASETS = "datasets"
#: The second address of GKE's metadata server, which issues tokens; the first is 169.254.169.254:80 (GKE, Workload
#: Identity).
_METADATA_SERVER = "169.254.169.252/32:988"

_SHARE = "datasets"
_OLD_VERSION_DAYS = 3


class TrainingStorage(pulumi.ComponentResource):
    """A bucket for checkpoints, a shared file system for datasets, and the trainer's service account.

    `facts` and `identity` are for the contract; `bucket_name` is the bucket's physical name.
    """

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
        """Create the bucket, the identity, and Filestore with its Kubernetes volume."""
        super().__init__("torchrec-cloud:gcp:Storage", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.facts = Storage("datasets", settings.storage.mount_path, settings.storage.size_gib, "ReadWriteMany")
        self.bucket_name = checkpoint_bucket(name, settings, self).name
        self.identity = self._create_identity(cluster)
        self._create_volume(self._create_filestore(network), cluster, namespace)
        self.register_outputs({"bucket": self.bucket_name, "claim": self.facts.claim_name})

    def _create_identity(self, cluster: Cluster) -> Identity:
        """Create the trainer's account, which only its pods may use to read the bucket and write checkpoints."""
        account = gcp.serviceaccount.Account(
            f"{self._name}-trainer",
            account_id=account_id(self._settings, "trainer"),
            display_name=f"Trainer of {self._settings.stack}",
            opts=self._child,
        )
        grant_bucket(self._name, self.bucket_name, account, self._child)
        facts = Identity(annotations={"iam.gke.io/gcp-service-account": account.email}, endpoints=(_METADATA_SERVER,))
        pods = f"serviceAccount:{cluster.workload_pool}[{self._settings.namespace}/{facts.service_account}]"
        gcp.serviceaccount.IAMMember(
            f"{self._name}-trainer-pods",
            service_account_id=account.name,
            role="roles/iam.workloadIdentityUser",
            member=pods,
            # The pool of Kubernetes identities is created with a project's first cluster.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[cluster.control_plane]),
        )
        return facts

    def _create_filestore(self, network: Network) -> gcp.filestore.Instance:
        """Create NFS in the zone of the GPU nodes, deleted with the stack: datasets are copied from the bucket."""
        existing = self._settings.network.existing
        mode = "PRIVATE_SERVICE_ACCESS" if existing and existing.private_service_access else None
        return gcp.filestore.Instance(
            f"{self._name}-filestore",
            tier="ZONAL",
            location=self._settings.zone,
            protocol="NFS_V3",
            file_shares=gcp.filestore.InstanceFileSharesArgs(name=_SHARE, capacity_gb=self._settings.storage.size_gib),
            networks=[
                gcp.filestore.InstanceNetworkArgs(network=network.vpc.name, modes=["MODE_IPV4"], connect_mode=mode)
            ],
            deletion_protection_enabled=False,
            labels=self._settings.labels,
            opts=self._child,
        )

    def _create_volume(
        self, filestore: gcp.filestore.Instance, cluster: Cluster, namespace: k8s.core.v1.Namespace
    ) -> None:
        """Create a volume of Filestore's CSI driver, which supports a pod's fsGroup, unlike plain NFS."""
        address = filestore.networks.apply(lambda networks: (networks[0].ip_addresses or [""])[0])
        handle = pulumi.Output.concat("modeInstance/", self._settings.zone, "/", filestore.name, "/", _SHARE)
        source = k8s.core.v1.CSIPersistentVolumeSourceArgs(
            driver="filestore.csi.storage.gke.io",
            volume_handle=handle,
            volume_attributes={"ip": address, "volume": _SHARE},
        )
        on_cluster = pulumi.ResourceOptions(parent=self, provider=cluster.provider)
        labels = self._settings.labels
        static_volume(self._name, self.facts, namespace.metadata.name, labels, on_cluster, csi=source)


def checkpoint_bucket(name: str, settings: Settings, parent: pulumi.Resource) -> gcp.storage.Bucket:
    """Create a private, versioned bucket, encrypted with Google's keys instead of one of this stack.

    `pulumi destroy` would destroy the stack's key, and kept checkpoints must stay readable. Versions replace soft
    delete, whose minimum of 7 days is billed for every replaced checkpoint.
    """
    keep = settings.storage.on_destroy == "keep"
    return gcp.storage.Bucket(
        f"{name}-bucket",
        location=settings.region,
        storage_class="STANDARD",
        uniform_bucket_level_access=True,
        public_access_prevention="enforced",
        versioning=gcp.storage.BucketVersioningArgs(enabled=True),
        soft_delete_policy=gcp.storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=0),
        lifecycle_rules=_lifecycle_rules(settings.storage.expire_checkpoints_after_days),
        force_destroy=not keep,
        labels=settings.labels,
        opts=pulumi.ResourceOptions(parent=parent, retain_on_delete=keep),
    )


def _lifecycle_rules(days: int | None) -> Sequence[gcp.storage.BucketLifecycleRuleArgs]:
    """Delete old versions, incomplete uploads and expired checkpoints, which would be billed unnoticed."""
    condition = gcp.storage.BucketLifecycleRuleConditionArgs
    rules = [
        _rule("Delete", condition(days_since_noncurrent_time=_OLD_VERSION_DAYS, with_state="ARCHIVED")),
        _rule("AbortIncompleteMultipartUpload", condition(age=1)),
    ]
    if days:
        expired = condition(age=days, with_state="LIVE", matches_prefixes=[f"{CHECKPOINTS}/"])
        rules.append(_rule("Delete", expired))
    return rules


def grant_bucket(
    name: str, bucket: pulumi.Output[str], account: gcp.serviceaccount.Account, opts: pulumi.ResourceOptions
) -> tuple[pulumi.Resource, ...]:
    """Let the account read the whole bucket and write the folder of checkpoints."""
    return tuple(
        gcp.storage.BucketIAMMember(
            f"{name}-{what}", bucket=bucket, role=role, member=account.member, condition=condition, opts=opts
        )
        for what, role, condition in (
            ("reader", "roles/storage.objectViewer", None),
            ("writer", "roles/storage.objectUser", _in_folder(bucket, CHECKPOINTS)),
        )
    )


def _rule(action: str, condition: gcp.storage.BucketLifecycleRuleConditionArgs) -> gcp.storage.BucketLifecycleRuleArgs:
    """Return a lifecycle rule with one action."""
    return gcp.storage.BucketLifecycleRuleArgs(
        action=gcp.storage.BucketLifecycleRuleActionArgs(type=action), condition=condition
    )


def _in_folder(bucket: pulumi.Output[str], folder: str) -> gcp.storage.BucketIAMMemberConditionArgs:
    """Return the condition that restricts a role to one folder of the bucket."""
    prefix = pulumi.Output.concat("projects/_/buckets/", bucket, "/objects/", folder, "/")
    return gcp.storage.BucketIAMMemberConditionArgs(
        title=f"below-{folder}", expression=pulumi.Output.concat('resource.name.startsWith("', prefix, '")')
    )
