"""The doctor's checks of an Azure subscription, against recorded responses of its management API."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_answers import Recorded, one, run_checks

from infra.clouds.azure import doctor
from infra.findings.model import Context

Contexts = Callable[..., Context]
SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
ROOT = f"/subscriptions/{SUBSCRIPTION}"
SKUS, USAGES = f"{ROOT}/providers/Microsoft.Compute/skus", f"{ROOT}/providers/Microsoft.Compute/locations/eastus/usages"
VERSIONS = f"{ROOT}/providers/Microsoft.ContainerService/locations/eastus/kubernetesVersions"
FEATURES = f"{ROOT}/providers/Microsoft.Features/providers"
GROUP = f"{ROOT}/resourceGroups/rg/providers/Microsoft.Compute/capacityReservationGroups/gpus"
PERMISSIONS = f"{ROOT}/providers/Microsoft.Authorization/permissions"
FAMILY = "standardNDASv4_A100Family"
NAMESPACES = (
    "Microsoft.Authorization", "microsoft.compute", "Microsoft.ContainerRegistry", "Microsoft.ContainerService",
    "Microsoft.ManagedIdentity", "Microsoft.NetApp", "Microsoft.Network", "Microsoft.Storage", "Microsoft.Dashboard",
    "microsoft.insights", "Microsoft.Monitor",
)  # fmt: skip


def size(**more: Any) -> dict[str, Any]:
    """Return the VM size as `Microsoft.Compute/skus` lists it."""
    return {
        "resourceType": "virtualMachines", "name": "Standard_ND96asr_v4", "tier": "Standard", "family": FAMILY,
        "locations": ["eastus"], "locationInfo": [{"location": "eastus", "zones": ["3", "1", "2"]}],
        "capabilities": [{"name": "vCPUs", "value": "96"}], "restrictions": [],
    } | more  # fmt: skip


def usage(name: str, current: int, limit: int) -> dict[str, Any]:
    """Return the usage of one quota."""
    return {"limit": limit, "unit": "Count", "currentValue": current, "name": {"value": name, "localizedValue": name}}


class Credential:
    """A credential that always has a token."""

    def __init__(self, **_: object) -> None:
        pass

    def get_token(self, *scopes: str, **_: object) -> Any:
        assert scopes in (("https://management.azure.com/.default",), ("https://graph.microsoft.com/.default",))
        return SimpleNamespace(token="a-token", expires_on=4_000_000_000)


@pytest.fixture
def arm(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Serve a subscription without any problem."""
    import azure.identity

    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", Credential)
    monkeypatch.setattr(doctor, "ENDPOINT", recorded.url)
    monkeypatch.setenv("ARM_SUBSCRIPTION_ID", SUBSCRIPTION)
    recorded.put(ROOT, {"subscriptionId": SUBSCRIPTION, "displayName": "Research", "state": "Enabled"})
    first = [{"namespace": name, "registrationState": "Registered"} for name in NAMESPACES[:6]]
    rest = [{"namespace": name, "registrationState": "Registered"} for name in NAMESPACES[6:]]
    recorded.put(f"{ROOT}/providers", {"value": first, "nextLink": f"{recorded.url}/page2?token=x"})
    recorded.put("/page2", {"value": rest})
    for full in (
        "Microsoft.ContainerService/features/AKSInfinibandSupport",
        "Microsoft.Compute/features/EncryptionAtHost",
    ):
        recorded.put(f"{FEATURES}/{full}", {"properties": {"state": "Registered"}, "name": full})
    recorded.put(
        VERSIONS, {"values": [{"version": version, "isPreview": None} for version in ("1.34", "1.35", "1.36")]}
    )
    recorded.put(SKUS, {"value": [{"resourceType": "disks", "name": "Premium_LRS"}, size()]})
    recorded.put(USAGES, {"value": [usage(FAMILY, 0, 192), usage("lowPriorityCores", 0, 96)]})
    recorded.put(f"{ROOT}/providers/Microsoft.Network/virtualNetworks", {"value": []})
    recorded.put(PERMISSIONS, {"value": [{"actions": ["*"], "notActions": []}]})
    return recorded


