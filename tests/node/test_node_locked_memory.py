"""Locked memory on a real node: which pods may register memory with network cards, by the kernel's own answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any

import node_servers
import pytest
from cluster_plane import wait_for
from node import Node
from node_runs import Run, namespace_and_volume, record_measurement

from infra.contract import Fabric
from workloads.facts import Facts
from workloads.objects.pod import helper_pod, training_pod

GIB = 2**30
NAMESPACE = "locked"
#: As on Azure, without the devices that only its nodes have.
INFINIBAND = Fabric("infiniband", rdma=True, as_root=True, capabilities=("IPC_LOCK",))
EFA = Fabric("efa", rdma=True)
#: Locks as many bytes as its argument says, without raising the soft limit as the trainer does.
PROGRAM = """
import json, os, resource, sys
from trainer.runtime import locked_memory
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
refused = locked_memory._try_lock(int(sys.argv[1]))
print(json.dumps({
    "uid": os.geteuid(), "refused": refused, "limits": resource.getrlimit(resource.RLIMIT_MEMLOCK),
    "effective": status["CapEff"].strip(), "bounding": status["CapBnd"].strip(), "seccomp": status["Seccomp"].strip(),
    "suffices": locked_memory.read_locked_memory().suffices,
}))
"""
_IPC_LOCK = f"{1 << 14:016x}"


@pytest.fixture(scope="module")
def facts(node: Node) -> Facts:
    """Create a namespace that admits the capability, and a runtime class for nodes with another specification."""
    run = Run(node, NAMESPACE)
    node.run_inside("install", "-d", "-m", "2775", run.volume, f"{run.volume}/work")
    objects = namespace_and_volume(NAMESPACE, run.volume)
    objects[0]["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": INFINIBAND.pod_security}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer", "namespace": NAMESPACE}}
    name = node_servers.CHANGED_RUNTIME
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": name}
    node.apply([*objects, account, runtime])
    return run.facts()


def run_pod(node: Node, name: str, spec: dict[str, Any]) -> tuple[int, str]:
    """Run a pod once; return the exit code of its container and its log."""
    spec = spec | {"restartPolicy": "Never"}
    metadata = {"name": name, "namespace": NAMESPACE}
    node.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}])

    def ended() -> Any:
        found = node.get("pod", name, "--namespace", NAMESPACE)
        return found["status"].get("containerStatuses", [{}])[0].get("state", {}).get("terminated")

    code = int(wait_for(f"end of {name}", ended, 120)["exitCode"])
    output = node.kubectl("logs", name, "--namespace", NAMESPACE).stdout
    node.kubectl("delete", "pod", name, "--namespace", NAMESPACE, "--grace-period=1")
    return code, output


def training_spec(facts: Facts, fabric: Fabric, *arguments: str) -> dict[str, Any]:
    """Return the training's pod on a fabric, with other arguments."""
    pod = training_pod(replace(facts, fabric=fabric), labels={}, container="trainer", args=arguments)
    return dict(pod["spec"])


