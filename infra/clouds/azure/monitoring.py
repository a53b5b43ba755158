"""Azure's managed Prometheus, which scrapes the cluster, and the managed Grafana that reads it."""

from __future__ import annotations

import pulumi
from pulumi_azure_native import dashboard, monitor

from infra.clouds.azure.cluster import AksCluster
from infra.clouds.azure.identity import Role, grant
from infra.clouds.azure.network import PrivateNetwork, private_endpoint
from infra.clouds.azure.settings import Settings, physical_name

_STREAM = "Microsoft-PrometheusMetrics"
_DESTINATION = "workspace"


class ManagedMonitoring(pulumi.ComponentResource):
    """A metrics workspace, the data collection rule that fills it, and a Grafana that reads it.

    The workspace and its endpoint have public addresses and accept only Entra tokens. Closing them needs a private link
    scope, which would close every other workspace of the VNet too.
    """

    url: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: PrivateNetwork,
        cluster: AksCluster,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the workspace, the collection of metrics and Grafana, then the roles on both."""
        super().__init__("torchrec-cloud:azure:Monitoring", name, None, opts)
        self._name, self._settings, self._network = name, settings, network
        self._child = pulumi.ResourceOptions(parent=self)
        workspace = monitor.AzureMonitorWorkspace(
            f"{name}-workspace",
            resource_group_name=network.resource_group.name,
            tags=settings.labels,
            opts=self._child,
        )
        self._collect_metrics(workspace, cluster)
        grafana = self._create_grafana(workspace)
        reader = grafana.identity.apply(_principal_id)
        grant(f"{name}-read", Role.MONITORING_DATA_READER, workspace.id, reader, "ServicePrincipal", self._child)
        for who, (principal, kind) in cluster.administrators.items():
            grant(f"{name}-grafana-{who}", Role.GRAFANA_ADMIN, grafana.id, principal, kind, self._child)
        private_endpoint(name, network, grafana.id, "grafana", settings.labels, self._child)
        self.url = grafana.properties.apply(lambda properties: properties.endpoint)
        self.register_outputs({"grafana": self.url})

    def _collect_metrics(self, workspace: monitor.AzureMonitorWorkspace, cluster: AksCluster) -> None:
        """Send metrics from the cluster's agents through an endpoint and a rule to the workspace."""
        group, tags = self._network.resource_group.name, self._settings.labels
        endpoint = monitor.DataCollectionEndpoint(
            f"{self._name}-dce",
            resource_group_name=group,
            kind="Linux",
            network_acls=monitor.DataCollectionEndpointNetworkAclsArgs(public_network_access="Enabled"),
            tags=tags,
            opts=self._child,
        )
        source = monitor.PrometheusForwarderDataSourceArgs(name="prometheus", streams=[_STREAM])
        target = monitor.MonitoringAccountDestinationArgs(name=_DESTINATION, account_resource_id=workspace.id)
        rule = monitor.DataCollectionRule(
            f"{self._name}-dcr",
            resource_group_name=group,
            kind="Linux",
            data_collection_endpoint_id=endpoint.id,
            data_sources=monitor.DataCollectionRuleDataSourcesArgs(prometheus_forwarder=[source]),
            destinations=monitor.DataCollectionRuleDestinationsArgs(monitoring_accounts=[target]),
            data_flows=[monitor.DataFlowArgs(streams=[_STREAM], destinations=[_DESTINATION])],
            tags=tags,
            opts=self._child,
        )
        monitor.DataCollectionRuleAssociation(
            f"{self._name}-dcra",
            resource_uri=cluster.managed.id,
            data_collection_rule_id=rule.id,
            opts=self._child,
        )

    def _create_grafana(self, workspace: monitor.AzureMonitorWorkspace) -> dashboard.Grafana:
        """Create a Grafana without API keys: users log in with Entra, and it reads metrics with its own identity."""
        group, stack = self._network.resource_group, self._settings.stack
        source = dashboard.AzureMonitorWorkspaceIntegrationArgs(azure_monitor_workspace_resource_id=workspace.id)
        return dashboard.Grafana(
            f"{self._name}-grafana",
            workspace_name=group.id.apply(lambda unique: physical_name(stack, unique, max_length=23)),
            resource_group_name=group.name,
            sku=dashboard.ResourceSkuArgs(name="Standard"),
            identity=dashboard.ManagedServiceIdentityArgs(type="SystemAssigned"),
            properties=dashboard.ManagedGrafanaPropertiesArgs(
                api_key="Disabled",
                grafana_integrations=dashboard.GrafanaIntegrationsArgs(azure_monitor_workspace_integrations=[source]),
                public_network_access="Enabled" if self._settings.monitoring.public_grafana else "Disabled",
            ),
            tags=self._settings.labels,
            opts=self._child,
        )


def _principal_id(identity: dashboard.outputs.ManagedServiceIdentityResponse | None) -> str:
    """Return the principal of Grafana's own identity."""
    assert identity, "Grafana has a system-assigned identity"
    return identity.principal_id