@pytest.mark.usefixtures("arm")
def test_a_subscription_with_everything_it_needs_has_no_problem(context: Contexts) -> None:
    found = run_checks(doctor.checks(context("azure")))
    assert not [item for items in found.values() for item in items if item.status in ("problem", "unknown")]
    assert one(found, "credentials").result == f"Research ({SUBSCRIPTION}), Enabled"
    assert one(found, "resource providers").result == "11 registered", "both pages of the list were read"
    assert "192 needed for 2 x Standard_ND96asr_v4" in one(found, "quota").result


def test_every_request_has_the_token_and_an_api_version(arm: Recorded, context: Contexts) -> None:
    run_checks(doctor.checks(context("azure")))
    assert {headers["Authorization"] for _, _, headers in arm.requests} == {"Bearer a-token"}
    assert all("api-version=" in path for _, path, _ in arm.requests if "/page2" not in path)


def test_an_unregistered_provider_is_reported_with_its_command(arm: Recorded, context: Contexts) -> None:
    arm.put("/page2", {"value": [{"namespace": name, "registrationState": "NotRegistered"} for name in NAMESPACES[6:]]})
    found = run_checks(doctor.checks(context("azure")), "resource providers")["resource providers"]
    assert found[0].result == "Microsoft.Network is NotRegistered"
    assert found[0].fix == "az provider register --namespace Microsoft.Network --wait"
    assert len(found) == len(NAMESPACES[6:])


def test_an_unregistered_feature_is_reported_with_its_commands(arm: Recorded, context: Contexts) -> None:
    path = f"{FEATURES}/Microsoft.ContainerService/features/AKSInfinibandSupport"
    arm.put(path, {"properties": {"state": "NotRegistered"}})
    finding = one(run_checks(doctor.checks(context("azure")), "features"), "features")
    assert finding.status == "problem"
    assert "az feature register --namespace Microsoft.ContainerService --name AKSInfinibandSupport" in finding.fix


def test_a_version_that_the_location_does_not_offer_is_reported_with_the_newest_one(
    arm: Recorded, context: Contexts
) -> None:
    fine = one(run_checks(doctor.checks(context("azure")), "Kubernetes version"), "Kubernetes version")
    assert fine.result == "1.35 until March 2027, nodes with Ubuntu 24.04"
    preview = {"version": "1.36", "isPreview": True}
    arm.put(VERSIONS, {"values": [{"version": "1.33"}, {"version": "1.34"}, preview]})
    finding = one(run_checks(doctor.checks(context("azure")), "Kubernetes version"), "Kubernetes version")
    assert (finding.status, finding.result) == ("problem", "eastus offers 1.34 and not 1.35")
    assert "pulumi config set --path cluster.kubernetes_version 1.34" in finding.fix


@pytest.mark.parametrize(
    ("listed", "settings", "result", "fix"),
    [
        ([], {}, "eastus does not offer Standard_ND96asr_v4", "az vm list-skus"),
        (
            [size(restrictions=[{"type": "Location", "reasonCode": "NotAvailableForSubscription"}])],
            {},
            "closed to this subscription (NotAvailableForSubscription)",
            "request access together with the quota",
        ),
        (
            [size(restrictions=[{"type": "Zone", "reasonCode": "x", "restrictionInfo": {"zones": ["2"]}}])],
            {"gpu.zone": "2"},
            "zone 2 of eastus does not offer Standard_ND96asr_v4; 1, 3 do",
            "gpu.zone 1",
        ),
    ],
    ids=["nowhere", "closed", "another zone"],
)
def test_a_size_must_be_offered_in_the_location_and_to_the_subscription(
    arm: Recorded, context: Contexts, listed: list[object], settings: dict[str, object], result: str, fix: str
) -> None:
    arm.put(SKUS, {"value": listed})
    finding = one(run_checks(doctor.checks(context("azure", settings)), "instance type"), "instance type")
    assert finding.status == "problem"
    assert result in finding.result
    assert fix in finding.fix