def lock(node: Node, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return what the pod's process was allowed."""
    code, output = run_pod(node, name, spec)
    assert code == 0, output
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    record_measurement(f"{name}: {found}")
    return found


def test_a_non_root_user_does_not_get_the_capability_and_may_lock_nothing(node: Node, facts: Facts) -> None:
    """Pods had this security context on InfiniBand before: uid 10001 plus IPC_LOCK."""
    spec = training_spec(facts, INFINIBAND, "python", "-c", PROGRAM, str(GIB))
    spec["securityContext"] |= {"runAsUser": 10001, "runAsNonRoot": True}
    found = lock(node, "before", spec)
    assert (found["uid"], found["effective"], found["bounding"]) == (10001, "0" * 16, _IPC_LOCK)
    assert found["refused"] == "Cannot allocate memory"
    assert not found["suffices"]


def test_root_with_the_one_capability_locks_a_gibibyte(node: Node, facts: Facts) -> None:
    found = lock(node, "infiniband", training_spec(facts, INFINIBAND, "python", "-c", PROGRAM, str(GIB)))
    assert (found["uid"], found["effective"], found["bounding"]) == (0, _IPC_LOCK, _IPC_LOCK), "no other capability"
    assert found["seccomp"] == "2", "a filter is on"
    assert found["limits"] == list(node_servers.MEMLOCK), "the limit is as low as before"
    assert (found["refused"], found["suffices"]) == (None, True)


def test_root_without_the_capability_locks_nothing(node: Node, facts: Facts) -> None:
    spec = training_spec(facts, INFINIBAND, "python", "-c", PROGRAM, str(GIB))
    spec["containers"][0]["securityContext"]["capabilities"] = {"drop": ["ALL"]}
    assert lock(node, "root", spec)["refused"] == "Cannot allocate memory"


@pytest.fixture(scope="module")
def efa_limit(node: Node) -> Iterator[int]:
    """Give runtime CHANGED_RUNTIME the limits in the user data of EFA nodes; return the limit of locked memory.

    Only CAP_SYS_RESOURCE raises a hard limit. Without it each limit is the highest that containerd has.
    """
    limits = efa_limits()
    if not may_raise_limits():
        containerds = {"RLIMIT_MEMLOCK": node_servers.MEMLOCK, "RLIMIT_NOFILE": getrlimit(RLIMIT_NOFILE)}
        limits = [item | _lower(item, containerds[item["type"]][1]) for item in limits]
    (memlock,) = (item for item in limits if item["type"] == "RLIMIT_MEMLOCK")
    path = node_servers.specification_path(node.folder)
    before = path.read_text()
    specification = json.loads(before)
    specification["process"]["rlimits"] = limits
    path.write_text(json.dumps(specification))
    restart_containerd(node)
    yield int(memlock["soft"])
    path.write_text(before)


def _lower(limit: dict[str, Any], highest: int) -> dict[str, int]:
    """Return soft and hard limit, at most `highest`."""
    return {kind: min(limit[kind], highest) for kind in ("soft", "hard")}


def efa_limits() -> list[dict[str, Any]]:
    """Return the limits in the node configuration of EFA nodes."""
    import base64
    import email

    import yaml

    from infra.clouds.aws.nodes import user_data

    document = email.message_from_bytes(base64.b64decode(user_data(num_huge_pages=1)))
    (text,) = (part.get_payload() for part in document.walk() if part.get_content_type() == "application/node.eks.aws")
    (config,) = (item for item in yaml.safe_load_all(str(text)) if item)
    found: list[dict[str, Any]] = config["spec"]["containerd"]["baseRuntimeSpec"]["process"]["rlimits"]
    return found


def may_raise_limits() -> bool:
    """Return whether this machine has CAP_SYS_RESOURCE, as every node of a cloud does."""
    match = re.search(r"^CapEff:\s+(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return bool(int(match[1], 16) >> 24 & 1)


def restart_containerd(node: Node) -> None:
    """Restart containerd, and wait until the node runs pods again."""
    before = (node.folder / "pids" / "containerd").read_text()
    node.restart("containerd")
    wait_for("new containerd", lambda: (node.folder / "pids" / "containerd").read_text() != before)
    ready = ("ctr", "--address", node_servers.CONTAINERD, "version")
    wait_for("containerd", lambda: node.run_inside(*ready, check=False).returncode == 0)


def test_the_limit_in_the_configuration_of_efa_nodes_lets_a_non_root_user_lock_memory(
    node: Node, facts: Facts, efa_limit: int
) -> None:
    size = min(GIB, efa_limit // 2)  # the interpreter itself locks nothing
    spec = training_spec(facts, EFA, "python", "-c", PROGRAM, str(size))
    before = lock(node, "efa-before", spec)
    assert before["refused"] == "Cannot allocate memory"
    found = lock(node, "efa", spec | {"runtimeClassName": node_servers.CHANGED_RUNTIME})
    assert (found["uid"], found["effective"]) == (10001, "0" * 16), "neither root nor a capability"
    assert found["limits"] == [efa_limit, efa_limit]
    assert found["refused"] is None
    record_measurement(f"EFA: uid 10001 locks {size // 2**20} MiB, where 64 KiB were the limit")


def test_both_users_write_to_the_same_folders(node: Node, facts: Facts) -> None:
    """Root without CAP_DAC_OVERRIDE needs the group's permission, as uid 10001 does."""
    work = facts.storage.work_path
    writes = f"mkdir -p {work}/runs/$0 && touch {work}/runs/$0/log {work}/runs/first/log-of-$0"
    containers = [{"name": "helper", "args": ["sh", "-c", writes, "first"], "resources": {}}]
    assert run_pod(node, "helper", helper_pod(facts, component="helper", containers=containers)["spec"]) == (0, "")
    assert run_pod(node, "root-writes", training_spec(facts, INFINIBAND, "sh", "-c", writes, "second")) == (0, "")
    writes = f"touch {work}/runs/second/log-of-$0"
    containers = [{"name": "helper", "args": ["sh", "-c", writes, "third"], "resources": {}}]
    assert run_pod(node, "third", helper_pod(facts, component="helper", containers=containers)["spec"]) == (0, "")
