"""Runs of the product on the node: its own manifests, small and on CPU, and what their pods wrote."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import node_image
import node_servers
from cluster_plane import wait_for
from node import Node
from workload_facts import facts, recorded, with_settings

from workloads.facts import Facts
from workloads.manifests import build_manifests
from workloads.runs.pods import pod_index

ROOT = Path(__file__).resolve().parents[2]
#: Beyond what a fault may take: a start on two shared cores, and the ten seconds that the Job controller waits.
PATIENCE = 240.0
#: Twenty seconds of steps on two cores, with a checkpoint in each few seconds.
TRAINER: dict[str, dict[str, Any]] = {
    "data": {"num_dense": 4, "num_sparse": 3, "eval_samples": 4096, "train_samples": 1_000_000},
    "model": {"num_embeddings": [500, 610, 700], "embedding_dim": 8, "dense_arch": [16, 8], "over_arch": [16, 1]},
    "train": {"batch_size": 64, "steps": 700, "precision": "fp32", "num_threads": 1},
    "checkpoint": {"every_steps": 100, "every_minutes": 0},
    "metrics": {"tensorboard": False, "log_every": 20},
}
#: What each launcher makes, as `kubectl` calls it.
KINDS = {"job": "jobs", "pytorchjob": "pytorchjobs", "trainjob": "trainjobs"}
JOB: dict[str, Any] = {"nodes": 2, "cpus": 0.5, "grace_seconds": 20, "tensorboard": {"enabled": False}}


@dataclass
class Run:
    """One run in a namespace of its own, with a volume of its own."""

    node: Node
    namespace: str
    launcher: str = "job"
    job: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""
    #: Room on its volume; without it the machine's disk.
    volume_mib: int | None = None
    #: Logs of pods that have gone since, by pod.
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def volume(self) -> str:
        """The folder of the node that its claim shows."""
        return f"{node_servers.VOLUME}/{self.namespace}"

    def facts(self) -> Facts:
        """Stack `local` on CPU, smaller."""
        config = local_facts(self.node).config
        for settings in (TRAINER, self.trainer):
            config = with_settings(config, **settings)
        job = {**JOB, **self.job, "launcher": self.launcher}
        with mock.patch.dict(os.environ, {"KUBECONFIG": str(self.node.kubeconfig)}):
            changed = facts("local", job, namespace=self.namespace, image=node_image.IMAGE)
        own = {"grace_seconds": job["grace_seconds"] - 5}
        return replace(changed, config=with_settings(config, fault=own, train={"run": changed.job.run}))

    def start(self) -> Run:
        """Namespace, volume and the product's objects, by server-side apply."""
        self.node.within("install", "-d", "-m", "2775", self.volume)
        if self.volume_mib:
            options = f"size={self.volume_mib}m,mode=2775"
            self.node.within("mount", "-t", "tmpfs", "-o", options, "tmpfs", self.volume)
        made = build_manifests(self.facts())
        self.node.apply(surroundings(self.namespace, self.volume))
        self.node.apply(list(made.values()))
        self.name = str(made["job"]["metadata"]["name"])
        return self

    def pods(self) -> list[dict[str, Any]]:
        """The pods that train, the oldest first."""
        selector = "--selector=app.kubernetes.io/component=training"
        found: list[dict[str, Any]] = self.node.get("pods", "--namespace", self.namespace, selector)
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def pod(self, index: int) -> str:
        """The newest pod of an index."""
        return [str(pod["metadata"]["name"]) for pod in self.pods() if pod_index(pod) == index][-1]

    def lives(self, index: int) -> list[tuple[str, int]]:
        """Every pod of an index that is still known, with how often its container was started again."""
        return [
            (str(pod["metadata"]["uid"]), int(pod["status"]["containerStatuses"][0]["restartCount"]))
            for pod in self.pods()
            if pod_index(pod) == index
        ]

    def read_logs(self) -> None:
        """Keep what every pod has written so far, of earlier containers too."""
        for pod in self.pods():
            name = pod["metadata"]["name"]
            asked = ["logs", "--namespace", self.namespace, name]
            restarts = sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))
            for number, options in ((restarts - 1, ["--previous"]), (restarts, [])):
                if number >= 0:
                    done = self.node.kubectl(*asked, *options, check=False)
                    key = f"{pod['metadata']['uid']}.{number}"
                    if done.returncode == 0 and len(done.stdout) >= len(self.kept.get(key, "")):
                        self.kept[key] = done.stdout

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The trainer's events of a kind over all pods that were ever seen, in the order of their times."""
        self.read_logs()
        found = [event for text in self.kept.values() for event in parsed(text) if event["event"] == kind]
        return sorted(found, key=lambda event: float(event["time"]))

    def wait_for_step(self, step: int) -> None:
        """Until the run has reported a step."""
        wait_for(f"step {step}", lambda: any(event["step"] >= step for event in self.events("train")), PATIENCE)

    def seconds_to_next_step(self, since: float) -> float:
        """From a moment to the first report of an attempt that began after it."""

        def reported() -> float | None:
            starts = [event["time"] for event in self.events("start") if event["time"] > since]
            later = [event["time"] for event in self.events("train") if starts and event["time"] > starts[0]]
            return later[0] - since if later else None

        return float(wait_for("step after the fault", reported, PATIENCE))

    def conditions(self) -> dict[str, str]:
        """Those of the job that hold, with their reasons."""
        found = self.node.get(KINDS[self.launcher], self.name, "--namespace", self.namespace)
        listed = found.get("status", {}).get("conditions") or []
        return {each["type"]: each.get("reason", "") for each in listed if each["status"] == "True"}

    def result(self) -> dict[str, Any]:
        """What the run says at its end, once the job is complete."""

        def ended() -> bool:
            self.read_logs()
            return bool({"Complete", "Succeeded", "Failed"} & self.conditions().keys())

        wait_for("end of the job", ended, PATIENCE)
        conditions = self.conditions()
        assert not {"Failed"} & conditions.keys(), f"{conditions}\n{self.said()}"
        return self.events("result")[-1]

    def said(self) -> str:
        """The last lines of everything, for a failure's message."""
        self.read_logs()
        tails = [f"--- {name}\n{text[-1500:]}" for name, text in self.kept.items()]
        return "\n".join([self.node.kubectl("get", "pods,events", "--namespace", self.namespace).stdout, *tails])

    def remove(self) -> None:
        """Everything that it made; an ended test waits for no grace."""
        # The owner first: an operator makes a job that is missing anew.
        for kind in dict.fromkeys((KINDS[self.launcher], "jobs")):
            self.node.kubectl("delete", kind, "--all", "--namespace", self.namespace, "--wait=false")
        gone = ("delete", "pods", "--all", "--namespace", self.namespace, "--grace-period=1")
        self.node.kubectl(*gone)
        self.node.kubectl("delete", "namespace", self.namespace, "--wait=false")
        self.node.kubectl("delete", "persistentvolume", self.namespace, "--wait=false")


