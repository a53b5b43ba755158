"""`python -m workloads status`: the states of jobs and pods, their explanations, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_objects import (
    DEPLOYMENTS,
    JOBS,
    LABELS,
    NAME,
    NAMESPACE,
    TRAIN,
    WORKLOADS,
    condition,
    event,
    job,
    line,
    node,
    pod,
    unscheduled,
)
from fake_cluster import TOKEN, FakeCluster
from loopback import free_port

from infra.kube_api import KubeApi
from workloads.__main__ import main
from workloads.cli import watch
from workloads.runs import diagnosis
from workloads.runs.run import Run
from workloads.runs.snapshot import take_snapshot

Command = Callable[..., int]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob", "TrainJob"])
def test_a_running_job_of_each_kind_is_shown_with_its_pods(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    job(cluster, kind)
    pod(cluster, 1, kind=kind)
    pod(cluster, 0, kind=kind)
    cluster.logs[f"{NAME}-0-x0y"] = [line("train", **TRAIN), line("checkpoint", step=300, path="s3://b/step_300")]
    assert command("status") == 0
    shown = capsys.readouterr().out
    assert f"run criteo in training: running, {kind} {NAME}" in shown
    assert "2/2 pods ready" in shown
    assert shown.index("gpu-0") < shown.index("gpu-1"), "pods are ordered by index"
    assert "step 340" in shown
    assert "s3://b/step_300" in shown, "the last checkpoint"


@pytest.mark.parametrize(
    ("conditions", "state", "code"),
    [
        ([condition("Complete")], "succeeded", 0),
        ([condition("Succeeded")], "succeeded", 0),
        ([condition("Failed", reason="FailedIndexes", message="Job has failed indexes")], "failed", 1),
    ],
    ids=["complete", "succeeded", "failed"],
)
def test_the_exit_code_is_1_for_a_failed_run(
    cluster: FakeCluster,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    conditions: list[object],
    state: str,
    code: int,
) -> None:
    job(cluster, conditions=conditions)
    assert command("status", "--json") == code
    assert json.loads(capsys.readouterr().out)["state"] == state


def test_a_run_without_a_job_is_shown_with_the_command_that_starts_it(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("status") == 1
    assert "absent" in (shown := capsys.readouterr().out)
    assert "`pulumi up` starts it" in shown


def explain_pods(cluster: FakeCluster, tmp_path: Path) -> list[str | None]:
    """Return the explanation of each pod."""
    api = KubeApi.from_file(str(cluster.kubeconfig(tmp_path)), None)
    return [item.why for item in take_snapshot(Run(api, NAMESPACE, "criteo")).pods]


def test_too_few_gpu_nodes_are_shown_with_the_number_needed(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=3)
    for name in ("gpu-0", "gpu-1"):
        node(cluster, name)
    node(cluster, "system", gpus=0)
    pod(cluster, 0)
    pod(cluster, 1)
    message = (
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No victims."
    )
    pod(cluster, 2, "Pending", **unscheduled(message))
    assert explain_pods(cluster, tmp_path)[2] == "Insufficient nvidia.com/gpu: 2 nodes have 8 GPUs, 3 are needed"


def test_without_permission_to_list_nodes_the_schedulers_reason_is_shown(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, "Pending", **unscheduled("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."))
    cluster.forbidden.add(("GET", "/nodes"))
    cluster.forbidden.add(("GET", "/events"))
    assert explain_pods(cluster, tmp_path) == [
        "Insufficient nvidia.com/gpu: 2 nodes with too little of it free, the pod requests 8"
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "0/2 nodes are available: 2 node(s) had untolerated taint {sku: gpu}.",
            "2 nodes: taint sku=gpu, which the job does not tolerate",
        ),
        (
            "0/2 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 1 node(s) didn't "
            "match Pod's node affinity/selector. preemption: 0/2 nodes are available: 2 Preemption is not helpful.",
            "1 node: taint nvidia.com/gpu=present, which the job does not tolerate; "
            "1 node: without the labels that the pod selects (nvidia.com/gpu.present=true)",
        ),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "unbound claim data: pod has unbound immediate PersistentVolumeClaims",
        ),
        ('persistentvolumeclaim "data" not found', 'unbound claim data: persistentvolumeclaim "data" not found'),
        (
            "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.",
            "2 nodes: used by another training pod, and each training pod needs a whole node",
        ),
        ("no nodes available to schedule pods", "the cluster has no nodes"),
    ],
    ids=["taint", "taint and selector", "unbound claim", "missing claim", "anti-affinity", "no nodes"],
)
def test_a_message_of_the_scheduler_is_explained(
    cluster: FakeCluster, tmp_path: Path, message: str, words: str
) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, "Pending", **unscheduled(message))
    assert explain_pods(cluster, tmp_path) == [words]


def test_the_autoscalers_reaction_is_shown_after_the_schedulers_reason(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    waiting = pod(cluster, 0, "Pending", **unscheduled("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."))
    event(cluster, waiting["metadata"]["name"], "TriggeredScaleUp", "pod triggered scale-up", "Normal")
    assert explain_pods(cluster, tmp_path)[0].endswith("1 is needed; the autoscaler is adding nodes")


@pytest.mark.parametrize(
    ("phase", "container", "words"),
    [
        (
            "Pending",
            {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}},
            "ErrImagePull: image registry.example/trainer@sha256:abc cannot be pulled: manifest unknown",
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            "OOMKilled: trainer used memory over its limit of 64Gi. Fix: raise job.memory_gib, or lower the batch size",
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 2, "message": "starting\nerror: --train.steps: allowed: 1 or more\nend"}},
            "exit code 2, a mistake in the settings: --train.steps: allowed: 1 or more",
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 1, "message": line("train", step=7)}},
            "exit code 1: last reported train at step 7",
        ),
        (
            "Running",
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
                "lastState": {"terminated": {"exitCode": 1, "message": "a\nRuntimeError: NCCL timeout\n"}},
            },
            "CrashLoopBackOff: exit code 1: RuntimeError: NCCL timeout",
        ),
    ],
    ids=["image", "memory", "mistake", "last report", "crash loop"],
)
def test_a_pod_that_ended_or_cannot_start_is_explained(
    cluster: FakeCluster, tmp_path: Path, phase: str, container: dict[str, object], words: str
) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, phase, container=container)
    assert explain_pods(cluster, tmp_path) == [words]


def test_a_lost_node_takes_precedence_over_the_exit_code_that_it_caused(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    lost = condition(
        "DisruptionTarget", reason="DeletionByTaintManager", message="Taint manager: deleting due to NoExecute"
    )
    pod(cluster, 0, "Failed", container={"terminated": {"exitCode": 143}}, conditions=[lost])
    assert explain_pods(cluster, tmp_path) == ["DeletionByTaintManager: Taint manager: deleting due to NoExecute"]


def test_an_image_pull_back_off_is_shown_with_the_registrys_message(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    waiting = pod(cluster, 0, "Pending", container={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}})
    event(cluster, waiting["metadata"]["name"], "Failed", "401 unauthorized")
    assert explain_pods(cluster, tmp_path)[0].endswith("cannot be pulled: 401 unauthorized")


def test_the_newest_pod_of_an_index_is_shown_and_its_predecessors_are_restarts(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, "Failed", name="old", container={"terminated": {"exitCode": 1}}, made="2026-11-21T09:00:00Z")
    pod(cluster, 0, name="new")
    (only,) = take_snapshot(Run(KubeApi.from_file(str(cluster.kubeconfig(tmp_path)), None), NAMESPACE, "criteo")).pods
    assert (only.name, only.restarts, only.why) == ("new", 1, None)


def test_a_queued_job_is_shown_with_kueues_message(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = job(cluster, suspend=True)
    queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "training"
    quota = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for nvidia.com/gpu"}
    owner = {"kind": "Job", "name": NAME, "uid": "1"}
    workload = {
        "metadata": {"name": "w", "ownerReferences": [owner]},
        "spec": {"active": True},
        "status": {"conditions": [quota]},
    }
    cluster.add(WORKLOADS, workload)
    assert command("status") == 0
    shown = capsys.readouterr().out
    assert "queued" in shown
    assert "insufficient unused quota for nvidia.com/gpu" in shown


def test_a_failed_netcheck_explains_why_there_is_no_job(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"app.kubernetes.io/component": "netcheck", "app.kubernetes.io/part-of": "torchrec-cloud"}
    ended = {"metadata": {"name": "netcheck-1", "labels": labels}, "spec": {}}
    cluster.add(JOBS, ended | {"status": {"conditions": [condition("Failed", message="too slow")]}})
    assert command("status") == 0
    shown = capsys.readouterr().out
    assert "waiting" in shown.splitlines()[0]
    assert "netcheck is not finished (netcheck-1: failed: too slow)" in shown


def test_missing_pods_are_explained_by_the_events_of_the_job(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster)
    event(cluster, NAME, "FailedCreate", "pods is forbidden: exceeded quota: training")
    assert command("status") == 0
    assert "FailedCreate: pods is forbidden: exceeded quota: training" in capsys.readouterr().out


def test_an_operator_that_does_not_process_the_job_is_named(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster, "PyTorchJob")
    assert command("status") == 0
    assert "no operator has processed this PyTorchJob" in capsys.readouterr().out


def test_companions_are_listed_with_their_state(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"app.kubernetes.io/component": "tensorboard", "app.kubernetes.io/part-of": "torchrec-cloud"}
    cluster.add(
        DEPLOYMENTS, {"metadata": {"name": "tensorboard", "labels": labels}, "status": {"availableReplicas": 1}}
    )
    job(cluster)
    command("status")
    assert "tensorboard: running" in capsys.readouterr().out


# --- watching ---


def test_watch_prints_changes_only_and_ends_with_the_run(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, sleeps = job(cluster, nodes=1), []
    pod(cluster, 0)

    def complete_later(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            manifest["status"]["conditions"] = [condition("Complete")]

    monkeypatch.setattr(watch.View.watch, "__kwdefaults__", {"sleep": complete_later})
    cluster.objects[f"{JOBS}/{NAME}"]["metadata"].pop("creationTimestamp")
    cluster.objects[f"/api/v1/namespaces/training/pods/{NAME}-0-x0y"]["metadata"].pop("creationTimestamp")
    assert command("status", "--watch", "--json", "--every", "7") == 0
    states = [json.loads(text)["state"] for text in capsys.readouterr().out.splitlines()]
    assert states == ["running", "succeeded"], "an unchanged state is not printed again"
    assert sleeps == [7, 7, 7]


def test_ctrl_c_ends_a_watch_without_a_stack_trace(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    job(cluster, nodes=1)
    monkeypatch.setattr(watch.View.watch, "__kwdefaults__", {"sleep": interrupt})
    assert command("status", "--watch") == 0
    assert capsys.readouterr().err == ""


# --- errors ---


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Return a function that runs a wrong command, checks its exit code 2 and returns its one line."""

    def run(words: list[str]) -> str:
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        assert TOKEN not in printed.err
        return printed.err

    return run


