"""When and how AKS upgrades the control plane, the node images and the GPU nodes."""

from __future__ import annotations

import pulumi
from pulumi_azure_native import containerservice

from infra.config.maintenance import Maintenance

#: Upgrades of Kubernetes, new node images, and AKS's weekly releases of the control plane and its add-ons.
_SCHEDULES = ("aksManagedAutoUpgradeSchedule", "aksManagedNodeOSUpgradeSchedule", "default")


def channels() -> containerservice.ManagedClusterAutoUpgradeProfileArgs:
    """Return what AKS upgrades by itself: patches of the minor version, and node images."""
    return containerservice.ManagedClusterAutoUpgradeProfileArgs(
        upgrade_channel="patch", node_os_upgrade_channel="NodeImage"
    )


def without_surge() -> containerservice.AgentPoolUpgradeSettingsArgs:
    """Upgrade one node at a time without a spare one, for which few subscriptions have GPU quota.

    Spot pools do not accept these settings. Thirty minutes to drain are more than a checkpoint on SIGTERM needs. A node
    that cannot be drained fails the upgrade: `undrainable_node_behavior` Cordon would replace it by a spare node.
    """
    return containerservice.AgentPoolUpgradeSettingsArgs(
        max_surge="0", max_unavailable="1", drain_timeout_in_minutes=30
    )


def maintenance_windows(
    name: str,
    maintenance: Maintenance,
    group: pulumi.Input[str],
    cluster: pulumi.Input[str],
    opts: pulumi.ResourceOptions,
) -> list[containerservice.MaintenanceConfiguration]:
    """Restrict upgrades, which drain nodes and so interrupt training, to the stack's weekly window.

    AKS may still repair something urgent outside the window (AKS, planned maintenance).
    """
    weekly = containerservice.WeeklyScheduleArgs(day_of_week=maintenance.day.capitalize(), interval_weeks=1)
    window = containerservice.MaintenanceWindowArgs(
        schedule=containerservice.ScheduleArgs(weekly=weekly),
        duration_hours=maintenance.hours,
        start_time=maintenance.start,
        utc_offset="+00:00",
        not_allowed_dates=[
            containerservice.DateSpanArgs(start=str(exclusion.start), end=str(exclusion.end))
            for exclusion in maintenance.exclusions
        ]
        or None,
    )
    return [
        containerservice.MaintenanceConfiguration(
            f"{name}-{schedule}",
            config_name=schedule,
            resource_group_name=group,
            resource_name_=cluster,
            maintenance_window=window,
            opts=opts,
        )
        for schedule in _SCHEDULES
    ]
