"""Jobs under `trainer launch` and torchrun: killed workers, lost machines and new machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port
from machines import Machines, events_in
from small_jobs import ROOT, environment, tiny, tiny_tree, trainer

from trainer.errors import UserError
from trainer.launch.launcher import launch

SECONDS = 300.0  # every start imports torch and TorchRec, a quarter of a minute on a busy machine


class Agent:
    """A launcher with its workers in a separate session, like a machine that can be lost as a whole."""

    def __init__(self, command: list[str], log: Path, folders: str = "") -> None:
        self.log = log
        env = environment(PYTHONPATH=os.pathsep.join([str(ROOT), folders]), TORCH_CPP_LOG_LEVEL="ERROR")
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=env,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in events_in(self.log.read_text()) if e["event"] == name]

    def workers(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def lose(self) -> None:
        """Kill the agent and its workers, like a machine that loses power."""
        for pid in [self.process.pid, *self.workers()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_for(agents: list[Agent], name: str, **fields: Any) -> dict[str, Any]:
    """Return the first event with these fields in the log of any agent; a function as a field is a condition."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for event in (e for agent in agents for e in agent.events(name)):
            if all(value(event[k]) if callable(value) else event[k] == value for k, value in fields.items()):
                return event
        time.sleep(0.1)
    raise AssertionError("\n---\n".join(agent.log.read_text()[-4000:] for agent in agents))


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Collect agents and kill those that still run after the test."""
    started: list[Agent] = []
    yield started
    for agent in started:
        if agent.process.poll() is None:
            agent.lose()


def write_config(folder: Path, **changes: Any) -> list[str]:
    """Write the settings of a run `a` under `folder` and return `train --config FILE`."""
    dotted: dict[str, Any] = {"checkpoint.uri": str(folder), "train.run": "a", "metrics.log_every": 5}
    dotted |= {"checkpoint.every_steps": 10, "data.source": "slow_source:Slow", "train.steps": 150}
    dotted |= {"data.options": {"at": -1}}
    dotted |= {name.replace("__", "."): value for name, value in changes.items()}
    (folder / "config.json").write_text(json.dumps(tiny_tree(dotted)), encoding="utf-8")
    return ["train", "--config", str(folder / "config.json")]


_FAULTS = Path(__file__).resolve().parent
HERE = os.pathsep.join([str(_FAULTS), str(_FAULTS.parent)])


@pytest.mark.parametrize("launcher", ["launch", "torchrun"])
def test_a_killed_worker_is_restarted_and_the_run_completes(launcher: str, tmp_path: Path, agents: list[Agent]) -> None:
    own = ["trainer", "launch", "--nproc", "2", "--max-restarts", "2"]
    plain = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "2", "-m", "trainer"]
    agent = Agent(
        (own if launcher == "launch" else plain) + write_config(tmp_path, train__steps=60), tmp_path / "log", HERE
    )
    agents.append(agent)
    wait_for(agents, "checkpoint", step=20)
    os.kill(agent.workers()[1], signal.SIGKILL)
    assert agent.process.wait(SECONDS) == 0, agent.log.read_text()[-4000:]
    (resumed,) = agent.events("resume")
    assert resumed["step"] >= 20
    assert agent.events("start")[1]["restart"] == 1, "the processes needed a second restart to connect"
    assert agent.events("result")[0]["step"] == 60


def test_processes_save_and_exit_when_their_launcher_is_killed(tmp_path: Path, agents: list[Agent]) -> None:
    train = write_config(tmp_path, train__steps=100_000, fault__save_if_older_seconds=0)
    agent = Agent(["trainer", "launch", "--nproc", "2", *train], tmp_path / "log", HERE)
    agents.append(agent)
    wait_for(agents, "train", step=lambda step: step >= 5)
    workers = agent.workers()
    agent.process.kill()
    agent.process.wait()
    preempted = wait_for(agents, "preempted")
    assert preempted["because"] == f"the launcher (process {agent.process.pid}) has died"
    assert preempted["saved_step"] == preempted["step"]
    until = time.monotonic() + SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until, "they continued next to the processes of the next start"
        time.sleep(0.1)


def test_a_lost_machine_shrinks_the_job_and_a_new_one_grows_it(tmp_path: Path, agents: list[Agent]) -> None:
    port = free_port()
    meet = ["--nnodes", "1:2", "--max-restarts", "9", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc", "1"]
    quick = ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command = ["trainer", "launch", *meet, *quick, *write_config(tmp_path, train__steps=100_000)]

    def start(name: str) -> Agent:
        agent = Agent(command, tmp_path / name, HERE)
        agents.append(agent)
        return agent

    first = start("first")
    wait_for([first], "train", step=lambda step: step >= 5)
    second = start("second")
    grown = wait_for(agents, "start", processes=2)
    assert grown["batch_per_process"] == 24, "the step is shared by both"
    wait_for(agents, "checkpoint", time=lambda at: at > grown["time"])
    second.lose()
    lost_at = time.time()
    shrunk = wait_for([first], "start", processes=1, time=lambda at: at > lost_at)
    resumed = wait_for([first], "resume", time=lambda at: at > lost_at)
    assert resumed["step"] >= 10, "it started from the beginning instead of the last checkpoint"
    third = start("third")
    wait_for([first, third], "start", processes=2, time=lambda at: at > shrunk["time"])
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(SECONDS) == 75, first.log.read_text()[-4000:]


def test_a_batch_size_per_process_grows_with_the_job(machines: Machines) -> None:
    machines.changes = {"train.batch_size_is": "per_process", "train.batch_size": 24}
    found = {}
    for world in (1, 2):
        run = machines.start(world, train__run=f"w{world}")
        assert run.wait() == [0] * world
        (found[world],) = (e for e in run.events() if e["event"] == "start")
        result = next(e for e in run.events() if e["event"] == "result")
        assert result["position"] == 4 * 24 * world
    assert [found[w]["batch_size"] for w in (1, 2)] == [24, 48]
    assert [found[w]["batch_per_process"] for w in (1, 2)] == [24, 24]
    assert tiny({"train.batch_size": 24}).for_processes(2).train.batch_size == 24, "a global batch size must not grow"


def test_a_user_error_is_not_repeated_by_a_restart(tmp_path: Path) -> None:
    arguments = write_config(tmp_path, train__batch_size=33, data__source="synthetic")
    ended = trainer("launch", "--nproc", "2", "--max-restarts", "3", *arguments)
    assert ended.returncode == 2
    assert ended.stderr.count("error: ") == 1, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--rdzv-endpoint is missing"),
        (["--nnodes", "3:2", "--rdzv-endpoint", "x:1"], "wrong --nnodes: got '3:2'; allowed"),
        (["--nnodes", "some"], "wrong --nnodes: got 'some'; allowed"),
        (["--max-restarts", "-1"], "wrong --max-restarts: got '-1'; allowed"),
        (["--nproc", "0"], "wrong --nproc: got '0'; allowed"),
        (["--max-restarts"], "option --max-restarts needs a value"),
    ],
)
def test_a_wrong_launcher_option_is_an_error(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        launch(arguments)
    assert message in str(caught.value)
