"""`python -m workloads status`: what it says about jobs and pods, and how it ends where it cannot look."""

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
from workloads.cli import watch, why
from workloads.cli.snapshot import take
from workloads.cli.target import Target

Command = Callable[..., int]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob", "TrainJob"])
def test_a_running_job_of_each_kind_shows_its_pods_and_ends_well(
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
    assert shown.index("gpu-0") < shown.index("gpu-1"), "pods come in the order of their indices"
    assert "step 340" in shown
    assert "s3://b/step_300" in shown, "where the last checkpoint is"


@pytest.mark.parametrize(
    ("conditions", "state", "code"),
    [
        ([condition("Complete")], "succeeded", 0),
        ([condition("Succeeded")], "succeeded", 0),
        ([condition("Failed", reason="FailedIndexes", message="Job has failed indexes")], "failed", 1),
    ],
    ids=["complete", "succeeded", "failed"],
)
def test_the_exit_code_tells_success_from_failure(
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


def test_a_run_without_a_job_says_how_to_start_one(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("status") == 1
    assert "absent" in (shown := capsys.readouterr().out)
    assert "`pulumi up` starts it" in shown


def look(cluster: FakeCluster, tmp_path: Path) -> list[str | None]:
    """What each pod is said to wait for."""
    api = KubeApi.from_file(str(cluster.kubeconfig(tmp_path)), None)
    return [item.why for item in take(Target(api, NAMESPACE, "criteo")).pods]


def test_too_few_gpu_nodes_are_counted_against_those_needed(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=3)
    for name in ("gpu-0", "gpu-1"):
        node(cluster, name)
    node(cluster, "system", gpus=0)
    pod(cluster, 0)
    pod(cluster, 1)
    said = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No victims."
    pod(cluster, 2, "Pending", **unscheduled(said))
    assert look(cluster, tmp_path)[2] == "Insufficient nvidia.com/gpu: 2 nodes have 8 GPUs, 3 are needed"


def test_nodes_that_nobody_may_list_still_leave_the_schedulers_reason(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, "Pending", **unscheduled("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."))
    cluster.forbidden.add(("GET", "/nodes"))
    cluster.forbidden.add(("GET", "/events"))
    assert look(cluster, tmp_path) == ["Insufficient nvidia.com/gpu: 2 nodes too few of it free, the pod wants 8"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "0/2 nodes are available: 2 node(s) had untolerated taint {sku: gpu}.",
            "2 nodes: untolerated taint sku=gpu, which the job does not tolerate",
        ),
        (
            "0/2 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 1 node(s) didn't "
            "match Pod's node affinity/selector. preemption: 0/2 nodes are available: 2 Preemption is not helpful.",
            "1 node: untolerated taint nvidia.com/gpu=present, which the job does not tolerate; "
            "1 node: without the labels that the pod selects (nvidia.com/gpu.present=true)",
        ),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "unbound claim data: pod has unbound immediate PersistentVolumeClaims",
        ),
        ('persistentvolumeclaim "data" not found', 'unbound claim data: persistentvolumeclaim "data" not found'),
        (
            "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.",
            "2 nodes: taken by another training pod, and each pod wants a node of its own",
        ),
        ("no nodes available to schedule pods", "the cluster has no nodes"),
    ],
    ids=["taint", "taint and selector", "unbound claim", "missing claim", "anti-affinity", "no nodes"],
)
def test_the_schedulers_sentence_becomes_words(cluster: FakeCluster, tmp_path: Path, message: str, words: str) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, "Pending", **unscheduled(message))
    assert look(cluster, tmp_path) == [words]


