"""The searches of a subscription for one stack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from infra import catalog
from infra.clouds.azure.doctor.client import Arm
from infra.clouds.azure.settings import Settings, prices
from infra.findings.orphans import Leftover, shell

Item = Mapping[str, Any]

_NAMING_TAGS = ("project", "stack", "managed-by")
_GROUPS_VERSION = _RESOURCES_VERSION = "2021-04-01"
#: Names of the item in `prices.toml` by type of resource.
_PRICED = {
    "microsoft.containerservice/managedclusters": "AKS control plane (Standard tier)",
    "microsoft.network/natgateways": "NAT gateway and its address",
    "microsoft.containerregistry/registries": "container registry (Premium)",
    "microsoft.network/privateendpoints": "private endpoint",
    "microsoft.dashboard/grafana": "managed Grafana (Standard)",
}
_SCALE_SETS = "microsoft.compute/virtualmachinescalesets"
_NO_TAGS = "no tags show whose it is"
_POOLS = "microsoft.netapp/netappaccounts/capacitypools"
_STORAGE = "microsoft.storage/"
#: What shows that a stack is in use.
_LIVE: Mapping[str, Literal["cluster", "bucket"]] = {
    "microsoft.containerservice/managedclusters": "cluster",
    "microsoft.storage/storageaccounts": "bucket",
}
_GIB = 2**30
#: Microsoft Graph looks up at most this many principals at once.
_PRINCIPALS_AT_ONCE = 1000


@dataclass(frozen=True)
class Queries:
    """The searches for one stack."""

    arm: Arm
    graph: Arm
    settings: Settings

    def resources(self) -> list[Leftover]:
        """Return the tagged resources.

        AKS copies the cluster's tags to all that it creates, except node pools, which have their own:
        https://learn.microsoft.com/azure/aks/use-tags
        """
        tag = f"tagName eq 'stack' and tagValue eq '{self.settings.stack}'"
        query = {"$filter": tag, "$expand": "createdTime"}
        listed = self.arm.list_all(f"{self.arm.root}/resources", _RESOURCES_VERSION, **query)
        found = [self._resource(item) for item in listed if self._has_tags(item)]
        # A child such as a volume must be deleted before its parent.
        return sorted(found, key=lambda item: -item.id.count("/"))

    def _resource(self, item: Item) -> Leftover:
        identifier, kind = str(item["id"]), str(item["type"])
        return Leftover(
            kind=kind.partition("/")[2],
            id=identifier,
            remove=shell("az resource delete --ids {identifier}", identifier=identifier),
            since=_minutes(item.get("createdTime")),
            usd_per_hour=self._price(item),
            kept=self._reason_to_keep(kind.lower().startswith(_STORAGE)),
            of_cluster=not self._is_own_group(_group_name(identifier)),
            inside=identifier.partition("/providers/")[0],
            live=_LIVE.get(kind.lower(), ""),
        )

    @cached_property
    def _all_groups(self) -> list[Item]:
        return list(self.arm.list_all(f"{self.arm.root}/resourcegroups", _GROUPS_VERSION))

    @cached_property
    def _tagged_groups(self) -> set[str]:
        """Return the names of the groups with the stack's tags; another project's stack may have the same name."""
        return {str(item["name"]).lower() for item in self._all_groups if self._has_tags(item)}

    def groups(self) -> Iterator[Leftover]:
        """Yield the stack's resource groups and those that a service manages for it, such as AKS's `MC_...`."""
        for item in self._all_groups:
            name, manager = str(item["name"]), str(item.get("managedBy") or "")
            managing = _group_name(manager)
            if self._has_tags(item) or self._is_own_group(managing):
                group = Leftover(
                    kind="resource group",
                    id=str(item["id"]),
                    remove=shell("az group delete --name {name} --yes", name=name),
                    kept=self._reason_to_keep(re.fullmatch(self._group_pattern("objects"), name) is not None),
                    of_cluster=bool(manager),
                )
                is_own = self._has_tags(item) or managing.lower() in self._tagged_groups
                yield group if is_own else group.without_command(_NO_TAGS)

    def role_assignments(self) -> Iterator[Leftover]:
        """Yield assignments of deleted principals on the stack's groups and on what outlives it.

        Azure keeps an assignment when its principal is deleted:
        https://learn.microsoft.com/azure/role-based-access-control/troubleshooting
        """
        outside = [self.settings.gpu.reservation_id, self.settings.kubernetes.kms_vault_id]
        scopes = tuple(scope.lower() for scope in outside if scope)
        groups = self._tagged_groups
        path = f"{self.arm.root}/providers/Microsoft.Authorization/roleAssignments"
        listed = [
            item
            for item in self.arm.list_all(path, "2022-04-01")
            if _group_name(str(item["properties"]["scope"])).lower() in groups
            or any(_is_within(str(item["properties"]["scope"]).lower(), scope) for scope in scopes)
        ]
        existing = self._existing({str(item["properties"]["principalId"]) for item in listed})
        for item in listed:
            if str(item["properties"]["principalId"]) not in existing:
                identifier, since = str(item["id"]), _minutes(item["properties"].get("createdOn"))
                remove = shell("az role assignment delete --ids {identifier}", identifier=identifier)
                yield Leftover("role assignment", identifier, remove, since)

    def _existing(self, principals: set[str]) -> set[str]:
        """Return the principals that still exist; Microsoft Graph leaves out the others."""
        found, ids = set[str](), sorted(principals)
        for start in range(0, len(ids), _PRINCIPALS_AT_ONCE):
            chosen = ids[start : start + _PRINCIPALS_AT_ONCE]
            answer = self.graph.post("/v1.0/directoryObjects/getByIds", {"ids": chosen})
            found |= {str(item["id"]) for item in answer["value"]}
        return found

    def deleted_vaults(self) -> Iterator[Leftover]:
        """Yield the deleted key vaults, whose names stay taken until Azure purges them."""
        path = f"{self.arm.root}/providers/Microsoft.KeyVault/deletedVaults"
        for item in self.arm.list_all(path, "2023-07-01"):
            values = item["properties"]
            if self._has_tags(values):
                target = shell("--name {name} --location {place}", name=item["name"], place=values["location"])
                reason = f"Azure deletes it at {_minutes(values.get('scheduledPurgeDate'))}, without charge until then"
                since, remove = _minutes(values.get("deletionDate")), f"az keyvault purge {target}"
                if values.get("purgeProtectionEnabled"):
                    remove = f"az keyvault show-deleted {target}"
                yield Leftover("deleted key vault", str(item["name"]), remove, since, kept=reason)

    def _price(self, item: Item) -> float | None:
        """Return the price of a resource per hour, None where it is free or unknown."""
        kind = str(item["type"]).lower()
        if kind == _SCALE_SETS:
            sku = item.get("sku") or {}
            return self._machine_price(str(sku.get("name")), int(sku.get("capacity") or 0))
        if kind == _POOLS:
            pool = self.arm.get(str(item["id"]), "2024-09-01")["properties"]
            unit = prices("netapp").get(str(pool["serviceLevel"]))
            return None if unit is None else int(pool["size"]) / _GIB * unit
        return prices("fixed").get(_PRICED.get(kind, ""))

    def _machine_price(self, size: str, count: int) -> float | None:
        row = next((row for row in catalog.instances(self.settings.cloud) if row.name == size), None)
        unit = row.on_demand_usd_per_hour if row else prices("system").get(size)
        return None if unit is None else count * unit

    def _has_tags(self, item: Item) -> bool:
        """Return whether an entry has the tags that name the stack."""
        labels, tags = self.settings.labels, item.get("tags") or {}
        return all(tags.get(key) == labels[key] for key in _NAMING_TAGS)

    def _is_own_group(self, name: str) -> bool:
        """Return whether Pulumi created a group of this name for the stack."""
        return any(re.fullmatch(self._group_pattern(part), name, re.IGNORECASE) for part in ("network", "objects"))

    def _group_pattern(self, part: str) -> str:
        """Return the pattern of a group's physical name: Pulumi adds eight hexadecimal digits."""
        return rf"{re.escape(self.settings.stack)}-{part}-group[0-9a-f]{{8}}"

    def _reason_to_keep(self, holds_checkpoints: bool) -> str:
        keep = holds_checkpoints and self.settings.storage.on_destroy == "keep"
        return "storage.on_destroy is keep" if keep else ""


def _is_within(scope: str, outer: str) -> bool:
    """Return whether a scope is another one or a part of it: vault `kv10` is not within `kv1`."""
    return scope == outer or scope.startswith(f"{outer.rstrip('/')}/")


def _group_name(identifier: str) -> str:
    """Return the resource group in an id, empty if there is none."""
    match = re.search(r"/resourceGroups/([^/]+)", identifier, re.IGNORECASE)
    return match[1] if match else ""


def _minutes(moment: object) -> str | None:
    """Return one of Azure's times without its seconds, None if there is none."""
    return f"{str(moment)[:16]}Z" if moment else None
