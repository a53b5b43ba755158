"""The workspace of Azure Machine Learning, the resources it depends on, its compute cluster and datastores."""

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

from infra.clouds.azure.azureml import jobs
from infra.clouds.azure.identity import Role, grant
from infra.clouds.azure.network import EndpointNetwork, private_endpoint
from infra.clouds.azure.registry import ContainerRegistry
from infra.clouds.azure.settings import GENERATED_SUFFIX, Settings, physical_name
from infra.clouds.azure.storage import CHECKPOINTS, DATASETS, ServiceStore
from infra.contract import ServiceRun, Submitted

#: The name of the compute cluster within the workspace.
_COMPUTE = "gpus"
_LOG_RETENTION_DAYS = 30
_MAX_WORKSPACE_NAME = 33


class Workspace(pulumi.ComponentResource):
    """A workspace without public access unless ranges are authorized, whose machines are in a VNet of the service.

    It uses an identity with only the roles that it needs: the service would grant a system-assigned identity the whole
    resource group.
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
        """Create what the workspace depends on, the workspace, its endpoint, its compute cluster and its datastores."""
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
            retention_in_days=_LOG_RETENTION_DAYS,
            tags=settings.labels,
            opts=self._child,
        )
        vault, insights = self._create_vault(), self._create_insights()
        self.workspace = self._create_workspace(vault, insights, self._grant_workspace_roles(vault, insights))
        self._export_logs()
        private_endpoint(name, network, self.workspace.id, "amlworkspace", settings.labels, self._child)
        self.compute = self._create_compute()
        self._datastores = [self._create_datastore(folder) for folder in (DATASETS, CHECKPOINTS)]
        self.register_outputs({"workspace": self.workspace.id})

    def _create_vault(self) -> keyvault.Vault:
        """Create the key vault that a workspace requires, open only to Azure's own services."""
        group, stack = self._network.resource_group, self._settings.stack
        tenant = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self)).tenant_id
        return keyvault.Vault(
            f"{self._name}-vault",
            vault_name=group.id.apply(lambda unique: physical_name(stack, unique, max_length=24)),
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

    def _create_insights(self) -> applicationinsights.Component:
        """Create the Application Insights component that a workspace requires."""
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

    def _grant_workspace_roles(
        self, vault: keyvault.Vault, insights: applicationinsights.Component
    ) -> list[pulumi.Resource]:
        """Grant the workspace's identity the roles that the service's documentation lists for its resources.

        The documentation lists Contributor for each; these are the narrower roles of the same resources.
        """
        roles: dict[str, tuple[Role, pulumi.Input[str]]] = {
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
            for what, (role, scope) in roles.items()
        ]

    def _create_workspace(
        self, vault: keyvault.Vault, insights: applicationinsights.Component, roles: list[pulumi.Resource]
    ) -> ml.Workspace:
        """Create the workspace after its identity's roles."""
        settings, access = self._settings, ml.PublicNetworkAccessType
        return ml.Workspace(
            f"{self._name}-workspace",
            workspace_name=self._workspace_name(),
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
            opts=pulumi.ResourceOptions(parent=self, depends_on=roles),
        )

    def _workspace_name(self) -> pulumi.Output[str] | None:
        """Return a name of 33 characters, the service's limit, if the generated name is longer."""
        if len(f"{self._name}-workspace{GENERATED_SUFFIX}") <= _MAX_WORKSPACE_NAME:
            return None
        stack = self._settings.stack
        return self._network.resource_group.id.apply(
            lambda unique: physical_name(stack, unique, max_length=_MAX_WORKSPACE_NAME)
        )

    def _export_logs(self) -> None:
        """Send the workspace's logs and metrics to Log Analytics, where they outlive a job."""
        monitor.DiagnosticSetting(
            f"{self._name}-diagnostics",
            resource_uri=self.workspace.id,
            workspace_id=self._logs.id,
            logs=[monitor.DiagnosticsLogSettingsArgs(category_group="allLogs", enabled=True)],
            metrics=[monitor.DiagnosticsMetricSettingsArgs(category="AllMetrics", enabled=True)],
            opts=self._child,
        )

    def _create_compute(self) -> ml.Compute:
        """Create a compute cluster without public addresses and logins, which scales with the jobs."""
        gpu = self._settings.gpu
        properties = ml.AmlComputePropertiesArgs(
            vm_size=gpu.instance_type,
            vm_priority=ml.VmPriority.LOW_PRIORITY if gpu.capacity == "spot" else ml.VmPriority.DEDICATED,
            os_type=ml.OsType.LINUX,
            scale_settings=ml.ScaleSettingsArgs(
                min_node_count=gpu.nodes.min,
                max_node_count=gpu.nodes.max,
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

    def _create_datastore(self, folder: str) -> ml.Datastore:
        """Register the container as a datastore without a key: users open it with their own identity."""
        return ml.Datastore(
            f"{self._name}-{folder}",
            name=folder,
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
        """Submit one command job, after everything that it needs."""
        target = jobs.JobTarget(
            group=self._group,
            workspace=self.workspace.name,
            compute=self.compute.id,
            client_id=self._store.trainer.client_id,
            depends_on=(*self._store.ready, *self._registry.ready, *self._datastores),
        )
        return jobs.submit(name, self._settings, run, target, parent)
