"""`stop`, `resume` and `tensorboard`: their changes to the cluster, their confirmation and their errors."""

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
from workloads.runs.run import Run

Command = Callable[..., int]


class Terminal(io.StringIO):
    """A standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob", "TrainJob"])
def test_stop_suspends_the_job_and_resume_resumes_it(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    job(cluster, kind)
    assert command("stop", "--yes") == 0
    spec = cluster.objects[f"{COLLECTIONS[kind]}/{NAME}"]["spec"]
    assert (spec["runPolicy"] if kind == "PyTorchJob" else spec)["suspend"] is True
    assert kind != "PyTorchJob" or spec["runPolicy"]["backoffLimit"] == 3, "the rest of the policy is unchanged"
    shown = capsys.readouterr().out
    assert "the trainer saves a checkpoint first" in shown
    assert "python -m workloads resume --kubeconfig" in shown
    assert command("status") == 0
    assert "stopped" in (shown := capsys.readouterr().out)
    assert "python -m workloads resume" in shown
    assert command("resume") == 0
    assert (spec["runPolicy"] if kind == "PyTorchJob" else spec)["suspend"] is False


def test_a_queued_job_is_stopped_through_its_workload(cluster: FakeCluster, command: Command) -> None:
    manifest = job(cluster)
    manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "training"
    owner = {"kind": "Job", "name": NAME, "uid": "1"}
    workload = cluster.add(WORKLOADS, {"metadata": {"name": "w", "ownerReferences": [owner]}, "spec": {}})
    assert command("stop", "--yes") == 0
    assert workload["spec"]["active"] is False
    assert "suspend" not in manifest["spec"], "Kueue would revert it"
    assert command("resume") == 0
    assert workload["spec"]["active"] is True


def test_stop_asks_for_the_name_of_the_run(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = job(cluster)
    monkeypatch.setattr("sys.stdin", Terminal("something\n"))
    assert command("stop") == 2
    assert "nothing was stopped: got 'something'; allowed: 'criteo'" in capsys.readouterr().err
    assert "suspend" not in manifest["spec"]
    monkeypatch.setattr("sys.stdin", Terminal("criteo\n"))
    assert command("stop") == 0
    assert manifest["spec"]["suspend"] is True


def test_without_a_terminal_stop_needs_yes(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = job(cluster)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert command("stop") == 2
    assert "add --yes" in capsys.readouterr().err
    assert "suspend" not in manifest["spec"]


def test_stopping_a_stopped_job_and_resuming_a_running_one_change_nothing(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = job(cluster)
    assert command("resume") == 0
    assert "is not stopped" in capsys.readouterr().out
    manifest["spec"]["suspend"] = True
    assert command("stop", "--yes") == 0
    assert "already stopped" in capsys.readouterr().out
    assert not [path for verb, path in cluster.requests if verb == "PATCH"]


def test_a_run_that_has_ended_is_neither_stopped_nor_resumed(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster, conditions=[condition("Complete")])
    for name in ("stop", "resume"):
        assert command(name, *(["--yes"] if name == "stop" else [])) == 2
        assert "has ended (Complete)" in capsys.readouterr().err


@pytest.mark.parametrize(("conflicts", "code"), [(2, 0), (99, 2)], ids=["a few conflicts", "only conflicts"])
def test_a_conflict_with_another_writer_is_retried(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], conflicts: int, code: int
) -> None:
    job(cluster)
    cluster.conflicts = conflicts
    assert command("stop", "--yes") == code
    assert ("409" in capsys.readouterr().err) == (code == 2)


def test_a_missing_permission_is_an_error(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    job(cluster)
    cluster.forbidden.add(("PATCH", "/jobs"))
    assert command("stop", "--yes") == 2
    assert "cannot patch" in capsys.readouterr().err


# --- tensorboard ---


def board(cluster: FakeCluster, *, ready: bool = True) -> None:
    """Create a TensorBoard pod."""
    labels = {"app.kubernetes.io/component": "tensorboard"}
    conditions = [condition("Ready")] if ready else []
    cluster.add(PODS, {"metadata": {"name": "board", "labels": labels}, "status": {"conditions": conditions}})


def test_the_forwarded_port_returns_a_page_of_the_pod(cluster: FakeCluster, tmp_path: Path) -> None:
    board(cluster)
    run = Run(KubeApi.from_file(str(cluster.kubeconfig(tmp_path)), None), NAMESPACE, "criteo")
    assert tensorboard.find_ready_pod(run) == "board"
    with tensorboard.listen(0) as server:
        threading.Thread(target=tensorboard.serve, args=(server, run, "board"), daemon=True).start()
        for _ in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=20) as page:
                assert page.read() == b"port 6006 of the pod"


def test_ctrl_c_ends_the_forwarding_with_exit_code_0(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    board(cluster)
    monkeypatch.setattr(tensorboard, "serve", interrupt)
    assert command("tensorboard", "--port", "0") == 0
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


def test_a_used_port_is_an_error(cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    board(cluster)
    with tensorboard.listen(0) as taken:
        port = taken.getsockname()[1]
        assert command("tensorboard", "--port", str(port)) == 2
    assert f"got --port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(("exists", "message"), [(True, "is not ready"), (False, "job.tensorboard.enabled true")])
def test_a_missing_or_unready_tensorboard_is_an_error(
    cluster: FakeCluster, command: Command, capsys: pytest.CaptureFixture[str], exists: bool, message: str
) -> None:
    if exists:
        board(cluster, ready=False)
    assert command("tensorboard", "--port", "0") == 2
    assert message in capsys.readouterr().err
