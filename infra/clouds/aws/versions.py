"""What follows from the Kubernetes version on EKS: the autoscaler and node images; `live.addon_version` add-ons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator

#: The minor versions that EKS offers, oldest first. YAML reads an unquoted 1.35 as a number.
KubernetesVersion = Annotated[Literal["1.34", "1.35", "1.36"], BeforeValidator(str)]

#: The image of the cluster-autoscaler, which is built against one minor version and must match the control plane's:
#: https://github.com/kubernetes/autoscaler/tree/master/cluster-autoscaler#releases
AUTOSCALER_TAGS: Mapping[str, str] = {"1.34": "v1.34.4", "1.35": "v1.35.1", "1.36": "v1.36.0"}

#: The images of EKS that node groups start. Their release follows from the group's Kubernetes version: EKS takes the
#: newest at the creation and at an update of the version or of the launch template, and never by itself.
GPU_AMI, SYSTEM_AMI = "AL2023_x86_64_NVIDIA", "AL2023_x86_64_STANDARD"

_RELEASE = re.compile(r"(\d+\.\d+)\.\d+-\d{8}")


def is_release_of(release: str, kubernetes_version: str) -> bool:
    """Return whether an AMI release, such as 1.35.2-20260714, is one of this Kubernetes version."""
    found = _RELEASE.fullmatch(release)
    return bool(found and found[1] == kubernetes_version)
