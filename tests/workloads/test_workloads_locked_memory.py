"""Tests that pods on an RDMA fabric may lock the memory that network cards read and write."""

from __future__ import annotations

import base64
import email
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from provider_mocks.recording import run_stack
from workload_facts import LAUNCHERS, record_facts

from infra.contract import Fabric
from workloads.manifests import build_manifests
from workloads.settings import JobSettings

ND, P5, A3 = "Standard_ND96isr_H100_v5", "p5.48xlarge", "a3-highgpu-8g"
#: systemd's limit of containerd, which every container inherits because Kubernetes sets none
#: (kubernetes/kubernetes#3595, NVIDIA/nvidia-container-toolkit#2037; Azure/AKS#4893 reports 64 KiB on AKS).
SYSTEMD_BYTES = 8 * 2**20
REQUIRED_BYTES = 2**30
#: The network cards of these types access the memory of pods.
RDMA = [("aws", P5), ("aws", "p4d.24xlarge"), ("azure", ND), ("azure", "Standard_ND96asr_v4")]


def pods(stack: str, instance_type: str, launcher: str = "job") -> list[dict[str, Any]]:
    """Return the pods that train and those that measure the fabric."""
    facts = record_facts(stack, (("gpu.instance_type", instance_type),))
    job = JobSettings.model_validate(
        facts.job.model_dump(exclude_none=True) | {"launcher": launcher, "netcheck": {"enabled": True}}
    )
    found = build_manifests(replace(facts, job=job))
    return [pod for key in ("job", "job-trainingruntime", "netcheck") if key in found for pod in _pods(found[key])]


def _pods(value: Any) -> list[dict[str, Any]]:
    """Return every pod specification with containers inside an object."""
    if isinstance(value, list):
        return [pod for item in value for pod in _pods(item)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for item in value.values() for pod in _pods(item)]


def node_limit_bytes(stack: str, instance_type: str) -> int:
    """Return RLIMIT_MEMLOCK of containers on a node: that of the node's configuration, else systemd's."""
    if stack != "aws":
        return SYSTEMD_BYTES
    return limits_of(instance_type).get("RLIMIT_MEMLOCK", {}).get("hard", SYSTEMD_BYTES)


def limits_of(instance_type: str) -> dict[str, dict[str, int]]:
    """Return the limits in the node configuration of the launch template, by type."""
    recording = run_stack("aws", {"gpu.instance_type": instance_type})
    (template,) = (
        item
        for item in recording.of_type("aws:ec2/launchTemplate:LaunchTemplate")
        if item.inputs.get("instanceType") == instance_type
    )
    document = email.message_from_bytes(base64.b64decode(template.inputs["userData"]))
    (config,) = (
        part.get_payload() for part in document.walk() if part.get_content_type() == "application/node.eks.aws"
    )
    assert isinstance(config, str)
    spec = next(iter(item for item in yaml.safe_load_all(config) if item))["spec"]
    limits = spec.get("containerd", {}).get("baseRuntimeSpec", {}).get("process", {}).get("rlimits", [])
    return {item["type"]: item for item in limits}


def lockable_bytes(pod: Mapping[str, Any], limit_bytes: int) -> float:
    """Return how much memory a pod's first container may lock.

    The kernel compares with RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK (mm/mlock.c, do_mlock;
    drivers/infiniband/core/umem.c, ib_umem_get). A capability that a pod adds is effective for uid 0 only: execve
    clears the permitted set of other users unless the capability is ambient, and containerd clears the ambient set
    (containerd/containerd#5644, kubernetes/enhancements#2763).
    """
    container = pod["containers"][0]
    own = container["securityContext"]
    user = own.get("runAsUser", pod["securityContext"]["runAsUser"])
    has_capability = user == 0 and "IPC_LOCK" in own["capabilities"].get("add", [])
    return float("inf") if has_capability else limit_bytes


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("stack", "instance_type"), RDMA)
def test_a_pod_on_an_rdma_fabric_may_lock_a_gibibyte(stack: str, instance_type: str, launcher: str) -> None:
    limit = node_limit_bytes(stack, instance_type)
    found = pods(stack, instance_type, launcher)
    assert len(found) > 1
    for pod in found:
        assert lockable_bytes(pod, limit) >= REQUIRED_BYTES, "ibv_reg_mr fails, and NCCL falls back to TCP in silence"


def test_efa_pods_stay_non_root_and_without_capabilities() -> None:
    for pod in pods("aws", P5):
        assert pod["securityContext"]["runAsUser"] == 10001
        assert "add" not in pod["containers"][0]["securityContext"]["capabilities"]


@pytest.mark.parametrize(("stack", "instance_type"), [("azure", ND), ("gcp", A3)])
def test_root_has_one_capability_and_no_way_to_more(stack: str, instance_type: str) -> None:
    for pod in pods(stack, instance_type):
        shared, own = pod["securityContext"], pod["containers"][0]["securityContext"]
        assert (shared["runAsUser"], shared["runAsNonRoot"]) == (0, False)
        assert own["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert shared["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_trainer_may_connect_to_the_socket_of_the_tcpx_daemon() -> None:
    """The daemon creates it as root with umask 022, so only root may write to it, which connect() requires."""
    (pod, *_) = pods("gcp", A3)
    assert pod["initContainers"][0]["securityContext"]["runAsUser"] == 0
    assert pod["securityContext"]["runAsUser"] == 0


def test_a_node_with_efa_keeps_the_limit_of_open_files() -> None:
    limits = limits_of(P5)
    # nodeadm replaces the whole list of its default specification (internal/containerd/base-runtime-spec.json).
    assert limits["RLIMIT_NOFILE"] == {"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 1048576}


def test_the_limit_survives_nodeadms_conversion_to_floating_point() -> None:
    # nodeadm merges through JSON numbers as float64 (internal/util/merge.go). The OCI value of "unlimited", 2^64-1,
    # comes back as 18446744073709552000, which containerd cannot read: the node would never join.
    limit = limits_of(P5)["RLIMIT_MEMLOCK"]
    assert limit["soft"] == limit["hard"]
    assert int(float(limit["hard"])) == limit["hard"] < 2**63
    assert limit["hard"] > 100 * 2**40, "more than the memory of any node"


def test_a_capability_without_root_is_refused() -> None:
    with pytest.raises(ValueError, match="have no effect for a non-root user: got IPC_LOCK"):
        Fabric("ib", capabilities=("IPC_LOCK",))
