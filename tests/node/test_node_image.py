"""The image of `trainer/Dockerfile` in containers as clusters run it: no rights, few places to write to."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import node_image
import pytest
from cluster_plane import wait_for
from node import Node
from node_runs import BUSY, Run, others_load, told

from workloads.manifests import build_manifests
from workloads.objects.pod import CONFIG_DIR, CONFIG_FILE, helper_pod

TINY = {
    "train": {"steps": 40, "batch_size": 64},
    "checkpoint": {"every_steps": 0},
    "metrics": {"log_every": 10},
}
#: From the container's start to the first step, two pods on two processors that do nothing else.
START_SECONDS = 20
#: The settings of the run that owns the volume of all tests here.
RUN = f"--config {CONFIG_DIR}/{CONFIG_FILE}"


@pytest.fixture(scope="module")
def load(node: Node) -> float:
    """Processors that others use before anything is started here."""
    return others_load()


@pytest.fixture(scope="module")
def trained(node: Node, load: float) -> Run:
    """A complete run, whose checkpoint the commands read."""
    run = Run(node, "image", trainer=TINY).start()
    assert run.result()["state"] == "complete"
    return run


def in_container(run: Run, name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and log of the image with some arguments, in a pod as the helpers' are, with the run's settings."""
    facts = run.facts()
    container = {"name": name, "args": list(arguments), "resources": {}}
    pod = helper_pod(facts, component=name, containers=[container])
    pod["spec"]["restartPolicy"] = "Never"
    settings = build_manifests(facts)["config"]["metadata"]["name"]
    pod["spec"]["volumes"].append({"name": "config", "configMap": {"name": settings}})
    # The helpers' containers share one list of mounts.
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    pod["spec"]["containers"][0]["volumeMounts"] = [*mounts, {"name": "config", "mountPath": CONFIG_DIR}]
    metadata = {**pod["metadata"], "name": name, "namespace": run.namespace}
    run.node.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}])

    def ended() -> Any:
        found = run.node.get("pod", name, "--namespace", run.namespace)
        return found["status"].get("containerStatuses", [{}])[0].get("state", {}).get("terminated")

    code = int(wait_for(f"end of {name}", ended, 120)["exitCode"])
    said = run.node.kubectl("logs", name, "--namespace", run.namespace).stdout
    run.node.kubectl("delete", "pod", name, "--namespace", run.namespace)
    return code, said


def test_size_and_layers_of_the_image(programs: None) -> None:
    made = node_image.record()
    told(f"image: {made['size_gib']} GiB packed, built in {sum(made['seconds'].values())} s:")
    for name, seconds in made["seconds"].items():
        told(f"  {seconds:8d} s    {name}")
    for layer in made["layers"]:
        told(f"  {layer['mib']:8.1f} MiB  {' '.join(layer['step'].split())[:100]}")
    code = made["layers"][-1]
    assert code["mib"] < 2, "a changed line of the trainer must not push gigabytes"
    assert made["size_gib"] < 3.5


def test_from_the_start_of_the_container_to_the_first_step(trained: Run, load: float) -> None:
    (first, *_) = trained.events("train")
    pods = trained.pods()
    states = [pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in pods]
    started = min(moment(state["startedAt"]) for state in states)
    seconds = first["time"] - started
    told(f"container to step {first['step']}: {seconds:.1f} s, {load:.1f} processors were busy with other things")
    assert seconds < START_SECONDS or load > BUSY


def moment(text: str) -> float:
    """Kubernetes' time, a whole second."""
    return datetime.fromisoformat(text).timestamp()


COMMANDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "train": ("train --train.steps=3 --train.device=cpu --data.eval-samples=64 --train.run=other", bool),
    "netcheck": ("launch --nproc 2 netcheck --sizes-mib 1", bool),
    "evaluate": (f"evaluate {RUN}", bool),
    "export": (f"export {RUN} --out=/work/model", bool),
    "help": ("--help", lambda said: "preprocess" in said),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_image_runs_every_command_without_rights_on_a_root_that_nobody_writes_to(trained: Run, name: str) -> None:
    """`preprocess` runs as the dataset's Job in the test of the chain."""
    arguments, says = COMMANDS[name]
    code, said = in_container(trained, name, *arguments.split())
    assert code == 0, said
    assert says(said), said


def test_the_container_is_no_root_and_its_root_is_read_only(trained: Run) -> None:
    script = "id -u; touch /app/x || touch /x || echo refused; touch /tmp/x /work/x /data/work/x && echo written"
    code, said = in_container(trained, "rights", "sh", "-c", script)
    assert code == 0, said
    assert said.splitlines()[0] == "10001"
    assert "refused" in said
    assert said.splitlines()[-1] == "written"


def test_a_mistake_ends_the_container_with_code_2_and_one_line(trained: Run) -> None:
    code, said = in_container(trained, "mistake", "train", "--train.batch-size=0")
    assert code == 2
    assert said.startswith("error: ")
    assert "train.batch_size" in said or "--train.batch-size" in said
    assert len(said.splitlines()) == 1, json.dumps(said)
