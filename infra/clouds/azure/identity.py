"""Azure's built-in roles, the principals that get them, and the one function that assigns a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pulumi
from pulumi_azure_native import authorization


class Role(StrEnum):
    """Azure built-in roles by identifier, which is the same in every tenant (Azure built-in roles)."""

    ACR_PULL = "7f951dda-4ed3-4680-a7ca-43fe172d538d"
    ACR_PUSH = "8311e382-0749-4cb8-b61a-304f252e45ec"
    AI_NETWORK_APPROVER = "b556d68e-0be0-4f35-a333-ad7ee1ce17ea"
    AKS_CLUSTER_ADMIN = "b1ff04bb-8a4e-4dc4-8eb5-8693973ce19b"
    APPLICATION_INSIGHTS_CONTRIBUTOR = "ae349356-3a1b-4a5e-921d-050484c6347e"
    BLOB_CONTRIBUTOR = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
    CONTRIBUTOR = "b24988ac-6180-42a0-ab88-20f7382dd24c"
    GRAFANA_ADMIN = "22926164-76b3-42b3-bc55-97df8dab3e41"
    KEY_VAULT_CONTRIBUTOR = "f25e0fa2-a7c8-4377-a976-54943a77a395"
    KEY_VAULT_ADMINISTRATOR = "00482a5a-887f-4fb3-b363-3b7fe8e74483"
    KEY_USER = "12338af0-0e69-4776-bea7-57ae08d297de"
    MONITORING_DATA_READER = "b0d8363b-8ddd-447d-831f-62ca05bff136"
    STORAGE_ACCOUNT_CONTRIBUTOR = "17d1049b-9a84-46fb-8f53-869881c3d3ab"
    NETWORK_CONTRIBUTOR = "4d97b98b-1d4f-4787-a291-c67834d212e7"


#: An Entra object id and the kind of principal, None if it is unknown.
Principal = tuple[pulumi.Input[str], str | None]


@dataclass(frozen=True)
class Principals:
    """The principals that use the registry: nodes pull, administrators push."""

    kubelet_id: pulumi.Output[str]
    administrators: Mapping[str, Principal]


def grant(
    name: str,
    role: Role,
    scope: pulumi.Input[str],
    principal: pulumi.Input[str],
    kind: str | None,
    opts: pulumi.ResourceOptions,
) -> authorization.RoleAssignment:
    """Assign a role on exactly one resource.

    Without the kind of principal Azure looks it up, which fails for a principal that was just created.
    """
    return authorization.RoleAssignment(
        name,
        role_definition_id=f"/providers/Microsoft.Authorization/roleDefinitions/{role}",
        scope=scope,
        principal_id=principal,
        principal_type=kind,
        opts=opts,
    )


def administrators(groups: Sequence[str], opts: pulumi.ResourceOptions) -> dict[str, Principal]:
    """Return the given groups, or the caller if there are none, keyed by the suffix for logical names."""
    if groups:
        return {group.partition("-")[0]: (group, "Group") for group in groups}
    client = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=opts.parent))
    return {"caller": (client.apply(lambda config: config.object_id), None)}
