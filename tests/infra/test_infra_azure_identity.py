"""Azure: workload identity and the scope of roles."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from azure_stack import (
    CHOSEN,
    CONTRIBUTOR,
    OWNER,
    REGISTRY,
    RESERVATION,
    RESERVED,
    TRIAL,
    VAULT,
    Stack,
    parse_settings,
    roles_of,
)
from provider_mocks.recording import record

from infra import clouds
from infra.contract import Identity


def test_only_the_trainers_service_account_gets_its_identity(stack: Stack) -> None:
    recording = stack("azure", CHOSEN)
    federation = recording.one("azure-native:managedidentity:FederatedIdentityCredential").inputs
    assert federation["subject"] == "system:serviceaccount:jobs:trainer"
    assert federation["audiences"] == ["api://AzureADTokenExchange"]
    assert federation["issuer"] == "https://eastus.oic.prod-aks.azure.com/tenant/cluster/"


def test_a_pod_has_the_labels_and_variables_of_workload_identity_and_of_the_storage_client() -> None:
    identities: list[Identity] = []

    def program() -> None:
        identities.append(clouds.load("azure").provision("identity", parse_settings({})).identity)

    recording = record(program, {}, "azure")
    assert recording.error is None
    (identity,) = identities
    assert set(identity.annotations) == {"azure.workload.identity/client-id"}
    assert identity.pod_labels == {"azure.workload.identity/use": "true"}
    assert identity.env == {"AZURE_STORAGE_ANON": "false"}, "adlfs would try anonymous access first"
    assert identity.service_account == "trainer", "the federated credential names it"


def test_the_trainer_may_use_only_the_container(stack: Stack) -> None:
    roles = [
        role for role in roles_of(stack("azure")).values() if role["principalId"] == "azure-objects-trainer-principal"
    ]
    (role,) = roles
    assert role["scope"] == "azure-objects-container-id", "not the account"
    assert role["roleDefinitionId"].endswith("ba92f5b4-2d11-453d-a403-e96b0029c9fe")


def test_nodes_may_pull_images_but_not_push_them(stack: Stack) -> None:
    roles = [role for role in roles_of(stack("azure")).values() if role["principalId"] == "kubelet-object"]
    (role,) = roles
    assert role["scope"] == "azure-registry-acr-id"
    assert role["roleDefinitionId"].endswith("7f951dda-4ed3-4680-a7ca-43fe172d538d")


def test_the_registry_has_no_admin_user_and_no_anonymous_pulls(stack: Stack) -> None:
    registry = stack("azure").one(REGISTRY).inputs
    assert registry["adminUserEnabled"] is False
    assert registry["anonymousPullEnabled"] is False


@pytest.mark.parametrize("overrides", [{}, CHOSEN, TRIAL, RESERVED])
def test_every_role_except_the_clusters_own_is_assigned_on_one_resource_only(
    stack: Stack, overrides: Mapping[str, object]
) -> None:
    recording = stack("azure", overrides)
    groups = {f"{item.name}-id" for item in recording.of_type("azure-native:resources:ResourceGroup")}
    own = {f"{item.name}-id" for item in recording.registrations} - groups
    # It grants rights within clusters only, the stack's group holds one cluster, and it must exist before that.
    narrow = {name: role for name, role in roles_of(recording).items() if not name.startswith("azure-admin-")}
    for name, role in narrow.items():
        assert role["scope"] in own | {RESERVATION, f"{VAULT}/keys/etcd"}, f"the scope of {name} is {role['scope']}"
        assert not role["roleDefinitionId"].endswith(OWNER)
    broad = {name for name, role in roles_of(recording).items() if role["roleDefinitionId"].endswith(CONTRIBUTOR)}
    assert broad <= {"azure-reservation", "azure-placement"}, "AKS requires it on that one resource"
