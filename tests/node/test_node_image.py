"""Tests of the image of `trainer/Dockerfile` as clusters run it: non-root, with a read-only root file system."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import node_image
import pytest
from cluster_plane import wait_for
from node import Node
from node_runs import BUSY, Run, background_load, record_measurement

from workloads.manifests import build_manifests
from workloads.objects.pod import CONFIG_DIR, CONFIG_FILE, helper_pod

TINY = {
    "train": {"steps": 40, "batch_size": 64},
    "checkpoint": {"every_steps": 0},
    "metrics": {"log_every": 10},
}
#: Limit from container start to the first step, for two pods on two idle processors.
START_SECONDS = 20
#: The settings of the run whose volume these tests use.
RUN = f"--config {CONFIG_DIR}/{CONFIG_FILE}"


@pytest.fixture(scope="module")
def load(node: Node) -> float:
    """Return the number of busy processors before the tests start."""
    return background_load()


@pytest.fixture(scope="module")
def trained(node: Node, load: float) -> Run:
    """Return a complete run, whose checkpoint the commands read."""
    run = Run(node, "image", trainer=TINY).start()
    assert run.result()["state"] == "complete"
    return run


def run_in_container(run: Run, name: str, *arguments: str, empty_dir: str | None = None) -> tuple[int, str]:
    """Run the image in a pod with the run's settings, and an empty volume at a path; return exit code and log."""
    facts = run.facts()
    container = {"name": name, "args": list(arguments), "resources": {}}
    pod = helper_pod(facts, component=name, containers=[container])
    pod["spec"]["restartPolicy"] = "Never"
    settings = build_manifests(facts)["config"]["metadata"]["name"]
    pod["spec"]["volumes"].append({"name": "config", "configMap": {"name": settings}})
    # Copied, because containers of helper pods share one list of mounts.
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    pod["spec"]["containers"][0]["volumeMounts"] = [*mounts, {"name": "config", "mountPath": CONFIG_DIR}]
    if empty_dir:
        pod["spec"]["volumes"].append({"name": "empty", "emptyDir": {}})
        pod["spec"]["containers"][0]["volumeMounts"].append({"name": "empty", "mountPath": empty_dir})
    metadata = {**pod["metadata"], "name": name, "namespace": run.namespace}
    run.node.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}])

    def ended() -> Any:
        found = run.node.get("pod", name, "--namespace", run.namespace)
        return found["status"].get("containerStatuses", [{}])[0].get("state", {}).get("terminated")

    code = int(wait_for(f"end of {name}", ended, 120)["exitCode"])
    output = run.node.kubectl("logs", name, "--namespace", run.namespace).stdout
    run.node.kubectl("delete", "pod", name, "--namespace", run.namespace)
    return code, output


def test_the_image_is_small_and_its_code_is_in_a_small_last_layer(programs: None) -> None:
    image = node_image.record()
    record_measurement(f"image: {image['size_gib']} GiB packed, built in {sum(image['seconds'].values())} s:")
    for name, seconds in image["seconds"].items():
        record_measurement(f"  {seconds:8d} s    {name}")
    for layer in image["layers"]:
        record_measurement(f"  {layer['mib']:8.1f} MiB  {' '.join(layer['step'].split())[:100]}")
    code = image["layers"][-1]
    assert code["mib"] < 2, "a changed line of code must not push gigabytes"
    assert image["size_gib"] < 3.5


def test_the_first_step_follows_soon_after_the_container_starts(trained: Run, load: float) -> None:
    (first, *_) = trained.events("train")
    pods = trained.pods()
    states = [pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in pods]
    started = min(to_seconds(state["startedAt"]) for state in states)
    seconds = first["time"] - started
    record_measurement(
        f"container to step {first['step']}: {seconds:.1f} s, {load:.1f} busy processors before the test"
    )
    assert seconds < START_SECONDS or load > BUSY


def to_seconds(text: str) -> float:
    """Return a time of Kubernetes, which has a resolution of one second."""
    return datetime.fromisoformat(text).timestamp()


COMMANDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "train": ("train --train.steps=3 --train.device=cpu --data.eval-samples=64 --train.run=other", bool),
    "netcheck": ("launch --nproc 2 netcheck --sizes-mib 1", bool),
    "evaluate": (f"evaluate {RUN}", bool),
    "export": (f"export {RUN} --out=/work/model", bool),
    "help": ("--help", lambda output: "preprocess" in output),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_image_runs_every_command_as_non_root_on_a_read_only_root(trained: Run, name: str) -> None:
    # The dataset Job in test_node_chain.py covers `preprocess`.
    arguments, is_expected = COMMANDS[name]
    code, output = run_in_container(trained, name, *arguments.split())
    assert code == 0, output
    assert is_expected(output), output


def test_the_container_is_non_root_and_its_root_is_read_only(trained: Run) -> None:
    script = "id -u; touch /app/x || touch /x || echo refused; touch /tmp/x /work/x /data/work/x && echo written"
    code, output = run_in_container(trained, "rights", "sh", "-c", script)
    assert code == 0, output
    assert output.splitlines()[0] == "10001"
    assert "refused" in output
    assert output.splitlines()[-1] == "written"


def test_the_container_loads_a_driver_that_gke_mounts(trained: Run) -> None:
    library, folder = "libcuda.so.1", "/usr/local/nvidia/lib64"
    build = f"echo 'int cuInit() {{ return 42; }}' | gcc -x c -shared -fPIC -o {folder}/{library} -"
    load = f"python -c 'import ctypes; print(ctypes.CDLL(\"{library}\").cuInit())'"
    code, output = run_in_container(trained, "driver", "sh", "-c", f"{build} && {load}", empty_dir=folder)
    assert code == 0, output
    assert output.split() == ["42"]


def test_a_user_error_ends_the_container_with_exit_code_2_and_one_line(trained: Run) -> None:
    code, output = run_in_container(trained, "mistake", "train", "--train.batch-size=0")
    assert code == 2
    assert output.startswith("error: ")
    assert "train.batch_size" in output or "--train.batch-size" in output
    assert len(output.splitlines()) == 1, json.dumps(output)
