"""Values that Azure computes: identities, addresses, and the kubeconfig of AKS."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: aks
contexts:
- {name: aks, context: {cluster: aks, user: clusterUser}}
clusters:
- {name: aks, cluster: {server: "https://aks.privatelink.eastus.azmk8s.io:443", certificate-authority-data: Q0E=}}
users:
- {name: clusterUser, user: {token: a-token-that-must-not-survive}}
"""


def _identity(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"clientId": f"{name}-client", "principalId": f"{name}-principal", "tenantId": "tenant"}


def _cluster(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    kubelet = {"resourceId": "kubelet", "clientId": "kubelet-client", "objectId": "kubelet-object"}
    # The API accepts identities as a list of ids and returns them as a map.
    identities = {one: {"clientId": "control-plane"} for one in inputs["identity"]["userAssignedIdentities"]}
    return {
        "identity": {"type": "UserAssigned", "userAssignedIdentities": identities},
        "identityProfile": {"kubeletidentity": kubelet},
        "oidcIssuerProfile": {"enabled": True, "issuerURL": "https://eastus.oic.prod-aks.azure.com/tenant/cluster/"},
        "privateFQDN": "aks.privatelink.eastus.azmk8s.io",
    }


def _with_identity(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the identities as a map, as the API does for a list of ids."""
    identity = inputs["identity"]
    identities = {one: {"clientId": "client", "principalId": "principal"} for one in identity["userAssignedIdentities"]}
    return {"identity": {"type": identity["type"], "userAssignedIdentities": identities}}


def _job(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the job's id as its name."""
    return {"name": inputs["id"]}


OUTPUTS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "azure-native:containerservice:ManagedCluster": _cluster,
    "azure-native:containerregistry:Registry": lambda name, inputs: {
        "name": inputs["registryName"],
        "loginServer": f"{inputs['registryName']}.azurecr.io",
    },
    "azure-native:dashboard:Grafana": lambda name, inputs: {
        "identity": {"type": "SystemAssigned", "principalId": "grafana-principal", "tenantId": "tenant"},
        "properties": inputs["properties"] | {"endpoint": "https://grafana.eus.grafana.azure.com"},
    },
    "azure-native:machinelearningservices:Compute": _with_identity,
    "azure-native:machinelearningservices:Job": _job,
    "azure-native:machinelearningservices:Workspace": _with_identity,
    "azure-native:managedidentity:UserAssignedIdentity": _identity,
    # The API returns account/pool/volume.
    "azure-native:netapp:CapacityPoolVolume": lambda name, inputs: {
        "name": f"{inputs['accountName']}/{inputs['poolName']}/{inputs['volumeName']}",
        "mountTargets": [{"fileSystemId": "fs", "ipAddress": "10.0.128.4", "mountTargetId": "mt"}],
    },
    "azure-native:netapp:CapacityPool": lambda name, inputs: {"name": f"{inputs['accountName']}/{inputs['poolName']}"},
    "azure-native:network:PublicIPAddress": lambda name, inputs: {"ipAddress": "20.0.0.4"},
    "azure-native:privatedns:PrivateZone": lambda name, inputs: {"name": inputs["privateZoneName"]},
    "azure-native:storage:BlobContainer": lambda name, inputs: {"name": inputs["containerName"]},
    "azure-native:storage:StorageAccount": lambda name, inputs: {"name": inputs["accountName"]},
}

CALLS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "azure-native:authorization:getClientConfig": lambda arguments: {
        "clientId": "client",
        "objectId": "caller-object",
        "subscriptionId": "00000000-0000-0000-0000-000000000000",
        "tenantId": "tenant",
    },
    "azure-native:authorization:getClientToken": lambda arguments: {"token": "entra-token-of-the-caller"},
    "azure-native:containerservice:getManagedCluster": lambda arguments: {"agentPoolProfiles": []},
    "azure-native:containerservice:listManagedClusterUserCredentials": lambda arguments: {
        "kubeconfigs": [{"name": "clusterUser", "value": base64.b64encode(KUBECONFIG.encode()).decode()}]
    },
}
