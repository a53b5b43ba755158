"""Runs on the node: the program's own manifests with small settings on CPU, and the logs of their pods."""

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
from workload_facts import facts, record_facts, with_settings

from workloads.facts import Facts
from workloads.manifests import build_manifests
from workloads.runs.pods import pod_index

ROOT = Path(__file__).resolve().parents[2]
#: Longer than any fault: a start on two shared cores, plus the ten seconds that the Job controller waits.
PATIENCE = 240.0
#: Twenty seconds of steps on two cores, with a checkpoint every few seconds.
TRAINER: dict[str, dict[str, Any]] = {
    "data": {"num_dense": 4, "num_sparse": 3, "eval_samples": 4096, "train_samples": 1_000_000},
    "model": {"num_embeddings": [500, 610, 700], "embedding_dim": 8, "dense_arch": [16, 8], "over_arch": [16, 1]},
    "train": {"batch_size": 64, "steps": 700, "precision": "fp32", "num_threads": 1},
    "checkpoint": {"every_steps": 100, "every_minutes": 0},
    "metrics": {"tensorboard": False, "log_every": 20},
}
#: The resource that each launcher creates, by its name in `kubectl`.
KINDS = {"job": "jobs", "pytorchjob": "pytorchjobs", "trainjob": "trainjobs"}
JOB: dict[str, Any] = {"nodes": 2, "cpus": 0.5, "grace_seconds": 20, "tensorboard": {"enabled": False}}


