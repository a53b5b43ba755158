"""The doctor's check of an existing VPC on Google Cloud, against recorded responses of Compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from doctor_answers import Recorded

from infra.clouds.gcp.doctor import client
from infra.clouds.gcp.doctor.client import Rest
from infra.clouds.gcp.doctor.networks import existing_network
from infra.clouds.gcp.settings import Settings
from infra.findings.model import Context, Finding

Contexts = Callable[..., Context]
COMPUTE = "/compute/v1/projects/my-project"
REGION = f"{COMPUTE}/regions/us-central1"
URL = "https://www.googleapis.com/compute/v1/projects/my-project/global/networks/"
EXISTING = {"network": "shared", "subnetwork": "gpu-nodes", "pods_range": "pods", "services_range": "services"}


class Vpc:
    """A VPC with a subnet that a stack can use; a test breaks a part of it."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.network: dict[str, Any] = {"name": "shared", "mtu": 8896}
        self.subnet: dict[str, Any] = {
            "name": "gpu-nodes", "network": f"{URL}shared", "ipCidrRange": "10.9.0.0/24", "purpose": "PRIVATE",
            "privateIpGoogleAccess": True,
            "secondaryIpRanges": [
                {"rangeName": "pods", "ipCidrRange": "10.64.0.0/20"},
                {"rangeName": "services", "ipCidrRange": "10.80.0.0/23"},
            ],
        }  # fmt: skip
        self.routes: list[dict[str, Any]] = [
            {"network": f"{URL}shared", "destRange": "0.0.0.0/0", "priority": 1000, "nextHopGateway": "default"},
            {"network": f"{URL}other", "destRange": "172.16.0.0/12", "nextHopNetwork": f"{URL}other"},
        ]
        nat = {"name": "nat", "type": "PUBLIC", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}
        self.routers: list[dict[str, Any]] = [{"name": "router", "network": f"{URL}shared", "nats": [nat]}]
        self.addresses: list[dict[str, Any]] = []
        self.free: dict[str, int] = {"": 200, "pods": 4096}

    def serve(self) -> None:
        """Put the VPC into the server's responses."""

        def subnet(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
            assert query["views"] == "WITH_UTILIZATION", "without it Compute counts no addresses"
            usages = [{"rangeName": name, "totalFreeIp": str(count)} for name, count in self.free.items()]
            del usages[0]["rangeName"]
            return 200, self.subnet | {"utilizationDetails": {"ipv4Utilizations": usages}}

        self.recorded.answers[f"{REGION}/subnetworks/gpu-nodes"] = subnet
        self.recorded.put(f"{COMPUTE}/global/networks/shared", self.network)
        self.recorded.put(f"{COMPUTE}/global/routes", {"items": self.routes})
        self.recorded.put(f"{COMPUTE}/global/addresses", {"items": self.addresses})
        self.recorded.put(f"{REGION}/routers", {"items": self.routers})


@pytest.fixture
def vpc(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Vpc:
    """Return a VPC without any problem."""
    import google.auth
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr(google.auth, "default", lambda scopes: (Credentials("a-token"), None))
    monkeypatch.setattr(client, "ENDPOINTS", dict.fromkeys(client.ENDPOINTS, recorded.url))
    return Vpc(recorded)


def read(context: Contexts, existing: Mapping[str, object], settings: Mapping[str, object]) -> Settings:
    """Return the settings of a stack with an existing network."""
    parsed = context("gcp", {"network.existing": {**EXISTING, **existing}, **settings}).settings
    assert isinstance(parsed, Settings)
    return parsed


def check(
    context: Contexts,
    vpc: Vpc,
    settings: Mapping[str, object] | None = None,
    *,
    is_up: bool = False,
    **existing: object,
) -> list[Finding]:
    """Return the findings about a stack in this VPC."""
    vpc.serve()
    found = existing_network(Rest(), read(context, existing, settings or {}), is_up=is_up)
    return found if isinstance(found, list) else [found]


def test_a_subnet_with_everything_that_a_stack_needs_is_ok(vpc: Vpc, context: Contexts) -> None:
    [found] = check(context, vpc)
    assert (found.status, found.result) == ("ok", "gpu-nodes of shared: ranges, NAT and room, MTU 8896"), found


def test_a_stack_with_its_own_network_skips_the_check(context: Contexts) -> None:
    settings = context("gcp").settings
    assert isinstance(settings, Settings)
    found = existing_network(Rest(), settings, is_up=False)
    assert isinstance(found, Finding)
    assert found.status == "skipped"


@pytest.mark.usefixtures("vpc")
def test_a_missing_network_and_subnet_are_both_reported(context: Contexts) -> None:
    found = existing_network(Rest(), read(context, {}, {}), is_up=False)
    assert isinstance(found, list)
    assert [item.result for item in found] == [
        "no network shared in project my-project",
        "no subnet gpu-nodes in us-central1",
    ]


def test_the_subnet_must_be_of_the_network_and_have_both_ranges(vpc: Vpc, context: Contexts) -> None:
    vpc.subnet["network"] = f"{URL}other"
    vpc.subnet["secondaryIpRanges"].pop()
    other, services = check(context, vpc)
    assert other.result == "gpu-nodes is in other, not in shared"
    assert services.result == "gpu-nodes has no secondary range services; it has pods"
    assert "subnets update gpu-nodes --region us-central1 --add-secondary-ranges services=<range>" in services.fix


def test_a_subnet_for_proxies_takes_no_nodes(vpc: Vpc, context: Contexts) -> None:
    vpc.subnet["purpose"] = "REGIONAL_MANAGED_PROXY"
    assert "REGIONAL_MANAGED_PROXY" in check(context, vpc)[0].result


def test_private_google_access_must_be_on(vpc: Vpc, context: Contexts) -> None:
    vpc.subnet["privateIpGoogleAccess"] = False
    [found] = check(context, vpc)
    assert found.fix.endswith("update gpu-nodes --region us-central1 --enable-private-ip-google-access")


def of_subnet(name: str, *ranges: str) -> dict[str, Any]:
    """Return a NAT gateway for a list of subnets."""
    listed = {"name": f"https://x/subnetworks/{name}", "sourceIpRangesToNat": list(ranges)}
    return {"sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS", "subnetworks": [listed]}


@pytest.mark.parametrize(
    ("nats", "status"),
    [
        ([], "problem"),
        ([of_subnet("gpu-nodes", "PRIMARY_IP_RANGE")], "ok"),
        ([of_subnet("gpu-nodes", "LIST_OF_SECONDARY_IP_RANGES")], "problem"),
        ([of_subnet("others", "ALL_IP_RANGES")], "problem"),
        ([{"type": "PRIVATE", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}], "problem"),
    ],
    ids=["none", "of the nodes", "of pods only", "of another subnet", "private NAT"],
)
def test_nodes_need_cloud_nat(vpc: Vpc, context: Contexts, nats: list[object], status: str) -> None:
    vpc.routers[0]["nats"] = nats
    [found] = check(context, vpc)
    assert found.status == status
    if status == "problem":
        assert found.fix.startswith("gcloud compute routers nats create nat --router router --region us-central1")


def test_a_router_of_another_network_does_not_count(vpc: Vpc, context: Contexts) -> None:
    vpc.routers[0]["network"] = f"{URL}other"
    [found] = check(context, vpc)
    assert found.fix.startswith("gcloud compute routers create shared-router --network shared --region us-central1; ")


def test_nat_works_only_with_a_default_route_and_a_firewall_replaces_it(vpc: Vpc, context: Contexts) -> None:
    vpc.routes[0]["tags"] = ["proxy"]
    [found] = check(context, vpc)
    assert found.result == "shared has no default route"
    vpc.routes.append({"network": f"{URL}shared", "destRange": "0.0.0.0/0", "priority": 900, "nextHopIlb": "10.1.1.1"})
    vpc.routers = []
    assert check(context, vpc)[0].status == "ok"


def test_filestore_needs_a_reserved_range_and_its_connection(vpc: Vpc, context: Contexts) -> None:
    [found] = check(context, vpc, private_service_access=True)
    assert found.result == "shared reserves no range for services"
    assert "--purpose VPC_PEERING --prefix-length 24 --network shared; gcloud services vpc-peerings" in found.fix
    vpc.addresses = [{"name": "google", "network": f"{URL}shared", "purpose": "VPC_PEERING", "prefixLength": 20}]
    [found] = check(context, vpc, private_service_access=True)
    assert found.result == "the connection of shared to servicenetworking-googleapis-com is missing"
    assert found.fix == "gcloud services vpc-peerings connect --network shared --ranges google"
    vpc.network["peerings"] = [{"name": "servicenetworking-googleapis-com", "state": "ACTIVE"}]
    assert check(context, vpc, private_service_access=True)[0].status == "ok"


def test_every_range_needs_room(vpc: Vpc, context: Contexts) -> None:
    vpc.free = {"": 4, "pods": 512}
    vpc.subnet["secondaryIpRanges"][1]["ipCidrRange"] = "10.80.0.0/24"
    results = check(context, vpc)
    assert [item.result for item in results] == [
        "gpu-nodes has 4 free addresses, 5 needed for gpu.nodes.max and the system nodes",
        "range pods of gpu-nodes has 512 free addresses, 640 needed for gpu.nodes.max and the system nodes",
        "range services of gpu-nodes has 256 addresses, 512 needed for services",
    ]
    assert "expand-ip-range gpu-nodes --region us-central1 --prefix-length 23" in results[0].fix
    assert results[1].fix == "a larger range, or pulumi config set --path gpu.nodes.max 1"
    assert check(context, vpc, is_up=True)[0].status == "ok", "the stack itself uses the addresses"


def test_the_range_of_the_control_plane_must_be_free(vpc: Vpc, context: Contexts) -> None:
    vpc.routes.append({"network": f"{URL}shared", "destRange": "172.16.0.0/24", "nextHopPeering": "other"})
    [found] = check(context, vpc)
    assert found.result == "network.control_plane_cidr 172.16.0.0/28 overlaps 172.16.0.0/24 of shared"
    assert found.fix == "pulumi config set --path network.control_plane_cidr 172.16.1.0/28"


def test_small_packets_get_a_hint_where_nccl_uses_this_network(vpc: Vpc, context: Contexts) -> None:
    vpc.network["mtu"] = 1460
    [found] = check(context, vpc)
    assert found.status == "ok"
    assert found.fix.startswith("gcloud compute networks update shared --mtu 8896")
    [found] = check(context, vpc, {"gpu.instance_type": "a3-highgpu-8g"})
    assert not found.fix, "the cards of GPUDirect-TCPX have networks of their own"
