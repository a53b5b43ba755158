"""What the doctor asks Azure about one stack; each method returns one row of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv4Network
from typing import Any

from infra import catalog
from infra.clouds.azure import versions
from infra.clouds.azure.doctor import networks
from infra.clouds.azure.doctor.causes import (
    ACCOUNT,
    FEATURE,
    OFFER,
    OVERLAP,
    PROVIDER,
    QUOTA,
    RESERVATION,
    ROLES,
    SUBSCRIPTION,
    VERSION,
)
from infra.clouds.azure.doctor.client import Arm
from infra.clouds.azure.settings import Settings
from infra.findings.model import Context, Finding, ok, problem, skipped

#: Resource providers of the stack's resources; Pulumi's provider registers most of them if it is allowed to.
_NAMESPACES = (
    "Microsoft.Authorization", "Microsoft.Compute", "Microsoft.ContainerRegistry", "Microsoft.ContainerService",
    "Microsoft.ManagedIdentity", "Microsoft.NetApp", "Microsoft.Network", "Microsoft.Storage",
)  # fmt: skip
_CLUSTER_NAMESPACES = {"Microsoft.ContainerService", "Microsoft.NetApp"}
_SERVICE_NAMESPACES = (
    "Microsoft.Insights", "Microsoft.KeyVault", "Microsoft.MachineLearningServices", "Microsoft.OperationalInsights",
)  # fmt: skip
_MONITORING_NAMESPACES = ("Microsoft.Dashboard", "Microsoft.Insights", "Microsoft.Monitor")


@dataclass(frozen=True)
class Queries:
    """The queries about one stack."""

    arm: Arm
    settings: Settings
    context: Context

    def credentials(self) -> Finding:
        """Check that the subscription is enabled and is the stack's."""
        subscription = self.arm.get(self.arm.root, "2022-12-01")
        result = f"{subscription['displayName']} ({self.arm.subscription}), {subscription['state']}"
        stack_account = (self.context.outputs or {}).get("account")
        if stack_account and stack_account != self.arm.subscription:
            return problem(ACCOUNT, f"{result}; the stack is in {stack_account}", account=stack_account)
        return ok(result) if subscription["state"] == "Enabled" else problem(SUBSCRIPTION, result)

    def providers(self) -> Finding | list[Finding]:
        """Check that the resource providers of the stack's resources are registered."""
        needed = (*_NAMESPACES, *(_MONITORING_NAMESPACES if self.settings.monitoring.managed else ()))
        if self.settings.service:
            needed = (*(name for name in _NAMESPACES if name not in _CLUSTER_NAMESPACES), *_SERVICE_NAMESPACES)
        states = {
            str(item["namespace"]).lower(): item["registrationState"]
            for item in self.arm.list_all(f"{self.arm.root}/providers", "2021-04-01")
        }
        missing = {name: states.get(name.lower(), "unknown here") for name in needed}
        missing = {name: state for name, state in missing.items() if state != "Registered"}
        if missing:
            return [problem(PROVIDER, f"{name} is {state}", namespace=name) for name, state in missing.items()]
        return ok(f"{len(needed)} registered")

    def roles(self) -> Finding:
        """Check that these credentials may assign roles, which `up` does for cluster, trainer and registry."""
        action = "Microsoft.Authorization/roleAssignments/write"
        if self.arm.allows(self.arm.root, action):
            return ok("these credentials may assign roles")
        return problem(ROLES, f"no role that allows {action}", subscription=self.arm.subscription)

    def features(self) -> Finding | list[Finding]:
        """Check that the features that nodes need are registered."""
        if not self.settings.required_features:
            return skipped("these nodes need none")
        problems = []
        for feature in self.settings.required_features:
            namespace, name = feature.split("/")
            path = f"{self.arm.root}/providers/Microsoft.Features/providers/{namespace}/features/{name}"
            state = self.arm.get(path, "2021-07-01")["properties"]["state"]
            if state != "Registered":
                problems.append(problem(FEATURE, f"{feature} is {state}", namespace=namespace, name=name))
        return problems or ok(f"{', '.join(self.settings.required_features)} registered")

    def version(self) -> Finding:
        """Check that the location offers the Kubernetes version, and until when AKS supports it."""
        if self.settings.service:
            return skipped("Azure Machine Learning has no Kubernetes version")
        chosen, location = versions.minor(self.settings.cluster.kubernetes_version), self.settings.location
        path = f"{self.arm.root}/providers/Microsoft.ContainerService/locations/{location}/kubernetesVersions"
        offered = [
            str(item["version"]) for item in self.arm.get(path, "2025-05-01")["values"] if not item.get("isPreview")
        ]
        release = versions.RELEASES[chosen]
        if chosen not in offered:
            usable = [version for version in sorted(offered, key=versions.number) if version in versions.RELEASES]
            result = f"{location} offers {_or_none(usable)} and not {chosen}"
            return problem(VERSION, result, location=location, version=usable[-1] if usable else "<version>")
        return ok(f"{chosen} until {release.supported_until:%B %Y}, nodes with {release.node_os}")

    def _find_size(self) -> Mapping[str, Any] | None:
        """Return the location's description of the GPU nodes' size, None if it does not offer the size."""
        location = f"location eq '{self.settings.location}'"
        for item in self.arm.list_all(
            f"{self.arm.root}/providers/Microsoft.Compute/skus", "2021-07-01", **{"$filter": location}
        ):
            if item["resourceType"] == "virtualMachines" and item["name"] == self.settings.gpu.instance_type:
                return item
        return None

    def offer(self) -> Finding:
        """Check that the location and the zone offer the size to this subscription."""
        kind, location = self.settings.gpu.instance_type, self.settings.location
        size = self._find_size()
        elsewhere = (
            f"az vm list-skus --size {kind} --all --output table, then: pulumi config set azure-native:location <one>"
        )
        if size is None:
            return problem(OFFER, f"{location} does not offer {kind}", fix=elsewhere)
        zones = sorted({zone for item in size.get("locationInfo", ()) for zone in item.get("zones", ())})
        closed: set[str] = set()
        for item in size.get("restrictions", ()):
            if item["type"] == "Location":
                result = f"{kind} in {location} is closed to this subscription ({item['reasonCode']})"
                return problem(OFFER, result, fix=f"request access together with the quota; or {elsewhere}")
            closed |= set((item.get("restrictionInfo") or {}).get("zones", ()))
        usable = [zone for zone in zones if zone not in closed]
        chosen = self.settings.zones
        if chosen and chosen[0] not in usable:
            fix = f"pulumi config set --path gpu.zone {usable[0]}" if usable else "pulumi config rm --path gpu.zone"
            result = f"zone {chosen[0]} of {location} does not offer {kind}; {_or_none(usable)} do"
            return problem(OFFER, result, fix=fix)
        return ok(f"{kind} is offered in {location}" + (f", zones {', '.join(usable)}" if usable else ""))

    def quota(self) -> Finding:
        """Check the cores of the size's family, or of spot, against those in use plus the pool at its maximum."""
        if self.settings.service:
            return skipped("Azure Machine Learning has its own quotas: see Quotas in the studio, for the subscription")
        gpu = self.settings.gpu
        size = self._find_size()
        if size is None:
            return skipped("the location does not offer the size")
        family = "lowPriorityCores" if self.settings.interruptible else str(size["family"])
        path = f"{self.arm.root}/providers/Microsoft.Compute/locations/{self.settings.location}/usages"
        usages = {str(item["name"]["value"]).lower(): item for item in self.arm.list_all(path, "2024-07-01")}
        usage = usages.get(family.lower(), {"limit": 0, "currentValue": 0})
        node_cores = catalog.instance(self.settings.cloud, gpu.instance_type).num_vcpus
        # The nodes that this stack already runs are part of what it needs.
        running = gpu.nodes.min * node_cores if self.context.outputs else 0
        limit, used = int(usage["limit"]), max(0, int(usage["currentValue"]) - running)
        needed = gpu.nodes.max * node_cores
        result = f"{family}: {limit} cores, {used} in use, {needed} needed for {gpu.nodes.max} x {gpu.instance_type}"
        if used + needed <= limit:
            return ok(result)
        if self.context.outputs:
            result += "; nodes of this stack above gpu.nodes.min are among those in use"
        values = {"value": used + needed, "family": family, "location": self.settings.location}
        return problem(QUOTA, result, nodes=max(0, (limit - used) // node_cores), **values)

    def reservation(self) -> Finding:
        """Check that the reservation group exists and has enough machines of this size."""
        group = self.settings.gpu.reservation_id
        if not group:
            return skipped(f"gpu.capacity is {self.settings.gpu.capacity}")
        from azure.core.exceptions import HttpResponseError

        choose = "pulumi config set --path gpu.reservation_id <id>; az capacity reservation group list"
        try:
            location = str(self.arm.get(group, "2024-07-01")["location"]).lower().replace(" ", "")
        except HttpResponseError as error:
            if error.status_code != HTTPStatus.NOT_FOUND:
                raise
            return problem(RESERVATION, f"no reservation group {group.rpartition('/')[2]}", fix=choose)
        name = group.rpartition("/")[2]
        if location != self.settings.location:
            return problem(RESERVATION, f"{name} is in {location}, the stack in {self.settings.location}", fix=choose)
        reservations = list(self.arm.list_all(f"{group}/capacityReservations", "2024-07-01"))
        skus = [item["sku"] for item in reservations]
        count = sum(int(sku["capacity"]) for sku in skus if sku["name"] == self.settings.gpu.instance_type)
        result = f"{name} has {count} x {self.settings.gpu.instance_type} in {location}"
        if count < self.settings.gpu.nodes.desired:
            return problem(RESERVATION, result, fix=f"pulumi config set --path gpu.nodes.desired {count}; or {choose}")
        return ok(result)

    def existing_network(self) -> Finding | list[Finding]:
        """Check the network that the stack uses and does not create."""
        return networks.existing_network(self.arm, self.settings, is_up=bool(self.context.outputs))

    def overlaps(self) -> Finding:
        """Look for VNets that overlap the stack's, with which it could not be peered."""
        if self.context.outputs or self.settings.network.existing:
            return skipped("the stack has its network")
        mine = IPv4Network(self.settings.network.cidr)
        taken = [
            (str(net["name"]), IPv4Network(cidr))
            for net in self.arm.list_all(f"{self.arm.root}/providers/Microsoft.Network/virtualNetworks", "2024-05-01")
            for cidr in net["properties"]["addressSpace"]["addressPrefixes"]
            if ":" not in cidr
        ]
        overlapping = [f"{name} ({cidr})" for name, cidr in taken if cidr.overlaps(mine)]
        if not overlapping:
            return ok(f"{mine} overlaps none of {len(taken)} ranges")
        blocks = IPv4Network("10.0.0.0/8").subnets(new_prefix=mine.prefixlen)
        free = next((block for block in blocks if not any(block.overlaps(cidr) for _, cidr in taken)), "<range>")
        # Separate networks may use the same addresses; only networks to be connected must not.
        result = f"{mine} overlaps {', '.join(overlapping)}; harmless unless they are connected"
        return Finding("ok", result, OVERLAP.format_fix({"free": free}), OVERLAP.key)


def _or_none(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
