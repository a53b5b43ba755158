"""`python -m infra doctor`: exit code, table, JSON, invalid settings and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster

from infra import __main__ as program
from infra import clouds
from infra.automation import diagnosis
from infra.clouds.aws import doctor as aws_doctor
from infra.clouds.azure import doctor as azure_doctor
from infra.clouds.gcp import doctor as gcp_doctor
from infra.doctor import command, tools
from infra.findings.model import Context, Finding, QueryFailedError, ok

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "torchrec-cloud"


@pytest.fixture
def folder(tmp_path: Path, cluster: FakeCluster) -> Callable[..., Path]:
    """Return a function that writes a project with stack `local` on the fake cluster, with given settings."""

    def write(**settings: object) -> Path:
        (tmp_path / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text())
        config = {
            f"{PROJECT}:cloud": "local",
            f"{PROJECT}:kubeconfig": {"path": str(cluster.kubeconfig(tmp_path))},
            f"{PROJECT}:storage": {"host_path": "/srv"},
            f"{PROJECT}:job": {"image": "trainer:dev"},
            f"{PROJECT}:gpu": {"nodes": {"min": 0, "desired": 1, "max": 1}},
            f"{PROJECT}:tags": {"owner": "me", "cost_centre": "tests"},
        } | {f"{PROJECT}:{key}": value for key, value in settings.items()}
        (tmp_path / "Pulumi.local.yaml").write_text(yaml.safe_dump({"config": config}))
        return tmp_path

    return write


@pytest.fixture
def one_node(cluster: FakeCluster) -> FakeCluster:
    """Return a cluster with one ready node."""
    cluster.objects["/version"] = {"gitVersion": "v1.35.2"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.add("/api/v1/nodes", {"metadata": {"name": "laptop"}, "status": ready})
    return cluster


Doctor = Callable[..., tuple[int, Any]]


@pytest.fixture
def doctor(
    folder: Callable[..., Path],
    pulumi: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Doctor:
    """Return a function that runs the doctor on a stack that is not up: exit code and findings or output."""

    def run(*words: str, **settings: object) -> tuple[int, Any]:
        pulumi(None)
        monkeypatch.setattr(tools, "installed_packages", lambda: ok("all match"))
        code = program.main(["doctor", "--stack", "local", "--cwd", str(folder(**settings)), *words])
        output = capsys.readouterr()
        return code, json.loads(output.out) if "--json" in words else output

    return run


@pytest.mark.usefixtures("one_node")
def test_a_stack_without_problems_exits_with_0(doctor: Doctor) -> None:
    code, output = doctor("--json")
    assert not [row for row in output["checks"] if row["status"] in ("problem", "unknown")]
    assert (code, output["exit_code"], output["stack"]) == (0, 0, "local")
    assert {row["check"] for row in output["checks"]} >= {"pulumi", "settings", "state", "budget", "cluster", "nodes"}


@pytest.mark.usefixtures("one_node")
def test_a_problem_exits_with_1_and_is_in_the_table_with_its_fix(doctor: Doctor) -> None:
    code, output = doctor(gpu={"nodes": {"desired": 2, "max": 2}})
    assert code == 1
    row = next(text for text in output.out.splitlines() if text.startswith("nodes"))
    assert "PROBLEM" in row
    assert "1 of 1 nodes are usable" in row
    assert "pulumi config set --path gpu.nodes.desired 1" in row
    assert output.out.splitlines()[-1].startswith("stack local: 1 to fix")
    assert "checks ..." in output.err, "progress goes to stderr"


@pytest.mark.parametrize(
    ("states", "code"),
    [(["ok", "skipped"], 0), (["ok", "unknown"], 2), (["unknown", "problem"], 1)],
    ids=["no problem", "a check that could not run", "a problem counts more"],
)
def test_the_exit_code_separates_success_a_problem_and_a_check_that_could_not_run(states: list[Any], code: int) -> None:
    assert command.exit_code([Finding(state, "") for state in states]) == code


def test_invalid_settings_are_all_reported_before_any_other_check(doctor: Doctor) -> None:
    code, output = doctor("--json", gpu={"nodes": {"desired": 3, "max": 1}}, namespace="Not Allowed")
    rows = [row for row in output["checks"] if row["check"] == "settings"]
    assert code == 1
    assert any(row["result"].startswith("gpu.nodes.desired: more than gpu.nodes.max (1): got 3") for row in rows)
    assert any("namespace" in row["result"] for row in rows)
    assert all(row["fix"].startswith("pulumi config set") for row in rows)
    assert not [row for row in output["checks"] if row["check"] == "nodes"], "a check used invalid settings"


def test_an_exceeded_budget_is_a_problem_and_the_other_checks_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pulumi: Callable[..., Path]
) -> None:
    (tmp_path / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text())
    text = (ROOT / "Pulumi.aws.yaml").read_text() + "  torchrec-cloud:budget:\n    max_usd_per_hour: 10\n"
    text += "  torchrec-cloud:network:\n    api_access: inside\n"
    (tmp_path / "Pulumi.aws.yaml").write_text(text)
    monkeypatch.setattr(aws_doctor, "checks", lambda context: [])
    pulumi(None)
    found = {item.check: item for item in command.examine("aws", tmp_path)}
    assert found["settings"].status == "ok"
    assert (found["budget"].status, found["budget"].cause) == ("problem", "budget")
    assert "44.9" in found["budget"].result, "two p4d.24xlarge and the rest of the stack"
    assert "image" in found


def test_a_stack_without_a_way_to_its_api_is_a_problem_and_the_other_checks_still_run(
    monkeypatch: pytest.MonkeyPatch, pulumi: Callable[..., Path]
) -> None:
    monkeypatch.setattr(aws_doctor, "checks", lambda context: [])
    pulumi(None)
    found = {item.check: item for item in command.examine("aws")}
    assert found["settings"].status == "problem"
    assert found["settings"].fix.startswith("pulumi config set --stack aws --path 'network.authorized_cidrs[0]'")
    assert "image" in found


def test_a_stack_without_a_file_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "--stack", "nowhere"]) == 2
    assert program.main(["doctor"]) == 2
    output = capsys.readouterr().err.splitlines()
    assert output[0].startswith("error: no file Pulumi.nowhere.yaml; stacks with a file: aws, azure, gcp, local")
    assert output[1].startswith("error: --stack is missing")


@pytest.mark.parametrize(
    ("stack", "module", "package"),
    [("aws", aws_doctor, "boto3"), ("azure", azure_doctor, "azure"), ("gcp", gcp_doctor, "google")],
)
def test_a_missing_client_is_reported_with_the_command_that_installs_it(
    context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch, stack: str, module: Any, package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in (package, "google", "botocore")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("boto3", "botocore", "azure.identity", "azure.core", "google.auth", "google"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("ARM_SUBSCRIPTION_ID", "x")
    from doctor_answers import one, run_checks

    finding = one(run_checks(module.checks(context(stack)), "credentials"), "credentials")
    assert (finding.status, finding.cause, finding.fix) == ("unknown", "client-missing", "make install-doctor")


def test_a_cloud_without_its_own_checks_gets_the_shared_ones(
    doctor: Doctor, one_node: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clouds.Cloud, "doctor", None)
    code, output = doctor("--json")
    assert code == 0
    assert {row["check"] for row in output["checks"]} >= {"pulumi", "budget", "image"}


def test_a_stack_that_is_up_gets_checks_of_its_cluster_and_job(
    one_node: FakeCluster,
    folder: Callable[..., Path],
    pulumi: Callable[[Mapping[str, object]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = {"run": "criteo", "launcher": "job", "namespace": "training", "nodes": 1, "kind": "Job"}
    described |= {"name": "criteo-1", "image": "t:dev", "checkpoints": "file:///c"}
    cost = {"on_demand": 0.0, "spot": None, "on_demand_at_max": 0.0, "spot_at_max": None}
    outputs = {"account": "a", "cluster_name": "c", "kubeconfig": json.dumps(one_node.config()), "job": described}
    outputs |= {"bucket_uri": "file:///b", "checkpoint_uri": "file:///c", "hourly_cost_usd": cost, "next_steps": []}
    pulumi(outputs)
    monkeypatch.setattr(tools, "installed_packages", lambda: ok("all match"))
    found = {item.check: item for item in command.examine("local", folder())}
    assert found["state"].result == "up in a, cluster c"
    assert found["kubernetes"].status == "ok"
    assert found["storage"].cause == "storage-unbound", "the fake cluster has no claim"
    assert found["job"].cause == "job", "and no job"


def test_ctrl_c_exits_at_once_with_one_line(
    folder: Callable[..., Path], pulumi: Callable[..., Path], tmp_path: Path
) -> None:
    bin_folder = pulumi(None)
    engine = bin_folder / "pulumi"
    engine.write_text(f"#!/bin/sh\ntouch {bin_folder}/started\nexec sleep 20\n")
    words = [sys.executable, "-m", "infra", "doctor", "--stack", "local", "--cwd", str(folder())]
    # Files instead of pipes, which the engine's process would keep open.
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(words, cwd=ROOT, stdout=stdout, stderr=stderr)
    try:
        while not (bin_folder / "started").exists():
            assert process.poll() is None, err.read_text()
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=15)
    finally:
        process.kill()
    assert code == 130
    assert out.read_text() == ""
    assert err.read_text().splitlines()[-1] == "cancelled"
    assert "Traceback" not in err.read_text()


def test_an_unreadable_state_keeps_the_fix_of_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class LockedStack:
        def __init__(self, *_: object, **__: object) -> None:
            self.attempt = diagnosis.Attempt("outputs", "aws")

        def outputs_if_up(self) -> None:
            raise diagnosis._explain_backend("passphrase must be set", self.attempt) or AssertionError

    monkeypatch.setattr(command, "LiveStack", LockedStack)
    with pytest.raises(QueryFailedError) as failed:
        command._StackState("aws", tmp_path).check()
    assert failed.value.finding.fix.startswith("export PULUMI_CONFIG_PASSPHRASE=")
