"""What the tests of Google Cloud share: resource types, overrides of the stack, and settings parsed from overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from provider_mocks.recording import PROJECT, Recording, stack_config

from infra.clouds.gcp.settings import Settings
from infra.config.problems import Problem, SettingsError
from infra.stack import parse
from workloads.settings import SECTIONS

Stack = Callable[..., Recording]

CLUSTER = "gcp:container/cluster:Cluster"
POOL = "gcp:container/nodePool:NodePool"
NETWORK = "gcp:compute/network:Network"
FIREWALL = "gcp:compute/firewall:Firewall"
BUCKET = "gcp:storage/bucket:Bucket"
FILESTORE = "gcp:filestore/instance:Instance"
CUSTOM = "kubernetes:networking.gke.io/v1:"
DAEMONS = "kubernetes:apps/v1:DaemonSet"

A2, A2_ULTRA, A3, TRIAL = "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "g2-standard-4"
TYPES = (A2, A2_ULTRA, A3, TRIAL)
CAPACITIES: Mapping[str, Mapping[str, object]] = {
    "on_demand": {},
    "spot": {"gpu.capacity": "spot"},
    "reservation": {"gpu.capacity": "reservation", "gpu.reservation_id": "ours"},
    "flex_start": {"gpu.capacity": "flex_start"},
}


def gpu_pool_inputs(recording: Recording) -> Mapping[str, Any]:
    """Return the inputs of the GPU pool."""
    return recording.one(POOL, "gcp-cluster-gpu").inputs


def node_config(stack: Stack, instance_type: str = A2, capacity: str = "on_demand") -> Mapping[str, Any]:
    """Return the configuration of the GPU nodes of a type and a kind of capacity."""
    inputs: Mapping[str, Any] = pool_inputs(stack, instance_type, capacity)["nodeConfig"]
    return inputs


def pool_inputs(stack: Stack, instance_type: str = A2, capacity: str = "on_demand") -> Mapping[str, Any]:
    """Return the inputs of the GPU pool of a type and a kind of capacity."""
    return gpu_pool_inputs(stack("gcp", {"gpu.instance_type": instance_type, **CAPACITIES[capacity]}))


def parse_settings(overrides: Mapping[str, object] | None = None, name: str = "gcp") -> Settings:
    """Parse the settings of the stack gcp with overrides."""
    settings = parse(stack_config("gcp", overrides), PROJECT, name, SECTIONS).settings
    assert isinstance(settings, Settings)
    return settings


def find_problems(overrides: Mapping[str, object], name: str = "gcp") -> dict[str, Problem]:
    """Return the problems of invalid overrides by key."""
    with pytest.raises(SettingsError) as caught:
        parse_settings(overrides, name)
    return {problem.key: problem for problem in caught.value.problems}
