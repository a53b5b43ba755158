"""`stop`, `resume` and `tensorboard`: what they change on the cluster, what they ask, what they refuse."""

from __future__ import annotations

import io
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_objects import COLLECTIONS, NAME, NAMESPACE, PODS, WORKLOADS, condition, job
from fake_cluster import FakeCluster

from infra.kube_api import KubeApi
from workloads.cli import tensorboard
from workloads.cli.target import Target

Command = Callable[..., int]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob", "TrainJob"])
def test_stopping_suspends_and_resuming_lets_go(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    job(cluster, kind)
    assert command("stop", "--yes") == 0
    held = cluster.objects[f"{COLLECTIONS[kind]}/{NAME}"]["spec"]
    assert (held["runPolicy"] if kind == "PyTorchJob" else held)["suspend"] is True
    assert kind != "PyTorchJob" or held["runPolicy"]["backoffLimit"] == 3, "the rest of the policy stays"
    shown = capsys.readouterr().out
    assert "the trainer saves a checkpoint first" in shown
    assert "python -m workloads resume --kubeconfig" in shown
    assert command("status") == 0
    assert "stopped" in (shown := capsys.readouterr().out)
    assert "python -m workloads resume" in shown
    assert command("resume") == 0
    assert (held["runPolicy"] if kind == "PyTorchJob" else held)["suspend"] is False


def test_a_job_in_a_queue_is_stopped_where_kueue_reads_it(cluster: FakeCluster, command: Command) -> None:
    made = job(cluster)
    made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "training"
    owner = {"kind": "Job", "name": NAME, "uid": "1"}
    workload = cluster.add(WORKLOADS, {"metadata": {"name": "w", "ownerReferences": [owner]}, "spec": {}})
    assert command("stop", "--yes") == 0
    assert workload["spec"]["active"] is False
    assert "suspend" not in made["spec"], "Kueue would turn it back"
    assert command("resume") == 0
    assert workload["spec"]["active"] is True


def test_stopping_asks_for_the_runs_name(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(cluster)
    monkeypatch.setattr("sys.stdin", Terminal("something\n"))
    assert command("stop") == 2
    assert "'something' is not 'criteo': nothing was stopped" in capsys.readouterr().err
    assert "suspend" not in made["spec"]
    monkeypatch.setattr("sys.stdin", Terminal("criteo\n"))
    assert command("stop") == 0
    assert made["spec"]["suspend"] is True


def test_without_a_terminal_nothing_is_stopped_unless_told(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(cluster)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert command("stop") == 2
    assert "add --yes" in capsys.readouterr().err
    assert "suspend" not in made["spec"]


def test_stopping_twice_and_resuming_what_runs_change_nothing(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    made = job(cluster)
    assert command("resume") == 0
    assert "is not stopped" in capsys.readouterr().out
    made["spec"]["suspend"] = True
    assert command("stop", "--yes") == 0
    assert "stopped already" in capsys.readouterr().out
    assert not [path for verb, path in cluster.requests if verb == "PATCH"]


def test_a_run_that_has_ended_is_neither_stopped_nor_resumed(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster, conditions=[condition("Complete")])
    for name in ("stop", "resume"):
        assert command(name, *(["--yes"] if name == "stop" else [])) == 2
        assert "has ended (Complete)" in capsys.readouterr().err


@pytest.mark.parametrize(("conflicts", "code"), [(2, 0), (99, 2)], ids=["a while", "for ever"])
def test_somebody_elses_change_at_the_same_moment_is_waited_for(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], conflicts: int, code: int
) -> None:
    job(cluster)
    cluster.conflicts = conflicts
    assert command("stop", "--yes") == code
    assert ("409" in capsys.readouterr().err) == (code == 2)


def test_a_right_that_is_missing_stops_nothing(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster)
    cluster.forbidden.add(("PATCH", "/jobs"))
    assert command("stop", "--yes") == 2
    assert "cannot patch" in capsys.readouterr().err


# --- tensorboard ---


def board(cluster: FakeCluster, *, ready: bool = True) -> None:
    labels = {"app.kubernetes.io/component": "tensorboard"}
    conditions = [condition("Ready")] if ready else []
    cluster.add(PODS, {"metadata": {"name": "board", "labels": labels}, "status": {"conditions": conditions}})


def test_a_page_of_the_pod_comes_through_the_forwarded_port(cluster: FakeCluster, tmp_path: Path) -> None:
    board(cluster)
    target = Target(KubeApi.from_file(str(cluster.kubeconfig(tmp_path)), None), NAMESPACE, "criteo")
    assert tensorboard.ready_pod(target) == "board"
    with tensorboard.listen(0) as server:
        threading.Thread(target=tensorboard.serve, args=(server, target, "board"), daemon=True).start()
        for _ in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=20) as page:
                assert page.read() == b"port 6006 of the pod"


def test_ctrl_c_ends_the_forwarding_cleanly(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    board(cluster)
    monkeypatch.setattr(tensorboard, "serve", interrupt)
    assert command("tensorboard", "--port", "0") == 0
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


def test_a_port_that_is_taken_is_told(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    board(cluster)
    with tensorboard.listen(0) as taken:
        port = taken.getsockname()[1]
        assert command("tensorboard", "--port", str(port)) == 2
    assert f"--port is {port}" in capsys.readouterr().err


@pytest.mark.parametrize(("there", "told"), [(True, "is not ready"), (False, "job.tensorboard.enabled true")])
def test_a_tensorboard_that_cannot_answer(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], there: bool, told: str
) -> None:
    if there:
        board(cluster, ready=False)
    assert command("tensorboard", "--port", "0") == 2
    assert told in capsys.readouterr().err
