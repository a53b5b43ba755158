"""The manifests as real processes: the ConfigMap's settings and the containers' arguments start a training."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port
from workload_facts import EVERYTHING, ROOT, facts, operators_variables, with_settings

from workloads.facts import Facts
from workloads.manifests import build_manifests
from workloads.objects.pod import CONFIG_DIR

_LIMIT_SECONDS = 240


def small_job(folder: Path, launcher: str) -> Facts:
    """Return a job of two pods that ends in seconds and writes below `folder` only."""
    here = facts("local", {"launcher": launcher})
    config = with_settings(
        here.config,
        train={"batch_size": 64, "steps": 6},
        data={"num_sparse": 3, "eval_samples": 256},
        model={"num_embeddings": 500, "embedding_dim": 8, "dense_arch": (16, 8), "over_arch": (16, 1)},
        checkpoint={"uri": str(folder / "checkpoints")},
        metrics={"dir": str(folder / "runs"), "prometheus_host": "127.0.0.1", "prometheus_port": free_port()},
    )
    return replace(here, config=config)


def container_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's container of a launcher's objects."""
    spec = found.get("job-trainingruntime", found["job"])["spec"]
    if "pytorchReplicaSpecs" in spec:
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    elif "completions" in spec:
        template = spec["template"]
    else:
        template = spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    return container


@contextmanager
def start_pods(found: dict[str, Any], launcher: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the two containers as processes with their arguments, environment and settings."""
    container, port = container_of(found), free_port()
    (folder / "etc").mkdir()
    for name, text in found["config"]["data"].items():
        (folder / "etc" / name).write_text(text)
    args = [arg.replace(CONFIG_DIR, str(folder / "etc")) for arg in container["args"]]
    args = [re.sub(r"^(--rdzv-endpoint)=.*", rf"\1=127.0.0.1:{port}", arg) for arg in args]
    own = {item["name"]: item["value"] for item in container["env"]}
    started = []
    for index in range(2):
        environment = {**os.environ, **own, **operators_variables(launcher, index, port), "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "trainer", *args],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("launcher", ["job", "pytorchjob", "trainjob"])
def test_the_pods_of_a_launcher_train_together_with_the_settings_of_the_config_map(
    launcher: str, tmp_path: Path
) -> None:
    here = small_job(tmp_path, launcher)
    with start_pods(build_manifests(here), launcher, tmp_path) as started:
        outcomes = [process.communicate(timeout=_LIMIT_SECONDS) for process in started]
    assert [process.returncode for process in started] == [0, 0], outcomes
    lines = [line for out, err in outcomes for line in (out + err).splitlines() if line.startswith("{")]
    results = [event for line in lines if (event := json.loads(line)).get("event") == "result"]
    assert len(results) == 1, "the processes of both pods are one job"
    assert list((tmp_path / "checkpoints" / "default").rglob("COMPLETE.json")), "the folder that the cluster sets"
    assert list((tmp_path / "runs").rglob("events.out.tfevents.*")), "the folder that TensorBoard reads"


@pytest.mark.parametrize("step", ["fetch", "preprocess", "netcheck"])
def test_the_companions_arguments_are_valid_for_the_trainers_commands(step: str, tmp_path: Path) -> None:
    """Each command accepts its options and then fails because its data or its peers are missing."""
    found = build_manifests(facts("gcp", EVERYTHING))
    spec = found["netcheck" if step == "netcheck" else "dataset"]["spec"]["template"]["spec"]
    (container,) = (item for item in [*spec["containers"], *spec.get("initContainers", [])] if step in item["args"])
    args = container["args"][container["args"].index(step) :]
    args = [arg.replace("gs://", f"file://{tmp_path}/").replace("/data/", f"{tmp_path}/") for arg in args]
    run = subprocess.run(
        [sys.executable, "-m", "trainer", *args],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
    )
    assert "Traceback" not in run.stderr
    assert "unrecognized" not in run.stderr
    assert "option --" not in run.stderr, run.stderr
    assert run.returncode in {1, 2}, (run.returncode, run.stderr)
