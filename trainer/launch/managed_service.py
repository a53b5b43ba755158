"""What a managed training service tells each machine of a job: which one it is, who the others are, where to write.

Vertex AI: https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables and
.../distributed-training#cluster-variables. Azure ML: https://learn.microsoft.com/azure/machine-learning, "Distributed
GPU training guide".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.config.run_paths import root_of_checkpoints
from trainer.errors import UserError

#: Those of one process, which torchrun gives each worker anew. A machine's own would be taken for a worker's.
OF_ONE_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Machines begin minutes apart, as each pulls the image by itself; torchrun would give up after one minute.
_TO_MEET_SECONDS = 900


@dataclass(frozen=True)
class Machine:
    """One machine of a job: its index, their number, `host:port` of the first, and the service's own folders."""

    service: str
    index: int
    count: int
    first: str
    checkpoints: str | None = None
    logs: str | None = None

    @property
    def rendezvous(self) -> str:
        """torchrun's `--rdzv-conf`: the first machine keeps the store, whatever it is called by itself."""
        wait = f"read_timeout={_TO_MEET_SECONDS},join_timeout={_TO_MEET_SECONDS}"
        return f"is_host={int(self.index == 0)},{wait}"

    def checkpoint_uri(self, run: str) -> str | None:
        """`checkpoint.uri` with which the checkpoints of `run` come to lie in the service's folder."""
        if self.checkpoints is None:
            return None
        return root_of_checkpoints(self.checkpoints, run)


def machine(wanted: str, environ: Mapping[str, str]) -> Machine | None:
    """The machine that `--service` speaks of, None for `none`. Raises UserError where the environment says no such."""
    if wanted == "none":
        return None
    if wanted != "auto" and wanted not in _SERVICES:
        raise UserError(f"--service is {wanted!r}; legal: auto, none, {', '.join(_SERVICES)}")
    for name, (marks, read) in _SERVICES.items():
        if wanted in ("auto", name) and any(mark in environ for mark in marks):
            return read(environ)
    looked_for = ", ".join(mark for name, (own, _) in _SERVICES.items() if wanted in ("auto", name) for mark in own)
    raise UserError(f"--service is {wanted}, but none of {looked_for} is set; outside of a service leave --service out")


def _vertex(environ: Mapping[str, str]) -> Machine:
    """CLUSTER_SPEC lists the machines: the first pool is the first machine, the second the rest; one alone has none."""
    logs, checkpoints = environ.get("AIP_TENSORBOARD_LOG_DIR"), environ.get("AIP_CHECKPOINT_DIR")
    text = environ.get("CLUSTER_SPEC", "")
    if not text:
        return Machine("vertex", 0, 1, "", checkpoints, _mounted(logs))
    try:
        spec = json.loads(text)
        pools, task = spec["cluster"], spec["task"]
        machines = [*pools["workerpool0"], *pools.get("workerpool1", [])]
        before = {"workerpool0": 0, "workerpool1": len(pools["workerpool0"])}
        index = before[task["type"]] + int(task["index"])
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"CLUSTER_SPEC is not a cluster with a task in workerpool0 or workerpool1 ({error!r}): {text[:200]}"
        raise UserError(wrong) from None
    return Machine("vertex", index, len(machines), machines[0], checkpoints, _mounted(logs))


def _mounted(uri: str | None) -> str | None:
    """Where Vertex AI mounts a folder of a bucket: a log grows line by line, which no object does."""
    return uri.replace("gs://", "/gcs/", 1) if uri else None


def _azureml(environ: Mapping[str, str]) -> Machine:
    """One process was started per machine: what the service calls WORLD_SIZE and RANK are machines then."""
    if environ.get("LOCAL_RANK", "0") != "0":
        raise UserError("the service starts several processes per machine; set process_count_per_instance to 1")
    try:
        count = int(environ.get("WORLD_SIZE", "1"))
        index = int(environ.get("NODE_RANK") or environ.get("RANK") or "0")
    except ValueError as error:
        raise UserError(f"WORLD_SIZE and NODE_RANK must be numbers of machines: {error}") from None
    # The one is set for PyTorch jobs, the other for all that run on a cluster.
    first = environ.get("AZ_BATCH_MASTER_NODE", "")
    if environ.get("MASTER_ADDR"):
        first = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT') or '29400'}"
    if count > 1 and not first:
        raise UserError(
            f"the job has {count} machines, but neither MASTER_ADDR nor AZ_BATCH_MASTER_NODE says the first"
        )
    # Both folders are uploaded while the job runs; the studio shows them.
    return Machine("azureml", index, count, first, "outputs", "logs")


_Read = Callable[[Mapping[str, str]], Machine]
#: By name: the variables of which one is always there, and who reads them.
_SERVICES: dict[str, tuple[tuple[str, ...], _Read]] = {
    "vertex": (("CLUSTER_SPEC", "CLOUD_ML_PROJECT_ID"), _vertex),
    "azureml": (("AZUREML_RUN_ID",), _azureml),
}
