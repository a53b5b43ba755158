"""Values that Google Cloud computes, in the format of its API."""

from __future__ import annotations

from typing import Any

PROJECT = "my-project"
PROJECT_NUMBER = "123456789012"


def _account(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    email = f"{inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"
    return {"email": email, "member": f"serviceAccount:{email}", "name": f"projects/{PROJECT}/serviceAccounts/{email}"}


def _agent(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    assert inputs["service"] == "container.googleapis.com", "each service has its own agent"
    email = f"service-{PROJECT_NUMBER}@container-engine-robot.iam.gserviceaccount.com"
    return {"email": email, "member": f"serviceAccount:{email}"}


def _cluster(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a private address if the endpoint is private. The DNS name always exists, even if it is disabled."""
    private = inputs["privateClusterConfig"]["enablePrivateEndpoint"]
    by_name = {**inputs["controlPlaneEndpointsConfig"]["dnsEndpointConfig"], "endpoint": f"gke-{name}.gke.goog"}
    return {
        "endpoint": "172.16.0.2" if private else "192.0.2.10",
        "masterAuth": {"clusterCaCertificate": "Q0E="},
        "controlPlaneEndpointsConfig": {"dnsEndpointConfig": by_name},
    }


def _filestore(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    networks = [{**network, "ipAddresses": ["10.90.0.2"]} for network in inputs["networks"]]
    return {"networks": networks, "name": f"{name}-0a1b2c3"}


def _named(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a name as Pulumi generates it: the logical name and seven random characters."""
    return {"name": f"{name}-0a1b2c3"}


OUTPUTS: dict[str, Any] = {
    "gcp:artifactregistry/repository:Repository": lambda name, inputs: {"name": inputs["repositoryId"]},
    "gcp:compute/network:Network": _named,
    "gcp:compute/subnetwork:Subnetwork": _named,
    "gcp:container/cluster:Cluster": _cluster,
    "gcp:filestore/instance:Instance": _filestore,
    "gcp:projects/serviceIdentity:ServiceIdentity": _agent,
    "gcp:serviceaccount/account:Account": _account,
    "gcp:storage/bucket:Bucket": _named,
}

CALLS: dict[str, Any] = {
    "gcp:compute/getSubnetwork:getSubnetwork": lambda args: {
        "id": args["name"],
        "ipCidrRange": "10.9.0.0/20",
        "secondaryIpRanges": [{"rangeName": "pods", "ipCidrRange": "10.96.0.0/14"}],
    },
    "gcp:organizations/getClientConfig:getClientConfig": lambda args: {
        "accessToken": "ya29.not-a-real-token",
        "defaultLabels": {},
        "id": "config",
        "project": PROJECT,
        "region": "us-central1",
        "zone": "us-central1-a",
    },
}
