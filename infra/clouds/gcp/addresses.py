"""A network outside the stack, on Google Cloud."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from infra.config.problems import Problem, fix_by_setting
from infra.config.settings import Section

#: The largest packet that GPUDirect-TCPX divides into whole memory pages; NCCL over TCP gains from large packets too.
#: https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx
MTU_BYTES = 8244

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

    def problems(self) -> Iterable[Problem]:
        """Check that pods and services have a range each."""
        if self.pods_range == self.services_range:
            key = "network.existing.services_range"
            yield Problem(
                key, "the range of the pods", "a range of its own", fix_by_setting(key, "services"), self.pods_range
            )