def test_the_autoscalers_word_stands_behind_the_schedulers(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    waiting = pod(cluster, 0, "Pending", **unscheduled("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."))
    event(cluster, waiting["metadata"]["name"], "TriggeredScaleUp", "pod triggered scale-up", "Normal")
    assert look(cluster, tmp_path)[0].endswith("1 is needed; the autoscaler is adding nodes")


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
            "OOMKilled: trainer used memory over its limit of 64Gi; job.memory_gib, or a smaller batch",
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 2, "message": "starting\nerror: --train.steps: legal is more\nend"}},
            "exit code 2, a mistake in the settings: --train.steps: legal is more",
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
def test_a_pod_that_ended_or_cannot_start_says_why(
    cluster: FakeCluster, tmp_path: Path, phase: str, container: dict[str, object], words: str
) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, phase, container=container)
    assert look(cluster, tmp_path) == [words]


def test_a_lost_node_is_told_before_the_exit_code_that_it_caused(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    lost = condition(
        "DisruptionTarget", reason="DeletionByTaintManager", message="Taint manager: deleting due to NoExecute"
    )
    pod(cluster, 0, "Failed", container={"terminated": {"exitCode": 143}}, conditions=[lost])
    assert look(cluster, tmp_path) == ["DeletionByTaintManager: Taint manager: deleting due to NoExecute"]


def test_an_image_that_backs_off_shows_what_the_registry_said(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    waiting = pod(cluster, 0, "Pending", container={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}})
    event(cluster, waiting["metadata"]["name"], "Failed", "401 unauthorized")
    assert look(cluster, tmp_path)[0].endswith("cannot be pulled: 401 unauthorized")


def test_only_the_newest_pod_of_an_index_is_shown_and_the_others_count(cluster: FakeCluster, tmp_path: Path) -> None:
    job(cluster, nodes=1)
    pod(cluster, 0, "Failed", name="old", container={"terminated": {"exitCode": 1}}, made="2026-11-21T09:00:00Z")
    pod(cluster, 0, name="new")
    (only,) = take(Target(KubeApi.from_file(str(cluster.kubeconfig(tmp_path)), None), NAMESPACE, "criteo")).pods
    assert (only.name, only.restarts, only.why) == ("new", 1, None)


def test_a_job_in_a_queue_repeats_what_kueue_says(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    made = job(cluster, suspend=True)
    made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "training"
    waits = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for nvidia.com/gpu"}
    owner = {"kind": "Job", "name": NAME, "uid": "1"}
    held = {
        "metadata": {"name": "w", "ownerReferences": [owner]},
        "spec": {"active": True},
        "status": {"conditions": [waits]},
    }
    cluster.add(WORKLOADS, held)
    assert command("status") == 0
    shown = capsys.readouterr().out
    assert "queued" in shown
    assert "insufficient unused quota for nvidia.com/gpu" in shown


def test_a_failed_check_of_the_network_explains_why_there_is_no_job(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"app.kubernetes.io/component": "netcheck", "app.kubernetes.io/part-of": "torchrec-cloud"}
    ended = {"metadata": {"name": "netcheck-1", "labels": labels}, "spec": {}}
    cluster.add(JOBS, ended | {"status": {"conditions": [condition("Failed", message="too slow")]}})
    assert command("status") == 0
    shown = capsys.readouterr().out
    assert "waiting" in shown.splitlines()[0]
    assert "netcheck is not finished (netcheck-1: failed: too slow)" in shown


def test_pods_that_nothing_may_create_are_explained_by_the_jobs_events(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster)
    event(cluster, NAME, "FailedCreate", "pods is forbidden: exceeded quota: training")
    assert command("status") == 0
    assert "FailedCreate: pods is forbidden: exceeded quota: training" in capsys.readouterr().out


def test_an_operator_that_does_nothing_is_named(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster, "PyTorchJob")
    assert command("status") == 0
    assert "no operator has looked at this PyTorchJob yet" in capsys.readouterr().out


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


# --- looking again ---


def test_watching_ends_with_the_run_and_prints_only_changes(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looks = job(cluster, nodes=1), []
    pod(cluster, 0)

    def later(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            made["status"]["conditions"] = [condition("Complete")]

    monkeypatch.setattr(watch.View.watch, "__kwdefaults__", {"sleep": later})
    cluster.objects[f"{JOBS}/{NAME}"]["metadata"].pop("creationTimestamp")
    cluster.objects[f"/api/v1/namespaces/training/pods/{NAME}-0-x0y"]["metadata"].pop("creationTimestamp")
    assert command("status", "--watch", "--json", "--every", "7") == 0
    states = [json.loads(text)["state"] for text in capsys.readouterr().out.splitlines()]
    assert states == ["running", "succeeded"], "what did not change is not printed again"
    assert looks == [7, 7, 7]


def test_ctrl_c_ends_a_watch_without_a_trace(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    job(cluster, nodes=1)
    monkeypatch.setattr(watch.View.watch, "__kwdefaults__", {"sleep": interrupt})
    assert command("status", "--watch") == 0
    assert capsys.readouterr().err == ""


# --- where nothing can be seen ---


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """The one line that a command in the wrong prints; its exit code is 2."""

    def run(words: list[str]) -> str:
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        told = capsys.readouterr()
        assert code == 2, told
        assert told.out == ""
        assert told.err.count("\n") == 1, told.err
        assert TOKEN not in told.err
        return told.err

    return run


def where(path: Path | str) -> list[str]:
    return ["--kubeconfig", str(path), "--namespace", NAMESPACE, "--run", "criteo"]


def test_credentials_that_the_cluster_refuses(
    cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]
) -> None:
    told = refused(["status", *where(cluster.kubeconfig(tmp_path, token="wrong"))])
    assert "does not accept these credentials (401 Unauthorized)" in told
    assert "wrong" not in told


def test_rights_that_are_missing(cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]) -> None:
    cluster.forbidden.add(("GET", "/pods"))
    told = refused(["status", *where(cluster.kubeconfig(tmp_path))])
    assert 'User "me" cannot get resource "pods" (403). Fix: ask the cluster\'s owner for a role' in told


def test_a_cluster_that_does_not_answer(cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]) -> None:
    path = cluster.kubeconfig(tmp_path)
    path.write_text(path.read_text().replace(cluster.url, f"http://127.0.0.1:{free_port()}"))
    assert "does not answer" in (told := refused(["status", *where(path)]))
    assert "refused" in told
    assert "object at 0x" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--stack S, or --kubeconfig FILE --namespace N --run R"),
        (["--kubeconfig", "x"], "--kubeconfig needs --namespace and --run"),
        (["--kubeconfig", "x", "--stack", "aws"], "give one of them"),
        (where("/nowhere/config"), "/nowhere/config"),
        (["--every", "0"], "0: legal is more than 0"),
    ],
    ids=["nothing", "half", "both", "no file", "no pause"],
)
def test_options_that_do_not_say_where(words: list[str], told: str, refused: Callable[..., str]) -> None:
    assert told in refused(["status", *words])


