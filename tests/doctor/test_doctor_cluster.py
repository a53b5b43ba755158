"""The doctor's checks of a cluster and its job, against an API server on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from cluster_objects import NODES, PODS, TRAIN, condition, job, line, pod
from doctor_answers import one, run_checks
from fake_cluster import FakeCluster

from infra.clouds.local import doctor as local_doctor
from infra.doctor import cluster as cluster_checks
from infra.doctor import job as job_checks
from infra.findings.model import Context, Finding

CLAIMS = "/api/v1/namespaces/training/persistentvolumeclaims"
EVENTS = "/api/v1/namespaces/training/events"
OPERATORS = "/apis/apps/v1/namespaces/monitoring/deployments"
DEVICES = {"vpc.amazonaws.com/efa": 4}


def node(cluster: FakeCluster, name: str, ready: str = "True", gpus: int | None = 8, efa: int = 4) -> None:
    """Add a node to the cluster; without GPUs if `gpus` is None."""
    labels = {} if gpus is None else {"nvidia.com/gpu.present": "true"}
    offers = {} if gpus is None else {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)}
    message = "kubelet is posting ready status" if ready == "True" else "container runtime network not ready"
    status = {"conditions": [{"type": "Ready", "status": ready, "message": message}], "allocatable": offers}
    cluster.add(NODES, {"metadata": {"name": name, "labels": labels}, "status": status})


@pytest.fixture
def healthy(cluster: FakeCluster) -> FakeCluster:
    """Return a cluster without any problem."""
    cluster.objects["/version"] = {"gitVersion": "v1.35.2"}
    node(cluster, "system", gpus=None)
    node(cluster, "gpu-a")
    node(cluster, "gpu-b")
    cluster.add(CLAIMS, {"metadata": {"name": "datasets"}, "status": {"phase": "Bound"}})
    working = {"replicas": 1, "availableReplicas": 1}
    cluster.add(OPERATORS, {"metadata": {"name": "grafana"}, "spec": {"replicas": 1}, "status": working})
    return cluster


@pytest.fixture
def examine(cluster: FakeCluster, context: Callable[..., Context]) -> Callable[..., dict[str, list[Finding]]]:
    """Return a function that runs the checks of stack `aws` on the cluster."""

    def run(*names: str, token: str | None = None) -> dict[str, list[Finding]]:
        config = yaml.safe_dump(cluster.config(token) if token else cluster.config())
        return run_checks(cluster_checks.checks(context("aws"), DEVICES, config, "aws sso login"), *names)

    return run


Examine = Callable[..., dict[str, list[Finding]]]


@pytest.mark.usefixtures("healthy")
def test_a_healthy_cluster_has_no_problem(examine: Examine) -> None:
    found = examine()
    assert {item.status for items in found.values() for item in items} == {"ok"}
    assert one(found, "kubernetes").result.endswith("Kubernetes v1.35.2")
    assert one(found, "nodes").result == "3 nodes ready, 2 of them with GPUs"
    assert one(found, "gpus").result == "8 nvidia.com/gpu on each of 2 nodes"
    assert one(found, "fabric").result == "4 vpc.amazonaws.com/efa on each of 2 nodes"


def test_a_node_that_is_not_ready_is_reported_with_its_reason(healthy: FakeCluster, examine: Examine) -> None:
    node(healthy, "gpu-c", ready="False")
    finding = one(examine("nodes"), "nodes")
    assert (finding.status, finding.result) == ("problem", "gpu-c: container runtime network not ready")
    assert "kubectl describe node gpu-c" in finding.fix


@pytest.mark.parametrize(
    ("gpus", "efa", "check", "result"),
    [(7, 4, "gpus", "gpu-c offers 7 nvidia.com/gpu, its type has 8"), (8, 0, "fabric", "gpu-c offers 0 vpc.amazo")],
)
def test_a_node_with_too_few_devices_is_reported(
    healthy: FakeCluster, examine: Examine, gpus: int, efa: int, check: str, result: str
) -> None:
    node(healthy, "gpu-c", gpus=gpus, efa=efa)
    finding = one(examine(check), check)
    assert finding.status == "problem"
    assert finding.result.startswith(result)


def test_a_pool_scaled_to_zero_is_no_problem(healthy: FakeCluster, examine: Examine) -> None:
    for name in ("gpu-a", "gpu-b"):
        del healthy.objects[f"{NODES}/{name}"]
    found = examine()
    assert "the GPU pool is empty until a pod requests a node" in one(found, "nodes").result
    assert one(found, "gpus").status == "skipped"


def test_a_claim_without_a_volume_is_reported_with_its_last_event(healthy: FakeCluster, examine: Examine) -> None:
    healthy.add(CLAIMS, {"metadata": {"name": "datasets"}, "status": {"phase": "Pending"}})
    for number, text in enumerate(("first", "no volume plugin matched")):
        event = {"metadata": {"name": f"e{number}"}, "type": "Warning", "reason": "FailedBinding", "message": text}
        when = {"involvedObject": {"name": "datasets"}, "lastTimestamp": f"2026-11-21T10:00:0{number}Z"}
        healthy.add(EVENTS, event | when)
    finding = one(examine("storage"), "storage")
    assert (finding.status, finding.result) == ("problem", "claim datasets is Pending: no volume plugin matched")


def test_a_failed_mount_is_reported_while_its_pod_waits(healthy: FakeCluster, examine: Examine) -> None:
    waiting = str(pod(healthy, 0, "Pending")["metadata"]["name"])
    running = str(pod(healthy, 1)["metadata"]["name"])
    for name in (waiting, running):
        event = {"metadata": {"name": f"e-{name}"}, "reason": "FailedMount", "message": "mount.lustre: timed out"}
        healthy.add(EVENTS, event | {"involvedObject": {"name": name}})
    finding = one(examine("storage"), "storage")
    assert finding.result == f"pod {waiting}: mount.lustre: timed out", "the other pod has mounted it since"


def test_an_operator_without_all_its_pods_is_reported(healthy: FakeCluster, examine: Examine) -> None:
    item = {"metadata": {"name": "prometheus"}, "spec": {"replicas": 2}, "status": {"replicas": 2}}
    healthy.add(OPERATORS, item | {"status": {"replicas": 2, "availableReplicas": 1}})
    plugin = {"metadata": {"name": "efa"}, "status": {"desiredNumberScheduled": 2, "numberReady": 0}}
    healthy.add("/apis/apps/v1/namespaces/kube-system/daemonsets", plugin)
    found = examine("operators")["operators"]
    assert [item.result for item in found] == [
        "kube-system/efa: 0 of 2 pods work",
        "monitoring/prometheus: 1 of 2 pods work",
    ]
    assert found[0].fix.startswith("kubectl --namespace kube-system describe daemonset efa")


def test_unknown_credentials_are_a_problem(examine: Examine) -> None:
    finding = one(examine("kubernetes", token="wrong"), "kubernetes")
    assert (finding.status, finding.cause, finding.fix) == ("problem", "api-login", "aws sso login")


def test_a_forbidden_list_is_unknown(healthy: FakeCluster, examine: Examine) -> None:
    healthy.forbidden.add(("GET", "/nodes"))
    finding = one(examine("nodes"), "nodes")
    assert (finding.status, finding.cause) == ("unknown", "api-forbidden")


def test_an_unreachable_server_names_the_setting_that_authorizes_this_machine(
    context: Callable[..., Context], cluster: FakeCluster
) -> None:
    config = cluster.config()
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    found = run_checks(cluster_checks.checks(context("aws"), {}, yaml.safe_dump(config), "login"), "kubernetes")
    assert one(found, "kubernetes").cause == "api-unreachable"
    assert "network.authorized_cidrs" in one(found, "kubernetes").fix


# --- an existing cluster, before `up` ---


@pytest.fixture
def before_up(
    cluster: FakeCluster, context: Callable[..., Context], tmp_path: Path
) -> Callable[..., dict[str, list[Finding]]]:
    """Return a function that runs the checks of stack `local` before `up`."""

    def run(*names: str, **settings: object) -> dict[str, list[Finding]]:
        given = {"kubeconfig.path": str(cluster.kubeconfig(tmp_path))}
        given |= {key.replace("__", "."): value for key, value in settings.items()}  # type: ignore[misc]
        return run_checks(local_doctor.checks(context("local", given)), *names)

    return run


def test_an_existing_cluster_needs_enough_nodes(healthy: FakeCluster, before_up: Examine) -> None:
    assert one(before_up("nodes"), "nodes").status == "ok"
    finding = one(before_up("nodes", gpu__nodes__max=4, gpu__nodes__desired=4), "nodes")
    assert finding.result == "3 of 3 nodes are usable, gpu.nodes.desired is 4"
    assert finding.fix.startswith("pulumi config set --path gpu.nodes.desired 3")


def test_a_host_path_on_several_nodes_is_a_problem(healthy: FakeCluster, before_up: Examine) -> None:
    assert one(before_up("storage"), "storage").cause == "local-host-path"


def test_the_storage_class_must_exist(healthy: FakeCluster, context: Callable[..., Context], tmp_path: Path) -> None:
    classes = "/apis/storage.k8s.io/v1/storageclasses"
    healthy.add(classes, {"metadata": {"name": "slow"}})
    settings = context(
        "local", {"kubeconfig.path": str(healthy.kubeconfig(tmp_path)), "storage": {"storage_class": "fast"}}
    )
    finding = one(run_checks(local_doctor.checks(settings), "storage"), "storage")
    assert (finding.status, finding.result) == ("problem", "no class 'fast'; the cluster has: slow")
    healthy.add(classes, {"metadata": {"name": "fast"}})
    assert one(run_checks(local_doctor.checks(settings), "storage"), "storage").status == "ok"


# --- the job, through `python -m workloads` ---


@pytest.fixture
def up(cluster: FakeCluster, pulumi: Callable[[Mapping[str, object]], Path]) -> FakeCluster:
    """Return the cluster of stack `aws`, which is up with a run `criteo`."""
    described = {"run": "criteo", "launcher": "job", "namespace": "training", "nodes": 2, "kind": "Job"}
    described |= {"name": "criteo-1a2b3c4d", "image": "t:dev", "checkpoints": "s3://b/c"}
    pulumi({"kubeconfig": json.dumps(cluster.config()), "job": described})
    return cluster


def test_a_training_job_has_no_problem(up: FakeCluster) -> None:
    job(up)
    for index in (0, 1):
        name = str(pod(up, index)["metadata"]["name"])
        up.logs[name] = [line("train", **TRAIN)]
    assert job_checks.job("aws") == Finding("ok", "run criteo is running, at step 340")
    assert one({"logs": _listed(job_checks.logs("aws"))}, "logs").status == "ok"


def test_every_waiting_pod_is_reported_with_its_reason(up: FakeCluster) -> None:
    job(up)
    pod(up, 0)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    name = str(pod(up, 1, "Pending", container=waiting)["metadata"]["name"])
    finding = one({"job": _listed(job_checks.job("aws"))}, "job")
    assert finding.status == "problem"
    assert finding.result.startswith(f"pod {name}: ImagePullBackOff")


def test_a_missing_job_is_a_problem(up: FakeCluster) -> None:
    finding = one({"job": _listed(job_checks.job("aws"))}, "job")
    assert finding.status == "problem"
    assert "no job of this run" in finding.result


def test_the_first_error_of_each_log_is_reported(up: FakeCluster) -> None:
    job(up, conditions=[condition("Failed", reason="BackoffLimitExceeded", message="too many")])
    first = str(pod(up, 0)["metadata"]["name"])
    second = str(pod(up, 1)["metadata"]["name"])
    up.logs[first] = [
        "NCCL INFO Bootstrap",
        "Traceback (most recent call last):",
        "  File x",
        "RuntimeError: no",
        "error: b",
    ]
    up.logs[second] = [line("train", **TRAIN), "all is well, no errors here"]
    finding = one({"logs": _listed(job_checks.logs("aws"))}, "logs")
    assert finding.result == f"{first}: RuntimeError: no"
    assert finding.fix.endswith(f"--pod {first}")


def test_locked_memory_has_a_fix_of_its_own(up: FakeCluster) -> None:
    job(up, conditions=[condition("Failed", reason="BackoffLimitExceeded", message="too many")])
    name = str(pod(up, 0)["metadata"]["name"])
    up.logs[name] = ["error: RDMA cannot register memory: got RLIMIT_MEMLOCK 8 MiB, uid 10001, CAP_IPC_LOCK missing"]
    finding = one({"logs": _listed(job_checks.logs("aws"))}, "logs")
    assert finding.fix.startswith("python -m infra up --stack aws, which replaces the nodes or the job")


def _listed(found: Finding | list[Finding]) -> list[Finding]:
    """Return findings as a list."""
    return found if isinstance(found, list) else [found]


def test_the_doctor_only_reads_from_the_cluster(healthy: FakeCluster, examine: Examine) -> None:
    examine()
    assert {verb for verb, _ in healthy.requests} == {"GET"}
    assert PODS in {path for _, path in healthy.requests}