def local_facts(node: Node, settings: tuple[tuple[str, Any], ...] = ()) -> Facts:
    """Those of stack `local`, which reads a kubeconfig, with other settings."""
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(node.kubeconfig)}):
        return recorded("local", settings)


def parsed(text: str) -> Iterator[dict[str, Any]]:
    """The lines of a log that are the trainer's events."""
    for line in text.splitlines():
        if line.startswith('{"event"'):
            yield json.loads(line)


def surroundings(namespace: str, folder: str) -> list[dict[str, Any]]:
    """Namespace, volume and claim as stack `local` has them."""
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {"capacity": size, "hostPath": {"path": folder}, "persistentVolumeReclaimPolicy": "Retain"}
    claim = {"resources": {"requests": size}, "volumeName": namespace}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": level}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": namespace},
            "spec": {**common, **volume},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "datasets", "namespace": namespace},
            "spec": {**common, **claim},
        },
    ]


#: What the tests measured, for the end of pytest's report.
MEASURED: list[str] = []


def told(text: str) -> None:
    """Note a measurement."""
    MEASURED.append(text)


def others_load() -> float:
    """Processors of this machine that are in use, over two seconds; a limit in seconds says nothing beside others."""

    def used() -> float:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:8])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(2)
    return (used() - before) / 2


#: Above this many used processors no limit in seconds is asserted. An idle node's servers take a tenth of one or two.
BUSY = 0.5


def now() -> float:
    """The clock of the trainer's events: the node is this machine."""
    return time.time()