def where(path: Path | str) -> list[str]:
    """Return the options that select the run in a kubeconfig."""
    return ["--kubeconfig", str(path), "--namespace", NAMESPACE, "--run", "criteo"]


def test_refused_credentials_are_an_error_without_the_token(
    cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]
) -> None:
    message = refused(["status", *where(cluster.kubeconfig(tmp_path, token="wrong"))])
    assert "does not accept these credentials (401 Unauthorized)" in message
    assert "wrong" not in message


def test_a_missing_permission_is_an_error_with_a_fix(
    cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]
) -> None:
    cluster.forbidden.add(("GET", "/pods"))
    message = refused(["status", *where(cluster.kubeconfig(tmp_path))])
    assert 'User "me" cannot get resource "pods" (403). Fix: ask the cluster\'s owner for a role' in message


def test_a_cluster_that_does_not_answer_is_an_error(
    cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = cluster.kubeconfig(tmp_path)
    path.write_text(path.read_text().replace(cluster.url, f"http://127.0.0.1:{free_port()}"))
    assert "does not answer" in (message := refused(["status", *where(path)]))
    assert "refused" in message
    assert "object at 0x" not in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--stack S, or --kubeconfig FILE --namespace N --run R"),
        (["--kubeconfig", "x"], "--kubeconfig needs --namespace and --run"),
        (["--kubeconfig", "x", "--stack", "aws"], "pass one of them"),
        (where("/nowhere/config"), "/nowhere/config"),
        (["--every", "0"], "got 0; allowed: more than 0"),
    ],
    ids=["no option", "one of three", "both", "no file", "no interval"],
)
def test_missing_or_conflicting_options_are_an_error(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(["status", *words])


def test_an_unknown_context_is_refused_with_the_allowed_ones(
    cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]
) -> None:
    message = refused(["status", *where(cluster.kubeconfig(tmp_path)), "--context", "lab"])
    assert "no such context: got 'lab'; allowed: here" in message


