"""What `python -m infra doctor` says of a cluster, asked of a real API server with its controllers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_manifests import gpu_node
from cluster_plane import Plane, wait_for
from test_cluster_product import claim

ROOT = Path(__file__).resolve().parents[2]
Nodes = Callable[..., list[str]]
Findings = dict[str, list[dict[str, Any]]]
#: Runs inside the control plane's network: the doctor's own checks of stack `aws`, moved to a namespace.
SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from infra import configuration
from infra.doctor import cluster, runner
from infra.doctor.model import Context
read = configuration.read("aws", {"namespace": sys.argv[2], "gpu.instance_type": "p5.48xlarge"})
context = Context(read.parse().settings, read.values)
checks = cluster.checks(context, {"vpc.amazonaws.com/efa": 32}, Path(sys.argv[1]).read_text(), "log in")
print(json.dumps([dataclasses.asdict(item) for item in runner.run(checks, "test")]))
"""


@pytest.fixture
def findings(plane: Plane, namespace: str) -> Callable[[], Findings]:
    """What the checks of a cluster find, by check."""

    def look() -> Findings:
        words = [sys.executable, "-c", SCRIPT, str(plane.kubeconfig), namespace]
        rows = json.loads(plane.run(words, PYTHONPATH=str(ROOT)).stdout)
        found: Findings = {}
        for row in rows:
            found.setdefault(row["check"], []).append(row)
        return found

    return look


def test_a_cluster_with_its_nodes_and_its_claim_is_fine(
    plane: Plane, namespace: str, gpu_nodes: Nodes, findings: Callable[[], Findings]
) -> None:
    gpu_nodes(2)
    plane.apply(claim(namespace))
    bound = lambda: plane.get("pvc", "datasets", "--namespace", namespace)["status"].get("phase") == "Bound"  # noqa: E731
    wait_for("the claim's volume", bound)
    found = findings()
    assert {row["status"] for rows in found.values() for row in rows} == {"ok"}, found
    assert found["kubernetes"][0]["result"].rpartition("Kubernetes ")[2].startswith("v1.")
    assert found["gpus"][0]["result"] == "8 nvidia.com/gpu on each of 2 nodes"
    assert found["fabric"][0]["result"] == "32 vpc.amazonaws.com/efa on each of 2 nodes"
    plane.kubectl("delete", "persistentvolume", namespace, "--wait=false")


def test_what_is_missing_is_told_in_the_servers_own_words(
    plane: Plane, namespace: str, gpu_nodes: Nodes, findings: Callable[[], Findings]
) -> None:
    """A node without its fabric, a claim of a class that nobody serves, an operator without pods."""
    (lame,) = gpu_nodes(1, lambda name: gpu_node(name, resources={"vpc.amazonaws.com/efa": "0"}))
    pending = claim(namespace)[1]
    pending["spec"] |= {"storageClassName": "no-such-class"}
    del pending["spec"]["volumeName"]
    container = {"name": "operator", "image": "nowhere.example/operator:1"}
    labels = {"app": "operator"}
    operator = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"operator-{namespace}", "namespace": "kube-system"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "nodeSelector": {"no": "node"}},
            },
        },
    }
    plane.apply([pending, operator])
    try:
        told = wait_for("the controllers' events", lambda: _with_reason(findings()))
    finally:
        plane.kubectl("delete", "deployment", f"operator-{namespace}", "--namespace", "kube-system")
    assert told["fabric"][0]["result"] == f"{lame} offers 0 vpc.amazonaws.com/efa, its type has 32"
    assert "no-such-class" in told["storage"][0]["result"]
    assert told["storage"][0]["cause"] == "storage-unbound"
    assert f"kube-system/operator-{namespace}: 0 of 1 pods work" in [row["result"] for row in told["operators"]]


def _with_reason(found: Findings) -> Findings | None:
    """Findings once the claim's event and the Deployment's pods are there."""
    storage, operators = found["storage"][0]["result"], [row["result"] for row in found["operators"]]
    return found if "no-such-class" in storage and any("0 of 1" in result for result in operators) else None
