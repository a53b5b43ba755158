"""The entry point under the environment that each training service documents: two machines, here, of one process."""

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
from machines import events_in, free_port
from small_jobs import HERE, ROOT, environment, tiny_tree

from trainer.errors import UserError
from trainer.launch.launcher import LaunchOptions, apply_service, redirect_data
from trainer.launch.managed_service import find_machine

SECONDS = 300.0  # importing torch and TorchRec takes a quarter of a minute on a busy machine, and each start does it
RUN = "a"


class Machine:
    """`trainer launch` as a service starts it on one machine, in a folder and a session of its own."""

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
        """Without notice: the launcher and its workers, which are in sessions of their own."""
        with suppress(FileNotFoundError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for pid in [self.process.pid, *map(int, children)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[[list[str], Mapping[str, str]], list[Machine]]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Start]:
    """Starts the two machines, each with its own index and the variables of its service."""
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
    """As the service documents CLUSTER_SPEC, with what it adds for PyTorch, and folders as it mounts buckets."""
    port = free_port()
    cluster = {"workerpool0": [f"127.0.0.1:{port}"], "workerpool1": ["127.0.0.1:2222"]}
    task = '{"type": "workerpool<pool>", "index": <within>}'
    return {
        "CLUSTER_SPEC": f'{{"cluster": {json.dumps(cluster)}, "environment": "cloud", "task": {task}}}',
        "CLOUD_ML_PROJECT_ID": "123456789012",
        # Of machines, where torchrun's workers have processes of the same names.
        "RANK": "<index>",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "3333",
        "AIP_CHECKPOINT_DIR": f"{folder}/checkpoints/{RUN}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{folder}/checkpoints/{RUN}/logs/",
    }


def azureml(folder: Path) -> dict[str, str]:
    """As the service documents the PyTorch distribution with one process per machine."""
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
    """What a service is given as the command."""
    dotted: dict[str, Any] = {"train.run": RUN, "checkpoint.every_steps": 10, "metrics.tensorboard": True}
    dotted |= {"data.source": "slow_source:Slow", "data.options": {"at": -1}, "train.steps": 60}
    dotted |= {name.replace("__", "."): value for name, value in changes.items()}
    file = folder / "config.json"
    file.write_text(json.dumps(tiny_tree(dotted)), encoding="utf-8")
    return ["launch", "--service=auto", "--nproc=1", "--max-restarts=3", "train", "--config", str(file), *further]


def ended(pair: list[Machine]) -> list[dict[str, Any]]:
    """The result that the first machine told, once both have ended well."""
    for one in pair:
        assert one.process.wait(SECONDS) == 0, one.log.read_text()[-4000:]
    return [event for one in pair for event in one.events("result")]


def test_vertex_machines_meet_and_a_job_that_is_restarted_resumes(tmp_path: Path, machines: Start) -> None:
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
    # The service starts every machine anew, with the same settings and another port or the same.
    again = machines(command, vertex(bucket))
    (result,) = ended(again)
    assert result["step"] == 150
    (resumed,) = again[0].events("resume")
    assert resumed["step"] >= 20, "a restart must not begin from the start"
    assert again[0].events("start")[0]["processes"] == 2
    steps = list((bucket / "checkpoints" / RUN / "checkpoints").glob("step_*"))
    assert steps, "checkpoints belong into AIP_CHECKPOINT_DIR itself"
    assert list((bucket / "checkpoints" / RUN / "logs").rglob("events.out.tfevents.*")), "TensorBoard shows this folder"


def test_azure_machines_meet_and_write_where_the_studio_shows_it(tmp_path: Path, machines: Start) -> None:
    pair = machines(arguments(tmp_path, train__steps=20), azureml(tmp_path))
    (result,) = ended(pair)
    assert result["step"] == 20
    assert pair[0].events("start")[0]["processes"] == 2
    first = tmp_path / "machine-0"
    assert list((first / "outputs" / RUN / "checkpoints").glob("step_*")), "./outputs is what the service uploads"
    assert list((first / "logs").rglob("events.out.tfevents.*"))
    assert not list((tmp_path / "machine-1").rglob("events.out.tfevents.*")), "one machine tells for all"


def test_a_place_for_checkpoints_that_was_given_wins_over_the_services(tmp_path: Path, machines: Start) -> None:
    elsewhere = tmp_path / "elsewhere"
    ended(machines(arguments(tmp_path, "--checkpoint.uri", str(elsewhere), train__steps=10), azureml(tmp_path)))
    assert list((elsewhere / RUN / "checkpoints").glob("step_*"))
    assert not (tmp_path / "machine-0" / "outputs").exists() or not list(
        (tmp_path / "machine-0" / "outputs").rglob("step_*")
    )


def test_a_place_in_the_settings_file_wins_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment())
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_tree({"checkpoint.uri": "/elsewhere"})), encoding="utf-8")
    here = find_machine("auto", {"AZUREML_RUN_ID": "a"})
    assert here
    apply_service(here, LaunchOptions(service="auto"), ["train", "--config", str(file)])
    assert "TRAINER_CHECKPOINT__URI" not in os.environ, "the environment would win over the file"
    assert os.environ["TRAINER_METRICS__DIR"] == "logs"