@dataclass
class Run:
    """One run with its own namespace and volume."""

    node: Node
    namespace: str
    launcher: str = "job"
    job: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""
    #: Size of its volume; None means a folder on the machine's disk.
    volume_mib: int | None = None
    #: Logs by pod and restart, also of deleted pods.
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def volume(self) -> str:
        """The folder on the node behind its claim."""
        return f"{node_servers.VOLUME}/{self.namespace}"

    def facts(self) -> Facts:
        """Return the facts of stack `local` with small settings on CPU."""
        config = local_facts(self.node).config
        for settings in (TRAINER, self.trainer):
            config = with_settings(config, **settings)
        job = {**JOB, **self.job, "launcher": self.launcher}
        with mock.patch.dict(os.environ, {"KUBECONFIG": str(self.node.kubeconfig)}):
            changed = facts("local", job, namespace=self.namespace, image=node_image.IMAGE)
        fault = {"grace_seconds": job["grace_seconds"] - 5}
        return replace(changed, config=with_settings(config, fault=fault, train={"run": changed.job.run}))

    def start(self) -> Run:
        """Create namespace, volume and manifests by server-side apply."""
        self.node.run_inside("install", "-d", "-m", "2775", self.volume)
        if self.volume_mib:
            options = f"size={self.volume_mib}m,mode=2775"
            self.node.run_inside("mount", "-t", "tmpfs", "-o", options, "tmpfs", self.volume)
        manifests = build_manifests(self.facts())
        self.node.apply(namespace_and_volume(self.namespace, self.volume))
        self.node.apply(list(manifests.values()))
        self.name = str(manifests["job"]["metadata"]["name"])
        return self

    def pods(self) -> list[dict[str, Any]]:
        """Return the training pods, oldest first."""
        selector = "--selector=app.kubernetes.io/component=training"
        found: list[dict[str, Any]] = self.node.get("pods", "--namespace", self.namespace, selector)
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def pod(self, index: int) -> str:
        """Return the name of the newest pod of an index."""
        return [str(pod["metadata"]["name"]) for pod in self.pods() if pod_index(pod) == index][-1]

    def restart_counts(self, index: int) -> list[tuple[str, int]]:
        """Return the uid and the container's restart count of every existing pod of an index."""
        return [
            (str(pod["metadata"]["uid"]), int(pod["status"]["containerStatuses"][0]["restartCount"]))
            for pod in self.pods()
            if pod_index(pod) == index
        ]

    def read_logs(self) -> None:
        """Save the logs of every pod, including those of earlier containers."""
        for pod in self.pods():
            name = pod["metadata"]["name"]
            command = ["logs", "--namespace", self.namespace, name]
            restarts = sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))
            for number, options in ((restarts - 1, ["--previous"]), (restarts, [])):
                if number >= 0:
                    done = self.node.kubectl(*command, *options, check=False)
                    key = f"{pod['metadata']['uid']}.{number}"
                    if done.returncode == 0 and len(done.stdout) >= len(self.kept.get(key, "")):
                        self.kept[key] = done.stdout

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the trainer's events of a kind from all pods so far, in order of time."""
        self.read_logs()
        found = [event for text in self.kept.values() for event in parse_events(text) if event["event"] == kind]
        return sorted(found, key=lambda event: float(event["time"]))

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has reported a step."""
        wait_for(f"step {step}", lambda: any(event["step"] >= step for event in self.events("train")), PATIENCE)

    def seconds_to_next_step(self, since: float) -> float:
        """Return the seconds from `since` to the first step of an attempt that started later."""

        def reported() -> float | None:
            starts = [event["time"] for event in self.events("start") if event["time"] > since]
            later = [event["time"] for event in self.events("train") if starts and event["time"] > starts[0]]
            return later[0] - since if later else None

        return float(wait_for("step after the fault", reported, PATIENCE))

    def conditions(self) -> dict[str, str]:
        """Return the true conditions of the job, with their reasons."""
        found = self.node.get(KINDS[self.launcher], self.name, "--namespace", self.namespace)
        listed = found.get("status", {}).get("conditions") or []
        return {each["type"]: each.get("reason", "") for each in listed if each["status"] == "True"}

    def result(self) -> dict[str, Any]:
        """Wait until the job is complete, and return the result event."""

        def ended() -> bool:
            self.read_logs()
            return bool({"Complete", "Succeeded", "Failed"} & self.conditions().keys())

        wait_for("end of the job", ended, PATIENCE)
        conditions = self.conditions()
        assert not {"Failed"} & conditions.keys(), f"{conditions}\n{self.describe()}"
        return self.events("result")[-1]

    def describe(self) -> str:
        """Return pods, events and the end of every log, for the message of a failure."""
        self.read_logs()
        tails = [f"--- {name}\n{text[-1500:]}" for name, text in self.kept.items()]
        return "\n".join([self.node.kubectl("get", "pods,events", "--namespace", self.namespace).stdout, *tails])

    def remove(self) -> None:
        """Delete everything that the run created, with a grace period of one second."""
        # The owner first: an operator recreates a missing job.
        for kind in dict.fromkeys((KINDS[self.launcher], "jobs")):
            self.node.kubectl("delete", kind, "--all", "--namespace", self.namespace, "--wait=false")
        self.node.kubectl("delete", "pods", "--all", "--namespace", self.namespace, "--grace-period=1")
        self.node.kubectl("delete", "namespace", self.namespace, "--wait=false")
        self.node.kubectl("delete", "persistentvolume", self.namespace, "--wait=false")


def local_facts(node: Node, settings: tuple[tuple[str, Any], ...] = ()) -> Facts:
    """Return the facts of stack `local` with other settings; it reads a kubeconfig."""
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(node.kubeconfig)}):
        return record_facts("local", settings)


def parse_events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the trainer's events in a log."""
    for line in text.splitlines():
        if line.startswith('{"event"'):
            yield json.loads(line)


def namespace_and_volume(namespace: str, folder: str) -> list[dict[str, Any]]:
    """Return namespace, volume and claim, as stack `local` creates them."""
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


#: Measurements of the tests, for the end of pytest's report.
MEASURED: list[str] = []


def record_measurement(text: str) -> None:
    """Record a measurement for the report."""
    MEASURED.append(text)


def background_load() -> float:
    """Return the number of busy processors over two seconds; time limits are meaningless on a busy machine."""

    def used() -> float:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:8])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(2)
    return (used() - before) / 2


#: With more busy processors than this, no time limit is checked. The servers of an idle node use 0.1 to 0.2.
BUSY = 0.5


def now() -> float:
    """Return the time on the clock of the trainer's events: the node runs on this machine."""
    return time.time()
