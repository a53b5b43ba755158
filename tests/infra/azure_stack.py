"""What the tests of Azure share: resource types, overrides of the stack, and settings parsed from a mapping."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from provider_mocks.recording import PROJECT, Recording, Registration

from infra.clouds.azure.settings import Settings
from infra.config.problems import Problem, SettingsError
from infra.stack import parse
from workloads.settings import SECTIONS

Stack = Callable[..., Recording]

AKS = "azure-native:containerservice:ManagedCluster"
POOL = "azure-native:containerservice:AgentPool"
SUBNET = "azure-native:network:Subnet"
FIREWALL = "azure-native:network:NetworkSecurityGroup"
ROLE = "azure-native:authorization:RoleAssignment"
ACCOUNT = "azure-native:storage:StorageAccount"
CONTAINER = "azure-native:storage:BlobContainer"
REGISTRY = "azure-native:containerregistry:Registry"
NETAPP_POOL = "azure-native:netapp:CapacityPool"
NETAPP_VOLUME = "azure-native:netapp:CapacityPoolVolume"
GRAFANA = "azure-native:dashboard:Grafana"
PLACEMENT = "azure-native:compute:ProximityPlacementGroup"
RELEASE = "kubernetes:helm.sh/v3:Release"

TRIAL = {"gpu.instance_type": "Standard_NC4as_T4_v3"}
SPOT = {"gpu.capacity": "spot"}
SUBSCRIPTION = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/capacity/providers"
RESERVATION = f"{SUBSCRIPTION}/Microsoft.Compute/capacityReservationGroups/nd"
RESERVED = TRIAL | {"gpu.capacity": "reservation", "gpu.reservation_id": RESERVATION}
OPEN = {"network.authorized_cidrs": ["203.0.113.0/24", "198.51.100.7/32"]}

VAULT = f"{SUBSCRIPTION}/Microsoft.KeyVault/vaults/keys"
GROUP = "01234567-89ab-cdef-0123-456789abcdef"
#: Independent settings, combined because each run registers eighty resources.
CHOSEN: dict[str, object] = {
    "kubernetes.kms_key_id": "https://keys.vault.azure.net/keys/etcd/0123456789abcdef",
    "kubernetes.kms_vault_id": VAULT,
    "kubernetes.admin_group_ids": [GROUP],
    "monitoring.public_grafana": True,
    "namespace": "jobs",
    "storage.size_gib": 4096,
    "storage.tier": "Ultra",
    "gpu.zone": 2,
}
MAINTENANCE = {
    "maintenance.day": "tuesday",
    "maintenance.start": "22:00",
    "maintenance.hours": 6,
    "maintenance.exclusions": [{"name": "big-run", "start": "2026-12-01", "end": "2026-12-20"}],
}
KEPT = {"storage.on_destroy": "keep", "storage.expire_checkpoints_after_days": 30}
DELETED = {"storage.on_destroy": "delete", "storage.expire_checkpoints_after_days": 30}

#: Powerful built-in roles, which must be assigned on single resources, never on a group or a subscription.
CONTRIBUTOR = "b24988ac-6180-42a0-ab88-20f7382dd24c"
OWNER = "8e3af657-a8ff-443c-a75c-2fe8c4bcb635"


def releases(recording: Recording) -> dict[str, Any]:
    """Return the values of each Helm release by its name."""
    return {item.inputs["name"]: item.inputs["values"] for item in recording.of_type(RELEASE)}


def subnet(recording: Recording, name: str) -> Registration:
    """Return one subnet of the VNet."""
    return recording.one(SUBNET, f"azure-network-{name}-subnet")


def roles_of(recording: Recording) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of each role assignment by its name."""
    return {item.name: item.inputs for item in recording.of_type(ROLE)}


def parse_settings(settings: Mapping[str, Any], location: str = "eastus") -> Settings:
    """Parse settings of an otherwise valid stack."""
    keys = {
        "cloud": "azure",
        "tags": {"owner": "me", "cost_centre": "tests"},
        "gpu": {"instance_type": "Standard_ND96asr_v4"},
        **settings,
    }
    config = {f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    parsed = parse(config | {"azure-native:location": location}, PROJECT, "test", SECTIONS).settings
    assert isinstance(parsed, Settings)
    return parsed


def find_problems(settings: Mapping[str, Any], location: str = "eastus") -> dict[str, Problem]:
    """Return the problems of invalid settings by key."""
    with pytest.raises(SettingsError) as caught:
        parse_settings(settings, location)
    return {problem.key: problem for problem in caught.value.problems}


def apply_fixes(settings: dict[str, Any], problems: Mapping[str, Problem]) -> dict[str, Any]:
    """Return the settings after running every suggested command, from the last to keep the indices of lists valid."""
    for problem in reversed(list(problems.values())):
        _, _, verb, *rest = problem.fix.replace("'", "").split()
        key, value = rest[1], rest[2] if verb == "set" else None
        *parents, last = key.split(".")
        owner = settings
        for part in parents:
            owner = owner.setdefault(part, {})
        name, _, index = last.partition("[")
        if index:
            del owner[name][int(index.rstrip("]"))]
        elif value is None:
            del owner[last]
        else:
            owner[last] = value
    return settings
