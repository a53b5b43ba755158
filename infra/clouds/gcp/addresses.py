"""A network outside the stack, on Google Cloud."""

from __future__ import annotations

from pydantic import Field

from infra.config.settings import Section

_NAME = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


class ExistingNetwork(Section):
    """A VPC of the stack's project, its subnet in the stack's region, and the subnet's secondary ranges, by name.

    The subnet needs Cloud NAT and Private Google Access. The stack adds firewall rules for its own nodes, and nothing
    else. With `private_service_access` Filestore uses the VPC's range for services instead of a peering of its own.
    """

    network: str = Field(pattern=_NAME, examples=["shared"])
    subnetwork: str = Field(pattern=_NAME, examples=["gpu-nodes"])
    pods_range: str = Field(pattern=_NAME, examples=["pods"])
    services_range: str = Field(pattern=_NAME, examples=["services"])
    private_service_access: bool = False