def test_a_context_that_the_file_lacks(cluster: FakeCluster, tmp_path: Path, refused: Callable[..., str]) -> None:
    told = refused(["status", *where(cluster.kubeconfig(tmp_path)), "--context", "lab"])
    assert "no such context: got 'lab'; allowed: here" in told


# --- through a stack ---


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """A `pulumi` on PATH that prints a text and ends with a code; `stack ls` knows two stacks."""

    def put(says: str, code: int = 0) -> Path:
        (tmp_path / "says").write_text(says)
        program = tmp_path / "pulumi"
        stream = ">&2 " if code else ""
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
            '[ "$2" = ls ] && echo \'[{"name":"aws"},{"name":"lab"}]\' && exit 0\n'
            f"{stream}cat {tmp_path}/says\nexit {code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "asked"

    return put


def outputs(cluster: FakeCluster, **job_output: object) -> str:
    summary = {
        "run": "criteo", "launcher": "job", "namespace": NAMESPACE, "nodes": 2, "kind": "Job", "name": NAME,
        "image": "trainer:dev", "checkpoints": "file:///data/criteo/checkpoints",
    }  # fmt: skip
    return json.dumps({"kubeconfig": json.dumps(cluster.config()), "job": summary | job_output})


def test_a_stack_says_where_its_run_is(
    cluster: FakeCluster,
    pulumi: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    asked = pulumi(outputs(cluster))
    job(cluster)
    pod(cluster, 0)
    pod(cluster, 1)
    assert main(["status", "--stack", "lab"]) == 0
    shown = capsys.readouterr().out
    assert "running" in shown
    assert "file:///data/criteo/checkpoints" in shown
    assert "stack output --json --show-secrets --stack lab" in asked.read_text()
    assert not any(TOKEN in path.read_text() for path in temporary.rglob("*") if path.is_file()), "no secret on disk"


def test_a_job_without_a_name_in_the_outputs_is_found_by_its_run(
    cluster: FakeCluster, pulumi: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pulumi(outputs(cluster, kind=None, name=None, launcher="torchx"))
    job(cluster, conditions=[condition("Complete")])
    assert main(["status", "--stack", "lab"]) == 0
    assert "succeeded" in capsys.readouterr().out


def test_a_job_that_was_replaced_is_not_the_runs_job(cluster: FakeCluster, pulumi: Callable[..., Path]) -> None:
    pulumi(outputs(cluster))
    job(cluster)
    other = {"metadata": {"name": "criteo-other", "labels": dict(LABELS), "creationTimestamp": "2026-11-21T12:00:00Z"}}
    cluster.add(
        JOBS, other | {"spec": {"parallelism": 1}, "status": {"conditions": [condition("Failed", message="x")]}}
    )
    assert main(["status", "--stack", "lab"]) == 0, "the stack's own job runs"


@pytest.mark.parametrize(
    ("says", "code", "told"),
    [
        ("error: no stack named 'lba' found", 255, "no stack 'lba'; there are: aws, lab; `pulumi stack init lba`"),
        ("error: PULUMI_ACCESS_TOKEN must be set for login", 255, "`pulumi login` mends it"),
        ("error: passphrase must be set", 255, "PULUMI_CONFIG_PASSPHRASE"),
        ("{}", 0, "stack 'lba' has no output `job`: it is not up yet; `pulumi up --stack lba`"),
        ("secret!", 0, "printed no JSON"),
    ],
    ids=["unknown", "no login", "locked", "not up", "not JSON"],
)
def test_a_stack_that_cannot_be_read(
    pulumi: Callable[..., Path], refused: Callable[..., str], says: str, code: int, told: str
) -> None:
    pulumi(says, code)
    found = refused(["status", "--stack", "lba"])
    assert told in found
    assert "secret!" not in found, "the outputs hold the kubeconfig"


def test_without_pulumi_the_other_way_is_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no `pulumi` on PATH" in (told := refused(["status", "--stack", "aws"]))
    assert "--kubeconfig FILE --namespace N --run R" in told


def test_a_kubeconfig_that_cannot_be_used_is_not_repeated(
    cluster: FakeCluster, pulumi: Callable[..., Path], refused: Callable[..., str]
) -> None:
    broken = json.loads(outputs(cluster))
    broken["kubeconfig"] = f"users: [{{name: me, user: {{token: {TOKEN}}}}}]"
    pulumi(json.dumps(broken))
    assert "the kubeconfig cannot be used" in refused(["status", "--stack", "lab"])


def test_the_help_answers_without_loading_what_is_heavy() -> None:
    code = (
        "import sys; from workloads.__main__ import main\n"
        "try: main(['status', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'kubernetes', 'torch', 'pulumi', 'rich', 'yaml'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("text", "number"), [("8", 8), ("500m", 0.5), ("64Gi", 64 * 2**30), ("1k", 1000), ("2M", 2e6)])
def test_quantities_are_numbers(text: str, number: float) -> None:
    assert why.quantity(text) == number