SPEC = {"cluster": {"workerpool0": ["m:2222"], "workerpool1": ["w0:2222", "w1:2222"]}, "environment": "cloud"}


@pytest.mark.parametrize(("pool", "within", "index"), [(0, 0, 0), (1, 0, 1), (1, 1, 2)])
def test_a_machine_of_vertex_counts_through_both_pools(pool: int, within: int, index: int) -> None:
    spec = SPEC | {"task": {"type": f"workerpool{pool}", "index": within}}
    found = find_machine("auto", {"CLUSTER_SPEC": json.dumps(spec)})
    assert found
    assert (found.index, found.count, found.first) == (index, 3, "m:2222")
    assert f"is_host={int(index == 0)}" in found.rendezvous_config, "machines do not know their own names there"


def test_a_single_machine_of_vertex_needs_no_cluster() -> None:
    found = find_machine(
        "vertex", {"CLOUD_ML_PROJECT_ID": "1", "AIP_CHECKPOINT_DIR": "gs://b/checkpoints/a/checkpoints/"}
    )
    assert found
    assert found.count == 1
    assert found.checkpoint_uri("a") == "gs://b/checkpoints", "the run's own folder is then the service's"
    assert found.checkpoint_uri("other") == "gs://b/checkpoints/a/checkpoints"


def test_logs_go_to_the_mounted_bucket_because_objects_do_not_grow() -> None:
    found = find_machine("auto", {"CLOUD_ML_PROJECT_ID": "1", "AIP_TENSORBOARD_LOG_DIR": "gs://b/checkpoints/a/logs/"})
    assert found
    assert found.logs == "/gcs/b/checkpoints/a/logs/"


@pytest.mark.parametrize(
    ("wanted", "variables", "said"),
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
def test_an_environment_that_does_not_fit_is_told_in_one_line(
    wanted: str, variables: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said) as told:
        find_machine(wanted, variables)
    assert "\n" not in str(told.value)


def test_mpis_master_is_read_where_pytorchs_is_not_set() -> None:
    found = find_machine(
        "auto", {"AZUREML_RUN_ID": "a", "WORLD_SIZE": "2", "RANK": "1", "AZ_BATCH_MASTER_NODE": "h:6000"}
    )
    assert found
    assert (found.index, found.first) == (1, "h:6000")


def test_data_below_the_folder_is_led_to_where_the_service_has_it() -> None:
    given = ["train", "--data.source", "criteo", "--data.path", "/data/criteo"]
    assert redirect_data("/data=/gcs/b/datasets", given)[-2:] == ["--data.path", "/gcs/b/datasets/criteo"]
    assert redirect_data("/data/=/gcs/b/datasets/", given)[-1] == "/gcs/b/datasets/criteo"
    other = ["train", "--data.source", "criteo", "--data.path", "/database"]
    assert redirect_data("/data=/gcs/b", other) == other, "another folder that begins alike is not below it"
    with pytest.raises(UserError, match="allowed: FOLDER=PATH"):
        redirect_data("/data", given)


def test_a_service_and_a_meeting_point_contradict_each_other() -> None:
    from small_jobs import trainer

    done = trainer("launch", "--service=auto", "--nnodes=2", "train", env={"AZUREML_RUN_ID": "a"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: --nnodes conflicts with --service auto")
    assert done.stderr.count("\n") == 1
