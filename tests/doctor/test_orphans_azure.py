"""What a stack can leave in an Azure subscription, against recorded answers of Azure and Microsoft Graph."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
from doctor_answers import Recorded, read_context
from test_doctor_azure import ROOT, SUBSCRIPTION, Credential

from infra.clouds.azure import doctor, orphans
from infra.findings.orphans import Leftover
from infra.orphans.search import compare, run

TAGS = {"project": "torchrec-cloud", "stack": "azure", "managed-by": "pulumi", "owner": "me"}
GROUP, KEPT = f"{ROOT}/resourceGroups/azure-network-group0a1b2c3d", f"{ROOT}/resourceGroups/azure-objects-group0a1b2c3d"
NODES = f"{ROOT}/resourceGroups/MC_azure-network-group0a1b2c3d_azure-aks_eastus"
AKS = f"{GROUP}/providers/Microsoft.ContainerService/managedClusters/azure-aks1234567"
KEPT_GROUP = {"id": KEPT, "name": KEPT.rpartition("/")[2], "tags": TAGS}
ASSIGNMENTS = f"{ROOT}/providers/Microsoft.Authorization/roleAssignments"
VAULTS = f"{ROOT}/providers/Microsoft.KeyVault/deletedVaults"


def resource(group: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    """Return one entry of the list of resources."""
    found = {"id": f"{group}/providers/{kind}/{name}", "type": kind, "name": name, "tags": TAGS, "location": "eastus"}
    return found | {"createdTime": "2026-11-20T10:11:12.1234567Z"} | more


def assignment(name: str, scope: str, principal: str) -> dict[str, Any]:
    """Return one role assignment."""
    values = {"scope": scope, "principalId": principal, "createdOn": "2026-11-20T10:11:12Z"}
    return {"id": f"{scope}/providers/Microsoft.Authorization/roleAssignments/{name}", "properties": values}


@pytest.fixture
def azure(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Serve a subscription without anything of the stack."""
    import azure.identity

    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", Credential)
    monkeypatch.setattr(doctor, "ENDPOINT", recorded.url)
    monkeypatch.setattr(orphans, "GRAPH", recorded.url)
    monkeypatch.setenv("ARM_SUBSCRIPTION_ID", SUBSCRIPTION)
    recorded.put(ROOT, {"subscriptionId": SUBSCRIPTION, "displayName": "Research", "state": "Enabled"})
    for path in (f"{ROOT}/resources", f"{ROOT}/resourcegroups", ASSIGNMENTS, VAULTS):
        recorded.put(path, {"value": []})
    recorded.put("/v1.0/directoryObjects/getByIds", {"value": []})
    return recorded


def search(**settings: object) -> tuple[list[Leftover], list[Any]]:
    """Run all searches; return what they found, and the findings of those that failed."""
    context = read_context("azure", settings)
    found, findings = run(orphans.searches(context), doctor.checks(context)[0], "test")
    return found, [item for item in findings if item.status != "ok"]


@pytest.mark.usefixtures("azure")
def test_an_empty_subscription_has_no_orphan() -> None:
    assert search() == ([], [])