def test_a_small_family_quota_is_reported_with_the_number_of_cores_to_request(arm: Recorded, context: Contexts) -> None:
    arm.put(USAGES, {"value": [usage(FAMILY.upper(), 96, 192)]})
    finding = one(run_checks(doctor.checks(context("azure")), "quota"), "quota")
    assert finding.status == "problem"
    assert finding.result == f"{FAMILY}: 192 cores, 96 in use, 192 needed for 2 x Standard_ND96asr_v4"
    assert f"request 288 cores of {FAMILY} in eastus" in finding.fix
    assert finding.fix.endswith("gpu.nodes.max 1")


def test_an_unlisted_family_has_no_quota(arm: Recorded, context: Contexts) -> None:
    arm.put(USAGES, {"value": []})
    assert one(run_checks(doctor.checks(context("azure")), "quota"), "quota").status == "problem"


@pytest.mark.usefixtures("arm")
def test_spot_nodes_share_one_quota_for_all_families(context: Contexts) -> None:
    finding = one(run_checks(doctor.checks(context("azure", {"gpu.capacity": "spot"})), "quota"), "quota")
    assert finding.status == "problem"
    assert finding.result.startswith("lowPriorityCores: 96 cores")


@pytest.mark.parametrize(
    ("group", "held", "status", "result"),
    [
        ({"location": "eastus"}, [("Standard_ND96asr_v4", 2)], "ok", "has 2 x"),
        ({"location": "eastus"}, [("Standard_ND96asr_v4", 1), ("Standard_D4s_v5", 9)], "problem", "has 1 x"),
        ({"location": "westus2"}, [], "problem", "is in westus2, the stack in eastus"),
        (None, [], "problem", "no reservation group gpus"),
    ],
    ids=["enough", "too few of the size", "elsewhere", "deleted"],
)
def test_a_reservation_needs_enough_machines_of_the_size(
    arm: Recorded, context: Contexts, group: object, held: list[tuple[str, int]], status: str, result: str
) -> None:
    if group:
        arm.put(GROUP, group)
    listed = [{"sku": {"name": name, "capacity": count}} for name, count in held]
    arm.put(f"{GROUP}/capacityReservations", {"value": listed})
    settings = context("azure", {"gpu.capacity": "reservation", "gpu.reservation_id": GROUP})
    finding = one(run_checks(doctor.checks(settings), "reservation"), "reservation")
    assert finding.status == status
    assert result in finding.result


def test_a_range_that_overlaps_another_vnet_is_reported_with_a_free_one(arm: Recorded, context: Contexts) -> None:
    net = {"name": "hub", "properties": {"addressSpace": {"addressPrefixes": ["10.0.0.0/8", "fd00::/8"]}}}
    arm.put(f"{ROOT}/providers/Microsoft.Network/virtualNetworks", {"value": [net]})
    finding = one(run_checks(doctor.checks(context("azure")), "addresses"), "addresses")
    assert finding.status == "ok"
    assert "overlaps hub (10.0.0.0/8)" in finding.result


@pytest.mark.parametrize(
    ("status", "code", "cause", "row"),
    [
        (401, "ExpiredAuthenticationToken", "azure-credentials", "problem"),
        (403, "AuthorizationFailed", "azure-denied", "unknown"),
        (404, "SubscriptionNotFound", "azure-subscription", "problem"),
        (501, "ServerBusy", "slow", "unknown"),
    ],
)
def test_a_denied_request_is_reported_with_its_cause(
    arm: Recorded, context: Contexts, status: int, code: str, cause: str, row: str
) -> None:
    arm.put(ROOT, {"error": {"code": code, "message": f"The Subscription says {code}."}}, status)
    finding = one(run_checks(doctor.checks(context("azure")), "credentials"), "credentials")
    assert (finding.cause, finding.status) == (cause, row)
    assert code in finding.result


