"""The whole stack on a real node: dataset, netcheck, training to the AUC of the same run outside, and destroy."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import node_image
import node_servers
import pytest
from cluster_operators import PYTORCHJOB, Operator
from cluster_plane import wait_for
from cluster_stack import PROGRAMS, Stack, cluster_wide
from node import Node
from node_runs import ROOT, local_facts, namespace_and_volume, parse_events, record_measurement

from workloads.facts import Facts
from workloads.manifests import build_manifests

NAMESPACE = "training"
ROWS, CARDINALITY = 20_000, 40
TRAINER: dict[str, dict[str, Any]] = {
    "data": {"source": "criteo", "path": "/data/work/criteo", "eval_samples": 0},
    "model": {"num_embeddings": 100, "embedding_dim": 8, "dense_arch": [16, 8], "over_arch": [16, 1]},
    "train": {"batch_size": 64, "steps": 1000, "precision": "fp32", "num_threads": 1},
    "checkpoint": {"every_steps": 250, "every_minutes": 0},
    "metrics": {"log_every": 20},
}
DAYS = {"train_days": list(range(6)), "eval_days": [6]}
SETTINGS: dict[str, Any] = {
    "job.cpus": 0.5,
    "job.grace_seconds": 20,
    "job.dataset.source": "/data/raw",
    "job.dataset.options": ["--ids=hash", "--rows=100"],
    "job.dataset.cpus": 0.5,
    "job.dataset.memory_gib": 2,
    "job.netcheck.enabled": True,
    "trainer.data.criteo.train_days": DAYS["train_days"],
    "trainer.data.criteo.eval_days": DAYS["eval_days"],
} | {f"trainer.{section}.{key}": value for section, keys in TRAINER.items() for key, value in keys.items()}


class Driver(Protocol):
    """Creates and destroys the stack, and runs `python -m workloads` against it."""

    name: str

    def up(self) -> None: ...
    def destroy(self) -> None: ...
    def command(self, word: str, *options: str) -> list[str]: ...
    def workloads(self, word: str, *options: str) -> str: ...


class PulumiDriver:
    """A driver that runs `pulumi up --stack local` and `pulumi destroy`."""

    name = "pulumi up --stack local"

    def __init__(self, node: Node, folder: Path) -> None:
        self.stack = Stack(node, folder)
        self.stack.pulumi("stack", "init", "local")
        for key, value in SETTINGS.items():
            if isinstance(value, list):
                for index, each in enumerate(value):
                    self.stack.set(f"{key}[{index}]", str(each))
            else:
                self.stack.set(key, json.dumps(value).strip('"'))

    def up(self) -> None:
        self.stack.up()

    def destroy(self) -> None:
        self.stack.destroy()

    def command(self, word: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "workloads", word, "--stack", "local", *options]

    def workloads(self, word: str, *options: str) -> str:
        return self.stack.workloads(word, *options)


class ApplyDriver:
    """A driver that applies the same manifests on the server side; like Pulumi, it waits for earlier Jobs."""

    def __init__(self, node: Node, launcher: str, reason: str) -> None:
        self.node, self.name = node, f"server-side apply with launcher {launcher}, {reason}"
        changed = SETTINGS | {"job.launcher": launcher}
        settings = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in changed.items())
        self.facts: Facts = local_facts(node, settings)

    def up(self) -> None:
        manifests = build_manifests(replace(self.facts, image=node_image.IMAGE, namespace=NAMESPACE))
        self.node.apply(namespace_and_volume(NAMESPACE, node_servers.VOLUME))
        gates = [manifests.pop(key) for key in ("dataset", "netcheck", "job")]
        self.node.apply(list(manifests.values()))
        for job in gates:
            self.node.apply([job])
            if job is not gates[-1]:
                name = job["metadata"]["name"]
                wait = ("wait", "--for=condition=Complete", f"job/{name}", "--namespace", NAMESPACE, "--timeout=200s")
                self.node.kubectl(*wait)

    def destroy(self) -> None:
        self.node.kubectl("delete", "namespace", NAMESPACE)
        self.node.kubectl("delete", "persistentvolume", NAMESPACE)

    def command(self, word: str, *options: str) -> list[str]:
        where = ["--kubeconfig", str(self.node.kubeconfig), "--namespace", NAMESPACE, "--run", "default"]
        return [sys.executable, "-m", "workloads", word, *where, *options]

    def workloads(self, word: str, *options: str) -> str:
        return self.node.run(self.command(word, *options), PYTHONPATH=str(ROOT)).stdout


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write click logs in Criteo's format, with a signal in every categorical feature."""
    draw = random.Random(7)
    weights = [[draw.gauss(0, 0.6) for _ in range(CARDINALITY)] for _ in range(26)]
    lines = []
    for _ in range(ROWS):
        ids = [draw.randrange(CARDINALITY) for _ in range(26)]
        dense = [draw.randrange(20) for _ in range(13)]
        logit = sum(weights[feature][each] for feature, each in enumerate(ids)) + 0.1 * (dense[0] - 10) - 0.5
        label = int(draw.random() < 1 / (1 + math.exp(-logit)))
        words = [f"{each * 2654435761 % 2**32:08x}" for each in ids]
        lines.append("\t".join([str(label), *map(str, dense), *words]))
    folder = tmp_path_factory.mktemp("clicks") / "raw"
    folder.mkdir()
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def local_result(programs: None, raw: Path) -> dict[str, Any]:
    """Return the result of the same configuration on this machine, without containers."""
    folder = raw.parent / "outside"
    folder.mkdir()

    def trainer(*arguments: str) -> str:
        command = [sys.executable, "-m", "trainer", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    trainer("preprocess", f"--input={raw}", "--output=criteo", "--ids=hash", "--rows=100")
    tree: dict[str, Any] = {section: dict(keys) for section, keys in TRAINER.items()}
    tree["data"] |= {"path": str(folder / "criteo"), "criteo": DAYS}
    tree["train"]["device"] = "cpu"
    tree["metrics"]["progress"] = "lines"
    (folder / "config.json").write_text(json.dumps(tree))
    output = trainer("launch", "--nproc=2", "train", "--config=config.json")
    return next(event for event in parse_events(output) if event["event"] == "result")


@pytest.fixture(params=["job", "pytorchjob"])
def driver(
    request: pytest.FixtureRequest,
    node: Node,
    raw: Path,
    operators: Callable[[Operator], None],
    tmp_path: Path,
) -> Iterator[Driver]:
    """Yield a driver whose data is in place, before `up`."""
    node.run_inside("cp", "--recursive", str(raw), f"{node_servers.VOLUME}/raw")
    if request.param == "pytorchjob":
        operators(PYTORCHJOB)
        yield ApplyDriver(node, request.param, "because pulumi would download its operator")
    elif all(shutil.which(program) for program in PROGRAMS):
        yield PulumiDriver(node, tmp_path)
    else:
        yield ApplyDriver(node, request.param, "because pulumi or its plugins are not on PATH")
    node.run_inside("sh", "-c", f"rm -rf {node_servers.VOLUME}/*")


def read_status(driver: Driver) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(driver.workloads("status", "--json"))
    return found


def companion_states(status: Mapping[str, Any], component: str) -> Sequence[str]:
    return [each["state"] for each in status["companions"] if each["component"] == component]


def list_tensorboard_runs(node: Node, driver: Driver) -> list[str]:
    """Return the runs that TensorBoard lists, reached through the user's command."""
    assert "KUBECONFIG" not in driver.command("tensorboard")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KUBECONFIG": str(node.kubeconfig)}
    if isinstance(driver, PulumiDriver):
        environment |= driver.stack.environment()
    command = [*node.inside, *driver.command("tensorboard", "--port=0")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+) ", line := process.stdout.readline())
        assert found, line or (process.stderr and process.stderr.read())
        fetch = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
        url = f"http://127.0.0.1:{found[1]}/data/runs"
        listed: list[str] = json.loads(node.run([sys.executable, "-c", fetch, url]).stdout)
        return listed
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_stack_prepares_data_trains_and_is_destroyed(
    node: Node, driver: Driver, local_result: dict[str, Any]
) -> None:
    record_measurement(f"the stack is created by {driver.name}")
    before, began = cluster_wide(node), time.monotonic()
    driver.up()
    created = time.monotonic()
    status = wait_for(
        "running job", lambda: (seen := read_status(driver))["state"] in ("running", "succeeded") and seen
    )
    assert companion_states(status, "dataset") == ["succeeded"]
    assert companion_states(status, "netcheck") == ["succeeded"]
    assert len(status["pods"]) == 2

    # The status reads numbers from the log until the metrics endpoint answers.
    scraped = lambda: (seen := read_status(driver)["metrics"]) and seen["source"].endswith("port 9400") and seen  # noqa: E731
    numbers = wait_for("numbers from the metrics endpoint", scraped, 120)
    assert 0 < numbers["step"] <= TRAINER["train"]["steps"]
    assert "step" in driver.workloads("metrics")

    wait_for("end of the run", lambda: read_status(driver)["state"] == "succeeded", 240)
    ended = time.monotonic()
    logs = driver.workloads("logs")
    results = [
        event for line in logs.splitlines() for event in parse_events(line[line.find("{") :]) if is_result(event)
    ]
    assert results, f"the logs do not contain the result: {logs[-2000:]}\n{node.get('pods', '--namespace', NAMESPACE)}"
    (result,) = results
    assert result["auc"] == pytest.approx(local_result["auc"], abs=1e-6)
    assert result["loss"] == pytest.approx(local_result["loss"], abs=1e-6)
    assert result["auc"] > 0.75, "the data has a signal"
    wait_for("ready TensorBoard", lambda: companion_states(read_status(driver), "tensorboard") == ["running"], 120)
    assert any("default" in each for each in list_tensorboard_runs(node, driver))

    driver.destroy()
    wait_for("end of the namespace", lambda: node.kubectl("get", "ns", NAMESPACE, check=False).returncode != 0, 120)
    wait_for("end of cluster-scoped objects", lambda: cluster_wide(node) <= before)
    containers = ("ctr", "--address", node_servers.CONTAINERD, "--namespace", "k8s.io", "tasks", "list", "--quiet")
    wait_for("end of all containers", lambda: node.run_inside(*containers).stdout == "")
    record_measurement(
        f"up {created - began:.0f} s with dataset and netcheck, training {ended - created:.0f} s, "
        f"AUC {result['auc']:.4f} as outside, destroy {time.monotonic() - ended:.0f} s"
    )


def is_result(event: Mapping[str, Any]) -> bool:
    return event["event"] == "result"
