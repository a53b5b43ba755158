"""The bucket of checkpoints, Filestore for datasets, and the identity that may use them."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as k8s

from infra.clouds.gcp.cluster import Cluster, account_id
from infra.clouds.gcp.network import Network
from infra.clouds.gcp.settings import Settings
from infra.components.volume import static_volume
from infra.contract import Identity, Storage

#: Folders of the bucket: the trainer writes the first and reads both.
CHECKPOINTS = "checkpoints"
DATASETS = "datasets"
#: Where GKE's metadata server hands out tokens, beside 169.254.169.254:80 (its guide to Workload Identity says so).
_METADATA_SERVER = "169.254.169.252/32:988"

_SHARE = "datasets"
_DAYS_OF_OLD_VERSIONS = 3


class TrainingStorage(pulumi.ComponentResource):
    """Checkpoints in a bucket, datasets on a shared file system, and one account for the trainer.

    `facts` and `identity` are for the contract; `bucket_name` is what Google Cloud calls the bucket.
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
        super().__init__("torchrec-cloud:gcp:Storage", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.facts = Storage("datasets", settings.storage.mount_path, settings.storage.size_gib, "ReadWriteMany")
        self.bucket_name = checkpoint_bucket(name, settings, self).name
        self.identity = self._identity(cluster)
        self._volume(self._filestore(network), cluster, namespace)
        self.register_outputs({"bucket": self.bucket_name, "claim": self.facts.claim_name})

    def _identity(self, cluster: Cluster) -> Identity:
        """The trainer's account: it reads the bucket and writes its checkpoints, and only its pods may be it."""
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
            # The pool of Kubernetes identities comes into being with a project's first cluster.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[cluster.control_plane]),
        )
        return facts

    def _filestore(self, network: Network) -> gcp.filestore.Instance:
        """NFS in the zone of the GPU nodes, gone with the stack: datasets are copied from the bucket."""
        return gcp.filestore.Instance(
            f"{self._name}-filestore",
            tier="ZONAL",
            location=self._settings.zone,
            protocol="NFS_V3",
            file_shares=gcp.filestore.InstanceFileSharesArgs(name=_SHARE, capacity_gb=self._settings.storage.size_gib),
            networks=[gcp.filestore.InstanceNetworkArgs(network=network.vpc.name, modes=["MODE_IPV4"])],
            deletion_protection_enabled=False,
            labels=self._settings.labels,
            opts=self._child,
        )

    def _volume(self, filestore: gcp.filestore.Instance, cluster: Cluster, namespace: k8s.core.v1.Namespace) -> None:
        """The share as a volume of Filestore's own driver: unlike plain NFS, it gives the share to a pod's group."""
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
    """Private, versioned, encrypted by Google's own keys and not by one of this stack.

    `pulumi destroy` would destroy that key's versions, and checkpoints that outlive the stack must stay readable.
    Versions take the place of soft delete, whose shortest term of 7 days is billed for every checkpoint replaced.
    """
    keeps = settings.storage.on_destroy == "keep"
    return gcp.storage.Bucket(
        f"{name}-bucket",
        location=settings.region,
        storage_class="STANDARD",
        uniform_bucket_level_access=True,
        public_access_prevention="enforced",
        versioning=gcp.storage.BucketVersioningArgs(enabled=True),
        soft_delete_policy=gcp.storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=0),
        lifecycle_rules=_lifecycle(settings.storage.expire_checkpoints_after_days),
        force_destroy=not keeps,
        labels=settings.labels,
        opts=pulumi.ResourceOptions(parent=parent, retain_on_delete=keeps),
    )


def _lifecycle(days: int | None) -> Sequence[gcp.storage.BucketLifecycleRuleArgs]:
    """Nothing that nobody can see is paid for: old versions, unfinished uploads, checkpoints past their age."""
    condition = gcp.storage.BucketLifecycleRuleConditionArgs
    rules = [
        _rule("Delete", condition(days_since_noncurrent_time=_DAYS_OF_OLD_VERSIONS, with_state="ARCHIVED")),
        _rule("AbortIncompleteMultipartUpload", condition(age=1)),
    ]
    if days:
        old = condition(age=days, with_state="LIVE", matches_prefixes=[f"{CHECKPOINTS}/"])
        rules.append(_rule("Delete", old))
    return rules


def grant_bucket(
    name: str, bucket: pulumi.Output[str], account: gcp.serviceaccount.Account, opts: pulumi.ResourceOptions
) -> tuple[pulumi.Resource, ...]:
    """The account reads the whole bucket and writes the folder of checkpoints."""
    return tuple(
        gcp.storage.BucketIAMMember(
            f"{name}-{what}", bucket=bucket, role=role, member=account.member, condition=condition, opts=opts
        )
        for what, role, condition in (
            ("reader", "roles/storage.objectViewer", None),
            ("writer", "roles/storage.objectUser", _below(bucket, CHECKPOINTS)),
        )
    )


def _rule(action: str, condition: gcp.storage.BucketLifecycleRuleConditionArgs) -> gcp.storage.BucketLifecycleRuleArgs:
    return gcp.storage.BucketLifecycleRuleArgs(
        action=gcp.storage.BucketLifecycleRuleActionArgs(type=action), condition=condition
    )


def _below(bucket: pulumi.Output[str], folder: str) -> gcp.storage.BucketIAMMemberConditionArgs:
    """Objects of one folder of the bucket."""
    start = pulumi.Output.concat("projects/_/buckets/", bucket, "/objects/", folder, "/")
    return gcp.storage.BucketIAMMemberConditionArgs(
        title=f"below-{folder}", expression=pulumi.Output.concat('resource.name.startsWith("', start, '")')
    )
