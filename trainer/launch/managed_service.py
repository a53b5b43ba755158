"""Read what a managed training service sets in the environment of each machine of a job.

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

#: torchrun sets these for each worker. The values of the machine must not be mistaken for a worker's.
PROCESS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Machines start minutes apart because each pulls the image; torchrun's default timeout is one minute.
_RENDEZVOUS_SECONDS = 900


@dataclass(frozen=True)
class Machine:
    """One machine of a job: its index, the number of machines, `host:port` of the first, and the service's folders."""

    service: str
    index: int
    count: int
    first: str
    checkpoints: str | None = None
    logs: str | None = None

    @property
    def rendezvous_config(self) -> str:
        """Return torchrun's `--rdzv-conf`, in which the first machine hosts the store."""
        timeouts = f"read_timeout={_RENDEZVOUS_SECONDS},join_timeout={_RENDEZVOUS_SECONDS}"
        return f"is_host={int(self.index == 0)},{timeouts}"

    def checkpoint_uri(self, run: str) -> str | None:
        """Return the `checkpoint.uri` that puts the checkpoints of `run` into the service's folder."""
        if self.checkpoints is None:
            return None
        return root_of_checkpoints(self.checkpoints, run)


def find_machine(service: str, environ: Mapping[str, str]) -> Machine | None:
    """Return this machine as `--service` describes it, None for `none`; raise UserError outside of the service."""
    if service == "none":
        return None
    if service != "auto" and service not in _SERVICES:
        raise UserError(f"unknown --service: got {service!r}; allowed: auto, none, {', '.join(_SERVICES)}")
    candidates = {name: entry for name, entry in _SERVICES.items() if service in ("auto", name)}
    for variables, read in candidates.values():
        if any(variable in environ for variable in variables):
            return read(environ)
    expected = ", ".join(variable for variables, _ in candidates.values() for variable in variables)
    raise UserError(f"--service {service} found no service: none of {expected} is set. Fix: remove --service")


def _vertex(environ: Mapping[str, str]) -> Machine:
    """Read CLUSTER_SPEC: its first pool is the first machine, its second the others; a single machine has none."""
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
        raise UserError(
            f"CLUSTER_SPEC is not a cluster with a task ({error!r}): got {text[:200]}; "
            f"allowed: a task in workerpool0 or workerpool1"
        ) from None
    return Machine("vertex", index, len(machines), machines[0], checkpoints, _mounted(logs))


def _mounted(uri: str | None) -> str | None:
    """Return where Vertex AI mounts a folder of a bucket; logs need it because they append and objects cannot."""
    return uri.replace("gs://", "/gcs/", 1) if uri else None


def _azureml(environ: Mapping[str, str]) -> Machine:
    """Read the variables of a job with one process per machine, whose WORLD_SIZE and RANK count machines."""
    if environ.get("LOCAL_RANK", "0") != "0":
        raise UserError("the service starts several processes per machine. Fix: set process_count_per_instance to 1")
    try:
        count = int(environ.get("WORLD_SIZE", "1"))
        index = int(environ.get("NODE_RANK") or environ.get("RANK") or "0")
    except ValueError as error:
        raise UserError(f"WORLD_SIZE and NODE_RANK must be numbers: {error}") from None
    # PyTorch jobs have MASTER_ADDR, all jobs on a cluster have AZ_BATCH_MASTER_NODE.
    first = environ.get("AZ_BATCH_MASTER_NODE", "")
    if environ.get("MASTER_ADDR"):
        first = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT') or '29400'}"
    if count > 1 and not first:
        raise UserError(
            f"the first of {count} machines is unknown: neither MASTER_ADDR nor AZ_BATCH_MASTER_NODE is set"
        )
    # Both folders are uploaded while the job runs; the studio shows them.
    return Machine("azureml", index, count, first, "outputs", "logs")


_Read = Callable[[Mapping[str, str]], Machine]
#: By service: variables of which at least one is always set, and the function that reads them.
_SERVICES: dict[str, tuple[tuple[str, ...], _Read]] = {
    "vertex": (("CLUSTER_SPEC", "CLOUD_ML_PROJECT_ID"), _vertex),
    "azureml": (("AZUREML_RUN_ID",), _azureml),
}