def test_a_disabled_subscription_is_a_problem(arm: Recorded, context: Contexts) -> None:
    arm.put(ROOT, {"displayName": "Old", "state": "Disabled"})
    assert one(run_checks(doctor.checks(context("azure")), "credentials"), "credentials").status == "problem"


@pytest.mark.usefixtures("arm")
def test_the_checks_use_the_same_subscription_as_the_provider(
    context: Contexts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor.chosen_subscription({"azure-native:subscriptionId": "configured"}) == "configured"
    assert doctor.chosen_subscription({}) == SUBSCRIPTION
    monkeypatch.delenv("ARM_SUBSCRIPTION_ID")
    program = tmp_path / "az"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "account show" ] && echo of-the-command\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.chosen_subscription({}) == "of-the-command"
    program.write_text("#!/bin/sh\necho \"ERROR: Please run 'az login' to setup account.\" >&2; exit 1\n")
    finding = one(run_checks(doctor.checks(context("azure")), "credentials"), "credentials")
    assert (finding.status, finding.cause, finding.fix) == ("problem", "azure-credentials", "az login")


def test_a_pool_with_infiniband_must_advertise_its_functions(context: Contexts) -> None:
    assert doctor.devices(context("azure").settings) == {"rdma/ib": 8}


@pytest.mark.usefixtures("arm")
def test_a_registry_of_the_cloud_gets_a_login_in_exchange_for_a_token(
    recorded: Recorded, context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(_: Any, body: bytes) -> tuple[int, object]:
        assert b"grant_type=access_token" in body
        assert b"access_token=a-token" in body
        return 200, {"refresh_token": "of-the-registry"}

    recorded.answers["/oauth2/exchange"] = exchange
    assert doctor.login(context("azure"), "ghcr.io") is None, "another registry never sees the token"
    host = recorded.url.removeprefix("http://")
    monkeypatch.setattr(doctor, "_REGISTRY", re.compile(re.escape(host)))
    user = "00000000-0000-0000-0000-000000000000"
    assert doctor.login(context("azure"), host) == (user, "of-the-registry")


def test_a_training_service_needs_only_its_own_resource_providers(arm: Recorded, context: Contexts) -> None:
    found = run_checks(doctor.checks(context("azure", {"job.launcher": "azureml"})))
    results = {item.result for item in found["resource providers"]}
    assert "Microsoft.MachineLearningServices is unknown here" in results
    assert not any("NetApp" in text or "ContainerService" in text for text in results)
    assert one(found, "features").status == "skipped"
    assert "its own quotas" in one(found, "quota").result, "quotas of virtual machines do not apply"


@pytest.mark.parametrize(
    ("permissions", "status"),
    [
        ([{"actions": ["*"], "notActions": ["Microsoft.Authorization/*/Write"]}], "problem"),
        ([{"actions": ["*/read"], "notActions": []}], "problem"),
        ([], "problem"),
        (
            [
                {"actions": ["*"], "notActions": ["Microsoft.Authorization/*/Write"]},
                {"actions": ["Microsoft.Authorization/roleAssignments/write"], "notActions": []},
            ],
            "ok",
        ),
    ],
    ids=["Contributor", "Reader", "none", "Contributor and Role Based Access Control Administrator"],
)
def test_a_role_that_may_assign_roles_is_needed(
    arm: Recorded, context: Contexts, permissions: list[object], status: str
) -> None:
    arm.put(PERMISSIONS, {"value": permissions})
    finding = one(run_checks(doctor.checks(context("azure")), "roles"), "roles")
    assert finding.status == status
    assert ("Role Based Access Control Administrator" in finding.fix) == (status == "problem")
