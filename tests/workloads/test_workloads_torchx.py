"""TorchX: its validator accepts the component, and its scheduler submits exactly the Job of launcher `job`."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cluster_objects import INDEX, JOBS, PODS, condition
from fake_cluster import FakeCluster

from infra import catalog
from infra.contract import GPU_LABEL, GPU_TAINT, Fabric, GpuPool, Mount, Storage
from trainer.config import TrainConfig
from workloads.facts import Facts
from workloads.launchers import job, load
from workloads.launchers.torchx import COMPONENT, SCHEDULER, job_manifest, run_line
from workloads.manifests import build_manifests
from workloads.settings import JobSettings

pytest.importorskip("torchx", reason="TorchX is not installed: make install-test")

from torchx.runner import get_runner
from torchx.schedulers import get_scheduler_factories
from torchx.specs import AppDef, AppState, Role
from torchx.specs.finder import get_component

from workloads.errors import UserError
from workloads.torchx_adapter import app as torchx_app
from workloads.torchx_adapter import scheduler
from workloads.torchx_adapter.command import register

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def facts() -> Facts:
    """Return a job on two A100 nodes with devices, capabilities and host paths, for which TorchX has no fields."""
    instance = catalog.instances()[0]
    pool = GpuPool(
        instance=instance,
        num_nodes_min=0,
        num_nodes_desired=2,
        num_nodes_max=4,
        node_selector=GPU_LABEL,
        tolerations=[GPU_TAINT],
        resource_limits={"nvidia.com/gpu": "8", "example.com/nic": "4", "hugepages-2Mi": "5120Mi", "memory": "1000Gi"},
        shared_memory_gib=64,
    )
    return Facts(
        stack="lab",
        namespace="training",
        labels={"stack": "lab", "owner": "ml-platform"},
        pool=pool,
        fabric=Fabric(
            "ib",
            {"NCCL_DEBUG": "INFO"},
            as_root=True,
            capabilities=["IPC_LOCK"],
            mounts=[Mount("nic", "/nic", "/opt/nic")],
        ),
        storage=Storage("data", "/data", 100, "ReadWriteMany"),
        service_account="trainer",
        annotations={},
        pod_labels={},
        identity_env={"REGION": "x"},
        identity_endpoints=(),
        secret_name=None,
        bucket_uri="s3://b",
        checkpoint_uri="s3://b/runs",
        image="registry.example/trainer@sha256:" + "a" * 64,
        job=JobSettings(launcher="torchx", run="criteo"),
        config=TrainConfig(),
    )


@pytest.fixture
def manifest(facts: Facts) -> dict[str, Any]:
    """Return the Job in the stack's output."""
    return job_manifest(facts, "criteo-config-1")


@pytest.fixture
def file(manifest: dict[str, Any], tmp_path: Path) -> Path:
    """Return a file with the stack's output `job`."""
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"launcher": "torchx", "run": "criteo", "torchx": manifest}))
    return path


