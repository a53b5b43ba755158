"""The blob container of checkpoints with the trainer's identity, and the NetApp volume of datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi
import pulumi_kubernetes as k8s
from pulumi_azure_native import managedidentity, netapp, resources, storage

from infra.clouds.azure.cluster import AksCluster
from infra.clouds.azure.identity import Principal, Role, grant
from infra.clouds.azure.network import EndpointNetwork, PrivateNetwork, address_or_range, private_endpoint
from infra.clouds.azure.settings import Settings, physical_name
from infra.components.volume import static_volume
from infra.contract import Identity, Storage

_CONTAINER = "training"
CHECKPOINTS, DATASETS = "checkpoints", "datasets"
#: adlfs, which opens abfs:// for fsspec, tries anonymous access first unless this is set.
KEYLESS = {"AZURE_STORAGE_ANON": "false"}
#: Explicit NetApp names: the API returns a pool's name as `account/pool`, which a volume's request must not contain.
_POOL, _VOLUME = "datasets", "datasets"
#: NFS 4.1 needs one port. Several connections raise throughput, and 256 KiB per request suits large reads (Azure
#: NetApp Files, Linux mount options). `hard` retries until the service answers instead of failing a read during
#: training.
_MOUNT_OPTIONS = ("nfsvers=4.1", "nconnect=8", "rsize=262144", "wsize=262144", "hard", "noatime")


class Container(pulumi.ComponentResource):
    """A storage account with one container, its private endpoints, and write access for the administrators.

    It has a separate resource group: deleting the stack's group would delete an account that must be kept.
    """

    #: Kinds of private endpoints. A hierarchical namespace, which renames a checkpoint in one step, adds `dfs`.
    kinds: Sequence[str] = ("blob", "dfs")
    hierarchical = True
    bypass = "None"

    container_uri: pulumi.Output[str]
    checkpoint_uri: pulumi.Output[str]
    upload: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: EndpointNetwork,
        administrators: Mapping[str, Principal],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the account and its container, then endpoints and roles."""
        super().__init__("torchrec-cloud:azure:ObjectStore", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        self._kept = pulumi.ResourceOptions(parent=self, retain_on_delete=settings.storage.on_destroy == "keep")
        self._group = resources.ResourceGroup(
            f"{name}-group", location=settings.location, tags=settings.labels, opts=self._kept
        )
        self.account = account = self._create_account()
        self._expire_checkpoints(account)
        self.container = container = self._create_container(account)
        self._endpoints = self._create_endpoints()
        for who, (principal, kind) in administrators.items():
            grant(f"{name}-people-{who}", Role.BLOB_CONTRIBUTOR, container.id, principal, kind, self._child)
        self.container_uri = pulumi.Output.concat("abfs://", container.name, "@", account.name, ".dfs.core.windows.net")
        self.checkpoint_uri = pulumi.Output.concat(self.container_uri, "/", CHECKPOINTS)
        self.upload = pulumi.Output.concat(
            "az storage blob upload-batch --auth-mode login --account-name ",
            account.name,
            f" --destination {_CONTAINER} --destination-path {DATASETS} --source <folder>",
        )

    def _create_account(self) -> storage.StorageAccount:
        """Create an account that accepts only Entra tokens and is private unless ranges are authorized."""
        authorized = self._settings.network.authorized_cidrs
        rules = [
            storage.IPRuleArgs(i_p_address_or_range=address_or_range(cidr), action=storage.Action.ALLOW)
            for cidr in authorized
        ]
        stack = self._settings.stack
        return storage.StorageAccount(
            f"{self._name}-account",
            account_name=self._group.id.apply(lambda group: physical_name(stack, group, max_length=24)),
            resource_group_name=self._group.name,
            kind="StorageV2",
            sku=storage.SkuArgs(name="Standard_ZRS" if self._settings.has_zones else "Standard_LRS"),
            is_hns_enabled=self.hierarchical,
            allow_shared_key_access=False,
            default_to_o_auth_authentication=True,
            is_local_user_enabled=False,
            allow_blob_public_access=False,
            allow_cross_tenant_replication=False,
            enable_https_traffic_only=True,
            minimum_tls_version="TLS1_2",
            public_network_access="Enabled" if authorized else "Disabled",
            network_rule_set=storage.NetworkRuleSetArgs(
                default_action=storage.DefaultAction.DENY, bypass=self.bypass, ip_rules=rules
            ),
            tags=self._settings.labels,
            opts=self._kept,
        )

    def _create_container(self, account: storage.StorageAccount) -> storage.BlobContainer:
        """Create the container without public access."""
        return storage.BlobContainer(
            f"{self._name}-container",
            container_name=_CONTAINER,
            account_name=account.name,
            resource_group_name=self._group.name,
            public_access=storage.PublicAccess.NONE,
            opts=self._kept,
        )

    def _create_endpoints(self) -> list[pulumi.Resource]:
        """Create one private endpoint after the other, after the container.

        An account accepts one endpoint at a time and answers StorageAccountOperationInProgress to a second one, which
        the provider does not retry (Azure/bicep-registry-modules#6001).
        """
        endpoints: list[pulumi.Resource] = [self.container]
        for kind in self.kinds:
            endpoints.append(
                private_endpoint(
                    *(self._name, self._network, self.account.id, kind, self._settings.labels, self._child),
                    after=endpoints[-1:],
                )
            )
        return endpoints[1:]

    def _expire_checkpoints(self, account: storage.StorageAccount) -> None:
        """Delete checkpoints after `storage.expire_checkpoints_after_days`, if it is set."""
        days = self._settings.storage.expire_checkpoints_after_days
        if days is None:
            return
        expired = storage.DateAfterModificationArgs(days_after_modification_greater_than=days)
        definition = storage.ManagementPolicyDefinitionArgs(
            filters=storage.ManagementPolicyFilterArgs(
                blob_types=["blockBlob"], prefix_match=[f"{_CONTAINER}/{CHECKPOINTS}/"]
            ),
            actions=storage.ManagementPolicyActionArgs(base_blob=storage.ManagementPolicyBaseBlobArgs(delete=expired)),
        )
        rule = storage.ManagementPolicyRuleArgs(name="expire-checkpoints", type="Lifecycle", definition=definition)
        storage.ManagementPolicy(
            f"{self._name}-life-cycle",
            account_name=account.name,
            management_policy_name="default",
            resource_group_name=self._group.name,
            policy=storage.ManagementPolicySchemaArgs(rules=[rule]),
            opts=self._kept,
        )

    def _create_trainer_identity(self) -> tuple[managedidentity.UserAssignedIdentity, pulumi.Resource]:
        """Create the trainer's identity, which may read and write only this container."""
        trainer = managedidentity.UserAssignedIdentity(
            f"{self._name}-trainer",
            resource_group_name=self._network.resource_group.name,
            tags=self._settings.labels,
            opts=self._child,
        )
        role = grant(
            f"{self._name}-checkpoints",
            Role.BLOB_CONTRIBUTOR,
            self.container.id,
            trainer.principal_id,
            "ServicePrincipal",
            self._child,
        )
        return trainer, role


class ObjectStore(Container):
    """The container of a cluster, to which pods write as the trainer's service account."""

    identity: Identity
    ready: tuple[pulumi.Resource, ...]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: PrivateNetwork,
        cluster: AksCluster,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the container and federate the trainer's identity with its service account."""
        super().__init__(name, settings, network, cluster.administrators, opts)
        trainer, role = self._create_trainer_identity()
        federation = managedidentity.FederatedIdentityCredential(
            f"{name}-federation",
            resource_group_name=network.resource_group.name,
            resource_name_=trainer.name,
            issuer=cluster.issuer,
            subject=f"system:serviceaccount:{settings.namespace}:{Identity().service_account}",
            audiences=["api://AzureADTokenExchange"],
            opts=self._child,
        )
        self.identity = Identity(
            annotations={"azure.workload.identity/client-id": trainer.client_id},
            pod_labels={"azure.workload.identity/use": "true"},
            env=KEYLESS,
        )
        self.ready = (*self._endpoints, federation, role)
        self.register_outputs({"uri": self.container_uri})


class ServiceStore(Container):
    """The container of a training service, whose workspace does not accept an account with a hierarchical namespace.

    The service bypasses the firewall, as Azure's trusted services do, to show logs.
    """

    kinds = ("blob",)
    hierarchical = False
    bypass = "AzureServices"

    trainer: managedidentity.UserAssignedIdentity

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: EndpointNetwork,
        administrators: Mapping[str, Principal],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the container and the identity of the service's machines."""
        super().__init__(name, settings, network, administrators, opts)
        self.trainer, role = self._create_trainer_identity()
        self.ready = (*self._endpoints, role)
        self.register_outputs({"uri": self.container_uri})


class SharedStorage(pulumi.ComponentResource):
    """A NetApp pool with one volume of the same size, mounted by NFS and deleted with the stack, before its subnet."""

    facts: Storage
    ready: tuple[pulumi.Resource, ...]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: PrivateNetwork,
        cluster: AksCluster,
        namespace: k8s.core.v1.Namespace,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create account, pool and volume, then the Kubernetes volume on top."""
        super().__init__("torchrec-cloud:azure:SharedStorage", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        # NetApp refuses to delete a pool or an account for a while after what was in it is gone, and the provider does
        # not retry that (azure-sdk-for-go#6485, #6374). Both disappear with the resource group, at the end.
        self._with_group = pulumi.ResourceOptions(parent=self, deleted_with=network.resource_group)
        self.facts = Storage("datasets", settings.storage.mount_path, settings.storage.size_gib, "ReadWriteMany")
        account = netapp.Account(
            f"{name}-netapp",
            resource_group_name=network.resource_group.name,
            encryption=netapp.AccountEncryptionArgs(key_source="Microsoft.NetApp"),
            tags=settings.labels,
            opts=self._with_group,
        )
        volume = self._create_volume(account, self._create_pool(account))
        server = volume.mount_targets.apply(lambda targets: targets[0].ip_address)
        source = k8s.core.v1.NFSVolumeSourceArgs(server=server, path=f"/{self._export}")
        on_cluster = pulumi.ResourceOptions(parent=self, provider=cluster.provider)
        self.ready = static_volume(
            name,
            self.facts,
            namespace.metadata.name,
            settings.labels,
            on_cluster,
            nfs=source,
            mount_options=_MOUNT_OPTIONS,
        )
        self.register_outputs({"throughput_mibps": settings.storage.throughput_mibps})

    @property
    def _export(self) -> str:
        """Return the volume's path, which is unique within the subnet."""
        return f"{self._settings.stack}-{_VOLUME}"

    def _create_pool(self, account: netapp.Account) -> netapp.CapacityPool:
        """Create a pool with automatic QoS: a volume of the pool's size gets all of its throughput."""
        settings = self._settings.storage
        return netapp.CapacityPool(
            f"{self._name}-pool",
            pool_name=_POOL,
            account_name=account.name,
            resource_group_name=self._network.resource_group.name,
            service_level=settings.tier,
            size=settings.size_bytes,
            qos_type="Auto",
            tags=self._settings.labels,
            opts=self._with_group,
        )

    def _create_volume(self, account: netapp.Account, pool: netapp.CapacityPool) -> netapp.CapacityPoolVolume:
        """Create the volume, exported to the nodes' subnet only.

        Any user may write: pods without InfiniBand run as a non-root user, and NFS has no fsGroup. Pods with InfiniBand
        run as root (`node_fabric`), and must be able to write into folders that the other user has created.
        """
        settings = self._settings.storage
        nodes = netapp.ExportPolicyRuleArgs(
            rule_index=1,
            allowed_clients=self._settings.network.subnets["network.nodes_cidr"],
            nfsv41=True,
            nfsv3=False,
            cifs=False,
            unix_read_write=True,
            unix_read_only=False,
            has_root_access=self._settings.infiniband,
        )
        return netapp.CapacityPoolVolume(
            f"{self._name}-volume",
            volume_name=_VOLUME,
            pool_name=_POOL,
            account_name=account.name,
            resource_group_name=self._network.resource_group.name,
            creation_token=self._export,
            service_level=settings.tier,
            usage_threshold=settings.size_bytes,
            subnet_id=self._network.netapp.id,
            protocol_types=["NFSv4.1"],
            export_policy=netapp.VolumePropertiesExportPolicyArgs(rules=[nodes]),
            network_features="Standard",
            security_style="unix",
            unix_permissions="0777",
            snapshot_directory_visible=False,
            zones=self._settings.zones,
            tags=self._settings.labels | {"throughput-mibps": str(settings.throughput_mibps)},
            opts=pulumi.ResourceOptions(parent=self, depends_on=[pool]),
        )