# --- through a stack ---


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """Return a function that puts a fake `pulumi` on PATH, with an output and an exit code."""

    def put(output: str, code: int = 0) -> Path:
        (tmp_path / "output").write_text(output)
        program = tmp_path / "pulumi"
        stream = ">&2 " if code else ""
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
            '[ "$2" = ls ] && echo \'[{"name":"aws"},{"name":"lab"}]\' && exit 0\n'
            f"{stream}cat {tmp_path}/output\nexit {code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "calls"

    return put


def outputs(cluster: FakeCluster, **job_output: object) -> str:
    """Return the outputs of a stack whose run is on the cluster."""
    summary = {
        "run": "criteo", "launcher": "job", "namespace": NAMESPACE, "nodes": 2, "kind": "Job", "name": NAME,
        "image": "trainer:dev", "checkpoints": "file:///data/criteo/checkpoints",
    }  # fmt: skip
    return json.dumps({"kubeconfig": json.dumps(cluster.config()), "job": summary | job_output})


def test_the_run_of_a_stack_is_found_through_its_outputs(
    cluster: FakeCluster,
    pulumi: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    calls = pulumi(outputs(cluster))
    job(cluster)
    pod(cluster, 0)
    pod(cluster, 1)
    assert main(["status", "--stack", "lab"]) == 0
    shown = capsys.readouterr().out
    assert "running" in shown
    assert "file:///data/criteo/checkpoints" in shown
    assert "stack output --json --show-secrets --stack lab" in calls.read_text()
    assert not any(TOKEN in path.read_text() for path in temporary.rglob("*") if path.is_file()), (
        "the kubeconfig is not written to disk"
    )


def test_a_job_without_a_name_in_the_outputs_is_found_by_its_label(
    cluster: FakeCluster, pulumi: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pulumi(outputs(cluster, kind=None, name=None, launcher="torchx"))
    job(cluster, conditions=[condition("Complete")])
    assert main(["status", "--stack", "lab"]) == 0
    assert "succeeded" in capsys.readouterr().out


def test_the_stacks_own_job_is_shown_and_not_a_replaced_one(cluster: FakeCluster, pulumi: Callable[..., Path]) -> None:
    pulumi(outputs(cluster))
    job(cluster)
    other = {"metadata": {"name": "criteo-other", "labels": dict(LABELS), "creationTimestamp": "2026-11-21T12:00:00Z"}}
    cluster.add(
        JOBS, other | {"spec": {"parallelism": 1}, "status": {"conditions": [condition("Failed", message="x")]}}
    )
    assert main(["status", "--stack", "lab"]) == 0, "the stack's own job runs"


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("error: no stack named 'lba' found", 255, "got 'lba'; allowed: aws, lab. Fix: pulumi stack init lba"),
        ("error: PULUMI_ACCESS_TOKEN must be set for login", 255, "Fix: pulumi login"),
        ("error: passphrase must be set", 255, "PULUMI_CONFIG_PASSPHRASE"),
        ("{}", 0, "stack 'lba' has no output `job`: it is not up yet. Fix: pulumi up --stack lba"),
        ("secret!", 0, "printed no JSON"),
    ],
    ids=["unknown", "no login", "locked", "not up", "not JSON"],
)
def test_a_stack_without_readable_outputs_is_an_error(
    pulumi: Callable[..., Path], refused: Callable[..., str], output: str, code: int, message: str
) -> None:
    pulumi(output, code)
    found = refused(["status", "--stack", "lba"])
    assert message in found
    assert "secret!" not in found, "the outputs contain the kubeconfig"


def test_without_pulumi_the_error_names_the_kubeconfig_options(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "`pulumi` is not on PATH" in (message := refused(["status", "--stack", "aws"]))
    assert "--kubeconfig FILE --namespace N --run R" in message


def test_an_unusable_kubeconfig_is_not_printed(
    cluster: FakeCluster, pulumi: Callable[..., Path], refused: Callable[..., str]
) -> None:
    broken = json.loads(outputs(cluster))
    broken["kubeconfig"] = f"users: [{{name: me, user: {{token: {TOKEN}}}}}]"
    pulumi(json.dumps(broken))
    assert "the kubeconfig cannot be used" in refused(["status", "--stack", "lab"])


def test_help_loads_no_large_package() -> None:
    code = (
        "import sys; from workloads.__main__ import main\n"
        "try: main(['status', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'kubernetes', 'torch', 'pulumi', 'rich', 'yaml'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("text", "number"), [("8", 8), ("500m", 0.5), ("64Gi", 64 * 2**30), ("1k", 1000), ("2M", 2e6)])
def test_quantities_are_parsed(text: str, number: float) -> None:
    assert diagnosis.parse_quantity(text) == number