@pytest.fixture
def kubernetes(cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> scheduler.IndexedJobScheduler:
    """Return the scheduler for the cluster in $KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
    monkeypatch.delenv("PULUMI_STACK", raising=False)
    return scheduler.create_scheduler("test")


def test_pulumi_creates_the_service_but_not_the_job(facts: Facts) -> None:
    prepared = load("torchx").build(facts, "criteo-config-1")
    assert prepared.job is None
    assert prepared.dependencies == job.build(facts, "criteo-config-1").dependencies


def test_the_stacks_output_contains_the_job_for_torchx(facts: Facts) -> None:
    component = pytest.importorskip("workloads.component", reason="Pulumi is not installed: make install-infra")
    summary = component._summary(facts, build_manifests(facts))
    assert summary["name"] is None
    assert json.loads(json.dumps(summary))["torchx"]["kind"] == "Job"
    assert "criteo-config-" in json.dumps(summary["torchx"]), "the name of this stack's config map"


def test_torchxs_validator_accepts_the_component(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert get_component(COMPONENT).validation_errors == []


def test_a_dry_run_of_the_component_is_the_job_of_launcher_job(
    facts: Facts, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    register()
    with get_runner() as runner:
        planned = runner.dryrun_component(COMPONENT, ["--facts", str(file)], scheduler=SCHEDULER)
    assert planned.request == job.build(facts, "criteo-config-1").job


def test_the_app_contains_the_fields_that_torchx_has(manifest: dict[str, Any]) -> None:
    (role,) = torchx_app.to_app(manifest).roles
    assert (role.num_replicas, role.resource.gpu, role.resource.memMB) == (2, 8, 1_024_000)
    assert role.resource.devices == {"example.com/nic": 4}
    assert role.env["NCCL_DEBUG"] == "INFO"
    assert role.args[0] == "launch"


def test_a_changed_role_gets_a_job_with_another_name(manifest: dict[str, Any]) -> None:
    app = torchx_app.to_app(manifest)
    app.roles[0].env["NCCL_DEBUG"] = "WARN"
    changed = torchx_app.to_job(app)
    name = changed["metadata"]["name"]
    container = changed["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
    assert name != manifest["metadata"]["name"]
    assert f"--rdzv-id={name}" in container["args"]
    assert manifest["metadata"]["name"] not in json.dumps(changed)


def test_torchx_keeps_its_own_schedulers() -> None:
    before = set(get_scheduler_factories()) - {SCHEDULER}
    register()
    assert set(get_scheduler_factories()) == before | {SCHEDULER}
    assert "local_cwd" in before


def test_the_scheduler_runs_describes_lists_logs_and_cancels_a_job(
    cluster: FakeCluster, kubernetes: scheduler.IndexedJobScheduler, manifest: dict[str, Any]
) -> None:
    app = torchx_app.to_app(manifest)
    app_id = kubernetes.schedule(kubernetes.submit_dryrun(app, {}))
    name = manifest["metadata"]["name"]
    assert app_id == f":training:{name}"
    created = cluster.objects[f"{JOBS}/{name}"]
    assert created["spec"] == manifest["spec"]

    described = kubernetes.describe(app_id)
    assert described is not None
    assert described.state == AppState.PENDING
    labels = {**manifest["spec"]["template"]["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
    for index, phase in enumerate(("Running", "Running")):
        pod = {"name": f"{name}-{index}-abc", "labels": {**labels, INDEX["Job"]: str(index)}}
        status = {"phase": phase, "containerStatuses": [{"name": "trainer", "ready": True, "state": {"running": {}}}]}
        cluster.add(PODS, {"metadata": pod, "spec": manifest["spec"]["template"]["spec"], "status": status})
    described = kubernetes.describe(app_id)
    assert described is not None
    assert described.state == AppState.RUNNING
    assert [replica.id for replica in described.roles_statuses[0].replicas] == [0, 1]

    cluster.logs[f"{name}-1-abc"] = ["one", "two", "three"]
    assert list(kubernetes.log_iter(app_id, "trainer", 1, regex="t")) == ["two\n", "three\n"]
    with pytest.raises(UserError, match="trainer/7 has no pod"):
        kubernetes.log_iter(app_id, "trainer", 7)
    with pytest.raises(ValueError, match="streams"):
        kubernetes.log_iter(app_id, "trainer", 0, until=datetime.now(UTC))

    cluster.add("/apis/batch/v1/jobs", {**created, "metadata": {**created["metadata"], "namespace": "training"}})
    created["status"] = {"conditions": [condition("Complete")]}
    assert [item.app_id for item in kubernetes.list()] == [app_id]
    described = kubernetes.describe(app_id)
    assert described is not None
    assert described.state == AppState.SUCCEEDED

    with pytest.raises(UserError, match=r"already exists\. Fix: torchx cancel"):
        kubernetes.schedule(kubernetes.submit_dryrun(app, {}))
    kubernetes.cancel(app_id)
    assert kubernetes.describe(app_id) is None
    kubernetes.cancel(app_id)


def test_another_component_is_refused(kubernetes: scheduler.IndexedJobScheduler) -> None:
    with pytest.raises(UserError, match="got 'echo'; allowed: workloads/launchers"):
        kubernetes.submit_dryrun(AppDef("echo", [Role("echo", "busybox")]), {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Fix: pass one of them"),
        (["--facts", "/nowhere.json"], "pulumi stack output job --json"),
        (["--facts", "OTHER"], "got job.launcher 'pytorchjob'; allowed: torchx"),
    ],
    ids=["nothing", "no file", "another launcher"],
)
def test_a_mistake_on_torchxs_command_line_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"launcher": "pytorchjob"}')
    own = [str(other) if word == "OTHER" else word for word in words]
    line = [*run_line("x").split()[1:-2], *own]
    line.insert(line.index("run") + 1, "--dryrun")
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_launcher_does_not_import_torchx() -> None:
    code = "import sys; import workloads.launchers.torchx; print([m for m in sys.modules if m.startswith('torchx')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "`pulumi up` would need TorchX"
