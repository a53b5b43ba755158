"""The launcher in the documented environment of each training service, with two machines of one process each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port
from machines import events_in
from small_jobs import HERE, ROOT, environment, tiny_tree

from trainer.errors import UserError
from trainer.launch.launcher import LaunchOptions, apply_service, redirect_data
from trainer.launch.managed_service import find_machine

SECONDS = 300.0  # every start imports torch and TorchRec, a quarter of a minute on a busy machine
RUN = "a"


class Machine:
    """`trainer launch` as a service starts it on one machine, in a separate folder and session."""

    def __init__(self, folder: Path, arguments: list[str], variables: Mapping[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}"
        paths = os.pathsep.join([str(ROOT), str(HERE), str(Path(__file__).parent)])
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *arguments],
                cwd=folder,
                env=environment(PYTHONPATH=paths, TORCH_CPP_LOG_LEVEL="ERROR", **variables),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in events_in(self.log.read_text()) if event["event"] == name]

    def lose(self) -> None:
        """Kill the launcher and its workers, like a machine that is lost without notice."""
        with suppress(FileNotFoundError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for pid in [self.process.pid, *map(int, children)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[[list[str], Mapping[str, str]], list[Machine]]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Start]:
    """Start two machines, each with its index and the variables of its service."""
    started: list[Machine] = []

    def start(arguments: list[str], template: Mapping[str, str]) -> list[Machine]:
        pair = []
        for index in range(2):
            pool, within = (0, 0) if index == 0 else (1, index - 1)
            filled = {
                name: text.replace("<index>", str(index)).replace("<pool>", str(pool)).replace("<within>", str(within))
                for name, text in template.items()
            }
            pair.append(Machine(tmp_path / f"machine-{index}", arguments, filled))
        started.extend(pair)
        return pair

    yield start
    for one in started:
        if one.process.poll() is None:
            one.lose()


def vertex(folder: Path) -> dict[str, str]:
    """Return the variables that Vertex AI documents: CLUSTER_SPEC, those for PyTorch, and mounted folders."""
    port = free_port()
    cluster = {"workerpool0": [f"127.0.0.1:{port}"], "workerpool1": ["127.0.0.1:2222"]}
    task = '{"type": "workerpool<pool>", "index": <within>}'
    return {
        "CLUSTER_SPEC": f'{{"cluster": {json.dumps(cluster)}, "environment": "cloud", "task": {task}}}',
        "CLOUD_ML_PROJECT_ID": "123456789012",
        # These count machines; torchrun sets the same variables to count processes.
        "RANK": "<index>",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "3333",
        "AIP_CHECKPOINT_DIR": f"{folder}/checkpoints/{RUN}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{folder}/checkpoints/{RUN}/logs/",
    }


def azureml(folder: Path) -> dict[str, str]:
    """Return the variables that Azure ML documents for PyTorch with one process per machine."""
    port = str(free_port())
    return {
        "AZUREML_RUN_ID": "a-0123abcd",
        "AZ_BATCH_MASTER_NODE": f"127.0.0.1:{port}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NODE_RANK": "<index>",
        "RANK": "<index>",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
    }


def arguments(folder: Path, *further: str, **changes: Any) -> list[str]:
    """Return the command that a service runs."""
    dotted: dict[str, Any] = {"train.run": RUN, "checkpoint.every_steps": 10, "metrics.tensorboard": True}
    dotted |= {"data.source": "slow_source:Slow", "data.options": {"at": -1}, "train.steps": 60}
    dotted |= {name.replace("__", "."): value for name, value in changes.items()}
    file = folder / "config.json"
    file.write_text(json.dumps(tiny_tree(dotted)), encoding="utf-8")
    return ["launch", "--service=auto", "--nproc=1", "--max-restarts=3", "train", "--config", str(file), *further]


def results(pair: list[Machine]) -> list[dict[str, Any]]:
    """Wait until both machines have succeeded, and return their result events."""
    for one in pair:
        assert one.process.wait(SECONDS) == 0, one.log.read_text()[-4000:]
    return [event for one in pair for event in one.events("result")]


def test_vertex_machines_connect_and_a_restarted_job_resumes(tmp_path: Path, machines: Start) -> None:
    bucket = tmp_path / "bucket"
    command = arguments(tmp_path, train__steps=150)
    lost = machines(command, vertex(bucket))
    until = time.monotonic() + SECONDS
    while not any(event["step"] >= 20 for event in lost[0].events("checkpoint")):
        assert time.monotonic() < until, lost[0].log.read_text()[-4000:]
        assert lost[0].process.poll() is None, lost[0].log.read_text()[-4000:]
        time.sleep(0.1)
    for one in lost:
        one.lose()
    # The service restarts every machine with the same settings, and with the same or another port.
    again = machines(command, vertex(bucket))
    (result,) = results(again)
    assert result["step"] == 150
    (resumed,) = again[0].events("resume")
    assert resumed["step"] >= 20, "a restart must resume"
    assert again[0].events("start")[0]["processes"] == 2
    steps = list((bucket / "checkpoints" / RUN / "checkpoints").glob("step_*"))
    assert steps, "checkpoints must be in AIP_CHECKPOINT_DIR"
    assert list((bucket / "checkpoints" / RUN / "logs").rglob("events.out.tfevents.*")), "TensorBoard shows this folder"


def test_azure_machines_connect_and_write_to_the_folders_that_the_studio_shows(tmp_path: Path, machines: Start) -> None:
    pair = machines(arguments(tmp_path, train__steps=20), azureml(tmp_path))
    (result,) = results(pair)
    assert result["step"] == 20
    assert pair[0].events("start")[0]["processes"] == 2
    first = tmp_path / "machine-0"
    assert list((first / "outputs" / RUN / "checkpoints").glob("step_*")), "the service uploads ./outputs"
    assert list((first / "logs").rglob("events.out.tfevents.*"))
    assert not list((tmp_path / "machine-1").rglob("events.out.tfevents.*")), "only the first machine writes logs"


def test_a_configured_checkpoint_uri_takes_precedence_over_the_service(tmp_path: Path, machines: Start) -> None:
    elsewhere = tmp_path / "elsewhere"
    results(machines(arguments(tmp_path, "--checkpoint.uri", str(elsewhere), train__steps=10), azureml(tmp_path)))
    assert list((elsewhere / RUN / "checkpoints").glob("step_*"))
    assert not (tmp_path / "machine-0" / "outputs").exists() or not list(
        (tmp_path / "machine-0" / "outputs").rglob("step_*")
    )


def test_a_checkpoint_uri_in_the_settings_file_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment())
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_tree({"checkpoint.uri": "/elsewhere"})), encoding="utf-8")
    machine = find_machine("auto", {"AZUREML_RUN_ID": "a"})
    assert machine
    apply_service(machine, LaunchOptions(service="auto"), ["train", "--config", str(file)])
    assert "TRAINER_CHECKPOINT__URI" not in os.environ, "the environment would override the file"
    assert os.environ["TRAINER_METRICS__DIR"] == "logs"


SPEC = {"cluster": {"workerpool0": ["m:2222"], "workerpool1": ["w0:2222", "w1:2222"]}, "environment": "cloud"}


@pytest.mark.parametrize(("pool", "within", "index"), [(0, 0, 0), (1, 0, 1), (1, 1, 2)])
def test_the_index_of_a_vertex_machine_counts_both_pools(pool: int, within: int, index: int) -> None:
    spec = SPEC | {"task": {"type": f"workerpool{pool}", "index": within}}
    machine = find_machine("auto", {"CLUSTER_SPEC": json.dumps(spec)})
    assert machine
    assert (machine.index, machine.count, machine.first) == (index, 3, "m:2222")
    assert f"is_host={int(index == 0)}" in machine.rendezvous_config, "machines of the service do not know their names"


def test_a_single_vertex_machine_needs_no_cluster_spec() -> None:
    machine = find_machine(
        "vertex", {"CLOUD_ML_PROJECT_ID": "1", "AIP_CHECKPOINT_DIR": "gs://b/checkpoints/a/checkpoints/"}
    )
    assert machine
    assert machine.count == 1
    assert machine.checkpoint_uri("a") == "gs://b/checkpoints", "the service already names the folder of this run"
    assert machine.checkpoint_uri("other") == "gs://b/checkpoints/a/checkpoints"


def test_logs_are_written_to_the_mounted_bucket_because_objects_cannot_be_appended_to() -> None:
    machine = find_machine(
        "auto", {"CLOUD_ML_PROJECT_ID": "1", "AIP_TENSORBOARD_LOG_DIR": "gs://b/checkpoints/a/logs/"}
    )
    assert machine
    assert machine.logs == "/gcs/b/checkpoints/a/logs/"


@pytest.mark.parametrize(
    ("service", "variables", "message"),
    [
        ("auto", {}, "none of CLUSTER_SPEC, CLOUD_ML_PROJECT_ID, AZUREML_RUN_ID is set"),
        ("azureml", {"CLUSTER_SPEC": "{}"}, "none of AZUREML_RUN_ID is set"),
        ("sagemaker", {}, "allowed: auto, none, vertex, azureml"),
        ("auto", {"CLUSTER_SPEC": "not json"}, "CLUSTER_SPEC is not a cluster"),
        ("auto", {"CLUSTER_SPEC": json.dumps(SPEC | {"task": {"type": "workerpool3", "index": 0}})}, "CLUSTER_SPEC"),
        ("auto", {"AZUREML_RUN_ID": "a", "WORLD_SIZE": "two"}, "must be numbers"),
        ("auto", {"AZUREML_RUN_ID": "a", "WORLD_SIZE": "2"}, "neither MASTER_ADDR nor AZ_BATCH_MASTER_NODE"),
        ("auto", {"AZUREML_RUN_ID": "a", "LOCAL_RANK": "1"}, "process_count_per_instance to 1"),
    ],
)
def test_a_wrong_environment_is_an_error_in_one_line(service: str, variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        find_machine(service, variables)
    assert "\n" not in str(caught.value)


def test_the_master_of_mpi_is_used_when_master_addr_is_not_set() -> None:
    machine = find_machine(
        "auto", {"AZUREML_RUN_ID": "a", "WORLD_SIZE": "2", "RANK": "1", "AZ_BATCH_MASTER_NODE": "h:6000"}
    )
    assert machine
    assert (machine.index, machine.first) == (1, "h:6000")


def test_data_paths_are_redirected_to_the_folder_of_the_service() -> None:
    options = ["train", "--data.source", "criteo", "--data.path", "/data/criteo"]
    assert redirect_data("/data=/gcs/b/datasets", options)[-2:] == ["--data.path", "/gcs/b/datasets/criteo"]
    assert redirect_data("/data/=/gcs/b/datasets/", options)[-1] == "/gcs/b/datasets/criteo"
    other = ["train", "--data.source", "criteo", "--data.path", "/database"]
    assert redirect_data("/data=/gcs/b", other) == other, "a folder with the same prefix is not below it"
    with pytest.raises(UserError, match="allowed: FOLDER=PATH"):
        redirect_data("/data", options)


def test_a_service_and_a_rendezvous_option_are_an_error() -> None:
    from small_jobs import trainer

    done = trainer("launch", "--service=auto", "--nnodes=2", "train", env={"AZUREML_RUN_ID": "a"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: --nnodes conflicts with --service auto")
    assert done.stderr.count("\n") == 1
