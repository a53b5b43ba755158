"""The workspace of Azure Machine Learning, what it stands on, its compute cluster and its datastores."""

from __future__ import annotations

import pulumi
from pulumi_azure_native import (
    applicationinsights,
    authorization,
    keyvault,
    managedidentity,
    monitor,
    operationalinsights,
)
from pulumi_azure_native import machinelearningservices as ml

from infra.clouds.azure.cluster import Role, grant
from infra.clouds.azure.jobs import DATA_INPUT, Place, submitted
from infra.clouds.azure.network import EndpointNetwork, private_endpoint
from infra.clouds.azure.registry import ContainerRegistry
from infra.clouds.azure.settings import Settings, physical_name
from infra.clouds.azure.storage import CHECKPOINTS, DATASETS, ServiceStore
from infra.contract import ServiceRun, Submitted

__all__ = ["DATA_INPUT", "Workspace"]

#: Names within the workspace, which are nobody else's.
_COMPUTE = "gpus"
_DAYS_OF_LOGS = 30


class Workspace(pulumi.ComponentResource):
    """A workspace that no public network reaches unless ranges are authorised; its machines are in a VNet of its own.

    It acts as an identity that was given what it needs and nothing else: with one of the system's own, the service
    would give itself the whole resource group.
    """

    workspace: ml.Workspace

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: EndpointNetwork,
        store: ServiceStore,
        registry: ContainerRegistry,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:azure:Workspace", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._store, self._registry = store, registry
        self._group = network.resource_group.name
        self._child = pulumi.ResourceOptions(parent=self)
        self._identity = managedidentity.UserAssignedIdentity(
            f"{name}-identity", resource_group_name=self._group, tags=settings.labels, opts=self._child
        )
        self._logs = operationalinsights.Workspace(
            f"{name}-logs",
            resource_group_name=self._group,
            sku=operationalinsights.WorkspaceSkuArgs(name="PerGB2018"),
            retention_in_days=_DAYS_OF_LOGS,
            tags=settings.labels,
            opts=self._child,
        )
        vault, insights = self._vault(), self._insights()
        self.workspace = self._workspace(vault, insights, self._rights(vault, insights))
        self._diagnostics()
        private_endpoint(name, network, self.workspace.id, "amlworkspace", settings.labels, self._child)
        self.compute = self._compute()
        self._datastores = [self._datastore(folder) for folder in (DATASETS, CHECKPOINTS)]
        self.register_outputs({"workspace": self.workspace.id})

    def _vault(self) -> keyvault.Vault:
        """Where the workspace keeps what it must; closed but for Azure's own services."""
        group, stack = self._network.resource_group, self._settings.stack
        tenant = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self)).tenant_id
        return keyvault.Vault(
            f"{self._name}-vault",
            # 24 characters at most, the first a letter.
            vault_name=group.id.apply(lambda unique: physical_name(stack, unique, 24)),
            resource_group_name=group.name,
            properties=keyvault.VaultPropertiesArgs(
                tenant_id=tenant,
                sku=keyvault.SkuArgs(family="A", name=keyvault.SkuName.STANDARD),
                enable_rbac_authorization=True,
                enable_soft_delete=True,
                soft_delete_retention_in_days=7,
                enable_purge_protection=True,
                public_network_access="Disabled",
                network_acls=keyvault.NetworkRuleSetArgs(bypass="AzureServices", default_action="Deny"),
            ),
            tags=self._settings.labels,
            opts=self._child,
        )

    def _insights(self) -> applicationinsights.Component:
        return applicationinsights.Component(
            f"{self._name}-insights",
            resource_group_name=self._group,
            kind="web",
            application_type="web",
            ingestion_mode="LogAnalytics",
            workspace_resource_id=self._logs.id,
            tags=self._settings.labels,
            opts=self._child,
        )

    def _rights(self, vault: keyvault.Vault, insights: applicationinsights.Component) -> list[pulumi.Resource]:
        """What the service's documentation lists for a workspace with an identity of the user's own.

        It says Contributor of each; these are the narrower roles of the same resources.
        """
        needed: dict[str, tuple[Role, pulumi.Input[str]]] = {
            "store": (Role.STORAGE_ACCOUNT_CONTRIBUTOR, self._store.account.id),
            "blobs": (Role.BLOB_CONTRIBUTOR, self._store.account.id),
            "store-network": (Role.AI_NETWORK_APPROVER, self._store.account.id),
            "vault": (Role.KEY_VAULT_CONTRIBUTOR, vault.id),
            "secrets": (Role.KEY_VAULT_ADMINISTRATOR, vault.id),
            "vault-network": (Role.AI_NETWORK_APPROVER, vault.id),
            "registry": (Role.ACR_PUSH, self._registry.registry_id),
            "registry-network": (Role.AI_NETWORK_APPROVER, self._registry.registry_id),
            "insights": (Role.APPLICATION_INSIGHTS_CONTRIBUTOR, insights.id),
        }
        return [
            grant(f"{self._name}-{what}", role, scope, self._identity.principal_id, "ServicePrincipal", self._child)
            for what, (role, scope) in needed.items()
        ]

    def _workspace(
        self, vault: keyvault.Vault, insights: applicationinsights.Component, rights: list[pulumi.Resource]
    ) -> ml.Workspace:
        settings, access = self._settings, ml.PublicNetworkAccessType
        return ml.Workspace(
            f"{self._name}-workspace",
            resource_group_name=self._group,
            identity=ml.ManagedServiceIdentityArgs(
                type=ml.ManagedServiceIdentityType.USER_ASSIGNED, user_assigned_identities=[self._identity.id]
            ),
            primary_user_assigned_identity=self._identity.id,
            storage_account=self._store.account.id,
            system_datastores_auth_mode=ml.SystemDatastoresAuthMode.IDENTITY,
            key_vault=vault.id,
            application_insights=insights.id,
            container_registry=self._registry.registry_id,
            public_network_access=access.ENABLED if settings.network.authorized_cidrs else access.DISABLED,
            managed_network=ml.ManagedNetworkSettingsArgs(isolation_mode=ml.IsolationMode.ALLOW_INTERNET_OUTBOUND),
            provision_network_now=True,
            v1_legacy_mode=False,
            tags=settings.labels,
            opts=pulumi.ResourceOptions(parent=self, depends_on=rights),
        )

    def _diagnostics(self) -> None:
        """Every log of the workspace, beside its metrics; they outlive a job."""
        monitor.DiagnosticSetting(
            f"{self._name}-diagnostics",
            resource_uri=self.workspace.id,
            workspace_id=self._logs.id,
            logs=[monitor.DiagnosticsLogSettingsArgs(category_group="allLogs", enabled=True)],
            metrics=[monitor.DiagnosticsMetricSettingsArgs(category="AllMetrics", enabled=True)],
            opts=self._child,
        )

    def _compute(self) -> ml.Compute:
        """Machines without public addresses and log-ins, as many as the job asks for, none when it is over."""
        wanted = self._settings.gpu
        properties = ml.AmlComputePropertiesArgs(
            vm_size=wanted.instance_type,
            vm_priority=ml.VmPriority.LOW_PRIORITY if wanted.capacity == "spot" else ml.VmPriority.DEDICATED,
            os_type=ml.OsType.LINUX,
            scale_settings=ml.ScaleSettingsArgs(
                min_node_count=wanted.nodes.min,
                max_node_count=wanted.nodes.max,
                node_idle_time_before_scale_down=f"PT{self._settings.azureml.idle_minutes}M",
            ),
            enable_node_public_ip=False,
            remote_login_port_public_access=ml.RemoteLoginPortPublicAccess.DISABLED,
        )
        return ml.Compute(
            f"{self._name}-compute",
            compute_name=_COMPUTE,
            resource_group_name=self._group,
            workspace_name=self.workspace.name,
            location=self._settings.location,
            identity=ml.ManagedServiceIdentityArgs(
                type=ml.ManagedServiceIdentityType.USER_ASSIGNED, user_assigned_identities=[self._store.trainer.id]
            ),
            properties=ml.AmlComputeArgs(compute_type="AmlCompute", disable_local_auth=True, properties=properties),
            tags=self._settings.labels,
            opts=self._child,
        )

    def _datastore(self, what: str) -> ml.Datastore:
        """The container under a name of the workspace; whoever opens it does so as itself, there is no key."""
        return ml.Datastore(
            f"{self._name}-{what}",
            name=what,
            resource_group_name=self._group,
            workspace_name=self.workspace.name,
            skip_validation=True,
            properties=ml.AzureBlobDatastoreArgs(
                datastore_type="AzureBlob",
                account_name=self._store.account.name,
                container_name=self._store.container.name,
                credentials=ml.NoneDatastoreCredentialsArgs(credentials_type="None"),
                service_data_access_auth_identity=ml.ServiceDataAccessAuthIdentity.WORKSPACE_USER_ASSIGNED_IDENTITY,
                tags=self._settings.labels,
            ),
            opts=self._child,
        )

    def submit(self, name: str, run: ServiceRun, parent: pulumi.Resource) -> Submitted:
        """One command job, after everything that it needs."""
        place = Place(
            group=self._group,
            workspace=self.workspace.name,
            compute=self.compute.id,
            client_id=self._store.trainer.client_id,
            after=(*self._store.ready, *self._registry.ready, *self._datastores),
        )
        return submitted(name, self._settings, run, place, parent)