def test_tagged_resources_are_found_on_every_page_with_age_and_price(azure: Recorded) -> None:
    disk = resource(NODES, "Microsoft.Compute/disks", "pvc-1")
    nodes = resource(
        NODES, "Microsoft.Compute/virtualMachineScaleSets", "gpu", sku={"name": "Standard_ND96asr_v4", "capacity": 2}
    )
    other = resource(GROUP, "Microsoft.Network/natGateways", "nat", tags=TAGS | {"project": "another"})

    def pages(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
        assert query["$filter"] == "tagName eq 'stack' and tagValue eq 'azure'"
        assert query["$expand"] == "createdTime", "without it Azure reports no age"
        return 200, {"value": [disk, other], "nextLink": f"{azure.url}/next?token=x"}

    azure.answers[f"{ROOT}/resources"] = pages
    azure.put("/next", {"value": [nodes]})
    found, failed = search()
    assert not failed
    assert [(item.kind, item.usd_per_hour) for item in found] == [
        ("disks", None), ("virtualMachineScaleSets", pytest.approx(2 * 27.197)),
    ]  # fmt: skip
    assert found[0].since == "2026-11-20T10:11Z"
    assert found[0].remove == f"az resource delete --ids {disk['id']}"
    assert found[0].of_cluster, "the cluster uses its disks while it exists"


def test_a_pool_of_netapp_has_the_price_of_its_size(azure: Recorded) -> None:
    pool = resource(GROUP, "Microsoft.NetApp/netAppAccounts/capacityPools", "a/datasets")
    azure.put(f"{ROOT}/resources", {"value": [pool]})
    azure.put(pool["id"], {"properties": {"serviceLevel": "Premium", "size": 2 * 2**40}})
    (item,) = search()[0]
    assert item.usd_per_hour == pytest.approx(2048 * 0.000403)


def test_a_group_that_is_left_is_one_line_with_the_price_of_all_in_it(azure: Recorded) -> None:
    inside = [
        resource(GROUP, "Microsoft.Network/natGateways", "nat"),
        resource(GROUP, "Microsoft.Network/publicIPAddresses", "ip"),
    ]
    azure.put(f"{ROOT}/resources", {"value": inside})
    group = {"id": GROUP, "name": GROUP.rpartition("/")[2], "tags": TAGS}
    azure.put(f"{ROOT}/resourcegroups", {"value": [group]})
    orphaned, kept = compare(search()[0], [], orphans)
    (line,) = orphaned
    assert not kept
    assert line.kind == "resource group with 2 resources"
    assert line.usd_per_hour == pytest.approx(0.05)
    assert line.remove == "az group delete --name azure-network-group0a1b2c3d --yes"


def test_the_group_that_aks_manages_belongs_to_the_cluster(azure: Recorded) -> None:
    managed = {"id": NODES, "name": NODES.rpartition("/")[2], "tags": {}, "managedBy": AKS}
    others = {"id": f"{ROOT}/resourceGroups/x", "name": "x", "tags": {}, "managedBy": AKS.replace("azure-", "eval-")}
    azure.put(f"{ROOT}/resourcegroups", {"value": [managed, others]})
    found = search()[0]
    assert [item.id for item in found] == [NODES]
    cluster = {"type": orphans.CLUSTER, "id": AKS}
    assert compare(found, [cluster], orphans) == ([], []), "it is in use while the cluster exists"
    assert compare(found, [], orphans)[0] == found


@pytest.mark.parametrize("tags", [{}, TAGS | {"project": "another"}])
def test_a_group_is_not_the_stacks_by_its_name_alone(azure: Recorded, tags: dict[str, str]) -> None:
    group = {"id": GROUP, "name": GROUP.rpartition("/")[2], "tags": tags}
    managed = {"id": NODES, "name": NODES.rpartition("/")[2], "tags": tags, "managedBy": AKS}
    azure.put(f"{ROOT}/resourcegroups", {"value": [group, managed]})
    azure.put(ASSIGNMENTS, {"value": [assignment("gone", GROUP, "p-gone")]})
    found, failed = search()
    assert not failed
    assert [(item.id, item.remove, item.withheld) for item in found] == [(NODES, "", "no tags show whose it is")]


def test_names_are_quoted_in_commands(azure: Recorded) -> None:
    azure.put(f"{ROOT}/resources", {"value": [resource(GROUP, "Microsoft.Compute/disks", "a; rm -rf ~")]})
    (item,) = search()[0]
    assert shlex.split(item.remove)[-1] == item.id


def test_the_checkpoints_are_kept_or_orphans_as_the_setting_says(azure: Recorded) -> None:
    account = resource(KEPT, "Microsoft.Storage/storageAccounts", "azure01234567")
    azure.put(f"{ROOT}/resources", {"value": [account]})
    azure.put(f"{ROOT}/resourcegroups", {"value": [{"id": KEPT, "name": KEPT.rpartition("/")[2], "tags": TAGS}]})
    orphaned, kept = compare(search()[0], [], orphans)
    assert not orphaned
    assert {item.kept for item in kept} == {"storage.on_destroy is keep"}
    orphaned, kept = compare(search(**{"storage.on_destroy": "delete"})[0], [], orphans)
    assert not kept
    assert [item.kind for item in orphaned] == ["resource group with 1 resources"]


def test_ids_of_the_state_are_compared_without_their_case(azure: Recorded) -> None:
    disk = resource(GROUP, "Microsoft.Compute/disks", "one")
    azure.put(f"{ROOT}/resources", {"value": [disk]})
    state = [{"type": "azure-native:compute:Disk", "id": disk["id"].replace("resourceGroups", "resourcegroups")}]
    assert compare(search()[0], state, orphans) == ([], [])


def test_role_assignments_of_deleted_principals_are_found(azure: Recorded) -> None:
    reservation = f"{ROOT}/resourceGroups/rg/providers/Microsoft.Compute/capacityReservationGroups/gpus"
    listed = [
        assignment("next", f"{reservation}0", "p-next"), assignment("within", f"{reservation}/x/y", "p-gone"),
        assignment("gone", KEPT, "p-gone"), assignment("there", KEPT, "p-there"),
        assignment("outside", reservation, "p-gone"), assignment("others", f"{ROOT}/resourceGroups/x", "p-gone"),
    ]  # fmt: skip
    azure.put(ASSIGNMENTS, {"value": listed})
    azure.put(f"{ROOT}/resourcegroups", {"value": [KEPT_GROUP]})

    def existing(_: Mapping[str, str], body: bytes) -> tuple[int, object]:
        assert json.loads(body) == {"ids": ["p-gone", "p-there"]}
        return 200, {"value": [{"id": "p-there"}]}

    azure.answers["/v1.0/directoryObjects/getByIds"] = existing
    settings = {"gpu.capacity": "reservation", "gpu.reservation_id": reservation}
    found, failed = search(**settings)
    assert not failed
    assert [item.id.rpartition("/")[2] for item in found if item.kind == "role assignment"] == [
        "within",
        "gone",
        "outside",
    ]
    assert found[-1].remove == f"az role assignment delete --ids {found[-1].id}"


def test_role_assignments_are_not_checked_without_access_to_the_directory(azure: Recorded) -> None:
    azure.put(ASSIGNMENTS, {"value": [assignment("gone", KEPT, "p-gone")]})
    azure.put(f"{ROOT}/resourcegroups", {"value": [KEPT_GROUP]})
    azure.put("/v1.0/directoryObjects/getByIds", {"error": {"code": "Authorization_RequestDenied"}}, 403)
    _, failed = search()
    assert [(item.check, item.status, item.cause) for item in failed] == [
        ("role assignment", "unknown", "azure-denied")
    ]


def test_a_deleted_key_vault_is_listed_with_the_day_on_which_it_goes(azure: Recorded) -> None:
    values = {"location": "eastus", "tags": TAGS, "deletionDate": "2026-11-20T10:11:12Z"}
    values |= {"scheduledPurgeDate": "2026-11-27T10:11:12Z", "purgeProtectionEnabled": True}
    azure.put(VAULTS, {"value": [{"name": "azurevault", "properties": values}]})
    (item,) = search()[0]
    assert item.kept == "Azure deletes it at 2026-11-27T10:11Z, without charge until then"
    assert item.remove == "az keyvault show-deleted --name azurevault --location eastus", "it cannot be purged"
    del values["purgeProtectionEnabled"]
    azure.put(VAULTS, {"value": [{"name": "azurevault", "properties": values}]})
    assert search()[0][0].remove == "az keyvault purge --name azurevault --location eastus"
