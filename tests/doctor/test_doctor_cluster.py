"""What the doctor says about a cluster that is up, from an API server on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from cluster_objects import NODES, PODS, TRAIN, condition, job, line, pod
from doctor_answers import asked, one
from fake_cluster import FakeCluster

from infra.clouds.local import doctor as local_doctor
from infra.doctor import cluster as checks_of
from infra.doctor import job as job_checks
from infra.findings.model import Context, Finding

CLAIMS = "/api/v1/namespaces/training/persistentvolumeclaims"
EVENTS = "/api/v1/namespaces/training/events"
OPERATORS = "/apis/apps/v1/namespaces/monitoring/deployments"
DEVICES = {"vpc.amazonaws.com/efa": 4}


def node(cluster: FakeCluster, name: str, ready: str = "True", gpus: int | None = 8, efa: int = 4) -> None:
    """A node as the API server holds it; one without GPUs where `gpus` is None."""
    labels = {} if gpus is None else {"nvidia.com/gpu.present": "true"}
    offers = {} if gpus is None else {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)}
    message = "kubelet is posting ready status" if ready == "True" else "container runtime network not ready"
    status = {"conditions": [{"type": "Ready", "status": ready, "message": message}], "allocatable": offers}
    cluster.add(NODES, {"metadata": {"name": name, "labels": labels}, "status": status})


@pytest.fixture
def well(cluster: FakeCluster) -> FakeCluster:
    """A cluster in which everything is in order."""
    cluster.objects["/version"] = {"gitVersion": "v1.35.2"}
    node(cluster, "system", gpus=None)
    node(cluster, "gpu-a")
    node(cluster, "gpu-b")
    cluster.add(CLAIMS, {"metadata": {"name": "datasets"}, "status": {"phase": "Bound"}})
    working = {"replicas": 1, "availableReplicas": 1}
    cluster.add(OPERATORS, {"metadata": {"name": "grafana"}, "spec": {"replicas": 1}, "status": working})
    return cluster


@pytest.fixture
def look(cluster: FakeCluster, context: Callable[..., Context]) -> Callable[..., dict[str, list[Finding]]]:
    """Findings of the checks of stack `aws` on that cluster."""

    def run(*names: str, token: str | None = None) -> dict[str, list[Finding]]:
        config = yaml.safe_dump(cluster.config(token) if token else cluster.config())
        return asked(checks_of.checks(context("aws"), DEVICES, config, "aws sso login"), *names)

    return run


Look = Callable[..., dict[str, list[Finding]]]


@pytest.mark.usefixtures("well")
def test_a_cluster_in_which_all_is_well_is_fine(look: Look) -> None:
    found = look()
    assert {item.status for items in found.values() for item in items} == {"ok"}
    assert one(found, "kubernetes").result.endswith("Kubernetes v1.35.2")
    assert one(found, "nodes").result == "3 nodes ready, 2 of them with GPUs"
    assert one(found, "gpus").result == "8 nvidia.com/gpu on each of 2 nodes"
    assert one(found, "fabric").result == "4 vpc.amazonaws.com/efa on each of 2 nodes"


def test_a_node_that_is_not_ready_is_named_with_its_reason(well: FakeCluster, look: Look) -> None:
    node(well, "gpu-c", ready="False")
    finding = one(look("nodes"), "nodes")
    assert (finding.status, finding.result) == ("problem", "gpu-c: container runtime network not ready")
    assert "kubectl describe node gpu-c" in finding.fix


@pytest.mark.parametrize(
    ("gpus", "efa", "check", "told"),
    [(7, 4, "gpus", "gpu-c offers 7 nvidia.com/gpu, its type has 8"), (8, 0, "fabric", "gpu-c offers 0 vpc.amazo")],
)
def test_a_node_that_advertises_too_little_is_named(
    well: FakeCluster, look: Look, gpus: int, efa: int, check: str, told: str
) -> None:
    node(well, "gpu-c", gpus=gpus, efa=efa)
    finding = one(look(check), check)
    assert finding.status == "problem"
    assert finding.result.startswith(told)


def test_a_pool_that_was_scaled_to_zero_is_no_problem(well: FakeCluster, look: Look) -> None:
    for name in ("gpu-a", "gpu-b"):
        del well.objects[f"{NODES}/{name}"]
    found = look()
    assert "the GPU pool is empty until a pod wants a node" in one(found, "nodes").result
    assert one(found, "gpus").status == "skipped"


def test_a_claim_without_a_volume_is_told_with_the_last_event(well: FakeCluster, look: Look) -> None:
    well.add(CLAIMS, {"metadata": {"name": "datasets"}, "status": {"phase": "Pending"}})
    for number, text in enumerate(("first", "no volume plugin matched")):
        event = {"metadata": {"name": f"e{number}"}, "type": "Warning", "reason": "FailedBinding", "message": text}
        when = {"involvedObject": {"name": "datasets"}, "lastTimestamp": f"2026-11-21T10:00:0{number}Z"}
        well.add(EVENTS, event | when)
    finding = one(look("storage"), "storage")
    assert (finding.status, finding.result) == ("problem", "claim datasets is Pending: no volume plugin matched")


def test_a_mount_that_fails_is_told_while_its_pod_waits(well: FakeCluster, look: Look) -> None:
    waiting = str(pod(well, 0, "Pending")["metadata"]["name"])
    running = str(pod(well, 1)["metadata"]["name"])
    for name in (waiting, running):
        event = {"metadata": {"name": f"e-{name}"}, "reason": "FailedMount", "message": "mount.lustre: timed out"}
        well.add(EVENTS, event | {"involvedObject": {"name": name}})
    finding = one(look("storage"), "storage")
    assert finding.result == f"pod {waiting}: mount.lustre: timed out", "the other one has mounted it since"


def test_an_operator_whose_pods_do_not_work_is_named(well: FakeCluster, look: Look) -> None:
    item = {"metadata": {"name": "prometheus"}, "spec": {"replicas": 2}, "status": {"replicas": 2}}
    well.add(OPERATORS, item | {"status": {"replicas": 2, "availableReplicas": 1}})
    plugin = {"metadata": {"name": "efa"}, "status": {"desiredNumberScheduled": 2, "numberReady": 0}}
    well.add("/apis/apps/v1/namespaces/kube-system/daemonsets", plugin)
    found = look("operators")["operators"]
    assert [item.result for item in found] == [
        "kube-system/efa: 0 of 2 pods work",
        "monitoring/prometheus: 1 of 2 pods work",
    ]
    assert found[0].fix.startswith("kubectl --namespace kube-system describe daemonset efa")


def test_credentials_that_the_server_does_not_know_are_a_problem_and_end_the_questions(look: Look) -> None:
    finding = one(look("kubernetes", token="wrong"), "kubernetes")
    assert (finding.status, finding.cause, finding.fix) == ("problem", "api-login", "aws sso login")


def test_what_may_not_be_listed_is_not_known(well: FakeCluster, look: Look) -> None:
    well.forbidden.add(("GET", "/nodes"))
    finding = one(look("nodes"), "nodes")
    assert (finding.status, finding.cause) == ("unknown", "api-forbidden")


def test_a_server_that_does_not_answer_names_the_setting_that_lets_this_machine_in(
    context: Callable[..., Context], cluster: FakeCluster
) -> None:
    config = cluster.config()
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    found = asked(checks_of.checks(context("aws"), {}, yaml.safe_dump(config), "login"), "kubernetes")
    assert one(found, "kubernetes").cause == "api-unreachable"
    assert "network.authorized_cidrs" in one(found, "kubernetes").fix


# --- a cluster that exists, before `up` ---


@pytest.fixture
def before_up(
    cluster: FakeCluster, context: Callable[..., Context], tmp_path: Path
) -> Callable[..., dict[str, list[Finding]]]:
    """Findings of stack `local` on that cluster, which need not be up."""

    def run(*names: str, **settings: object) -> dict[str, list[Finding]]:
        given = {"kubeconfig.path": str(cluster.kubeconfig(tmp_path))}
        given |= {key.replace("__", "."): value for key, value in settings.items()}  # type: ignore[misc]
        return asked(local_doctor.checks(context("local", given)), *names)

    return run


def test_a_cluster_that_exists_must_have_nodes_enough(well: FakeCluster, before_up: Look) -> None:
    assert one(before_up("nodes"), "nodes").status == "ok"
    finding = one(before_up("nodes", gpu__nodes__max=4, gpu__nodes__desired=4), "nodes")
    assert finding.result == "3 of 3 nodes are usable, gpu.nodes.desired is 4"
    assert finding.fix.startswith("pulumi config set --path gpu.nodes.desired 3")


def test_a_folder_of_a_node_is_shared_with_no_other(well: FakeCluster, before_up: Look) -> None:
    assert one(before_up("storage"), "storage").cause == "local-host-path"


def test_a_storage_class_must_be_there(well: FakeCluster, context: Callable[..., Context], tmp_path: Path) -> None:
    classes = "/apis/storage.k8s.io/v1/storageclasses"
    well.add(classes, {"metadata": {"name": "slow"}})
    settings = context(
        "local", {"kubeconfig.path": str(well.kubeconfig(tmp_path)), "storage": {"storage_class": "fast"}}
    )
    finding = one(asked(local_doctor.checks(settings), "storage"), "storage")
    assert (finding.status, finding.result) == ("problem", "no class 'fast'; the cluster has: slow")
    well.add(classes, {"metadata": {"name": "fast"}})
    assert one(asked(local_doctor.checks(settings), "storage"), "storage").status == "ok"


# --- the job, through `python -m workloads` ---


@pytest.fixture
def up(cluster: FakeCluster, pulumi: Callable[[Mapping[str, object]], Path]) -> FakeCluster:
    """Stack `aws`, up with a run `criteo` on that cluster."""
    described = {"run": "criteo", "launcher": "job", "namespace": "training", "nodes": 2, "kind": "Job"}
    described |= {"name": "criteo-1a2b3c4d", "image": "t:dev", "checkpoints": "s3://b/c"}
    pulumi({"kubeconfig": json.dumps(cluster.config()), "job": described})
    return cluster


def test_a_job_that_trains_is_fine(up: FakeCluster) -> None:
    job(up)
    for index in (0, 1):
        name = str(pod(up, index)["metadata"]["name"])
        up.logs[name] = [line("train", **TRAIN)]
    assert job_checks.job("aws") == Finding("ok", "run criteo is running, at step 340")
    assert one({"logs": _listed(job_checks.logs("aws"))}, "logs").status == "ok"


def test_every_pod_that_waits_is_told_with_its_reason(up: FakeCluster) -> None:
    job(up)
    pod(up, 0)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    name = str(pod(up, 1, "Pending", container=waiting)["metadata"]["name"])
    finding = one({"job": _listed(job_checks.job("aws"))}, "job")
    assert finding.status == "problem"
    assert finding.result.startswith(f"pod {name}: ImagePullBackOff")


def test_a_job_that_is_gone_is_a_problem(up: FakeCluster) -> None:
    finding = one({"job": _listed(job_checks.job("aws"))}, "job")
    assert finding.status == "problem"
    assert "no job of this run" in finding.result


def test_the_first_error_of_each_log_is_told(up: FakeCluster) -> None:
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


def _listed(found: Finding | list[Finding]) -> list[Finding]:
    return found if isinstance(found, list) else [found]


def test_nothing_here_writes_to_the_cluster(well: FakeCluster, look: Look) -> None:
    look()
    assert {verb for verb, _ in well.requests} == {"GET"}
    assert PODS in {path for _, path in well.requests}
