"""A Vertex AI CustomJob as a Pulumi resource, which the provider for Google Cloud lacks.

The engine runs the provider in a process of its own; `vertex_client.py` calls the service. The states of stacks refer
to this module by its name, so it must not move.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pulumi
from pulumi import dynamic

from infra.clouds.gcp import vertex_client as service
from infra.clouds.gcp.settings import MAX_FLEX_START_HOURS, Settings
from infra.clouds.gcp.vertex_client import FAILED, LABEL, SUCCEEDED
from infra.components.one_line_errors import OneLineProvider
from infra.contract import ServiceRun

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import CustomJob as Job

_CANCEL_MINUTES = 20
_STRATEGY = {"on_demand": "STANDARD", "reservation": "STANDARD", "spot": "SPOT", "flex_start": "FLEX_START"}


def custom_job(
    settings: Settings,
    run: ServiceRun,
    *,
    image: str,
    arguments: Sequence[str],
    bucket: str,
    account: str,
    tensorboard: str,
) -> dict[str, Any]:
    """Return the body of projects.locations.customJobs.create, with the first machine in a pool of its own.

    With this output folder, AIP_CHECKPOINT_DIR is the run's checkpoint folder of all other launchers too.
    """
    pool = {
        "machineSpec": _machine(settings),
        "replicaCount": "1",
        "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": settings.gpu.boot_disk_gib},
        "containerSpec": {
            "imageUri": image,
            "args": list(arguments),
            "env": [{"name": key, "value": value} for key, value in sorted(run.env.items())],
        },
    }
    pools = [pool, pool | {"replicaCount": str(run.num_nodes - 1)}] if run.num_nodes > 1 else [pool]
    spec: dict[str, Any] = {
        "workerPoolSpecs": pools,
        "scheduling": _scheduling(settings),
        "serviceAccount": account,
        "baseOutputDirectory": {"outputUriPrefix": f"gs://{bucket}/checkpoints/{run.run}"},
    }
    if tensorboard:
        spec["tensorboard"] = tensorboard
    return {"displayName": f"{settings.stack}-{run.run}", "labels": settings.labels, "jobSpec": spec}


def _machine(settings: Settings) -> dict[str, Any]:
    """Return the machine; Vertex AI spells Compute Engine's accelerator types in capitals."""
    instance, gpu = settings.instance, settings.gpu
    assert instance, "checked with the settings"
    machine: dict[str, Any] = {
        "machineType": instance.name,
        "acceleratorType": instance.accelerator.upper().replace("-", "_"),
        "acceleratorCount": instance.num_gpus,
    }
    if gpu.capacity == "reservation" and gpu.reservation_id:
        short = f"projects/{settings.gcp_project}/zones/{settings.zone}/reservations/{gpu.reservation_id}"
        machine["reservationAffinity"] = {
            "reservationAffinityType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [gpu.reservation_id if "/" in gpu.reservation_id else short],
        }
    return machine


def _scheduling(settings: Settings) -> dict[str, Any]:
    """Return a schedule that restarts all machines from the newest checkpoint when one is lost."""
    gpu = settings.gpu
    scheduling: dict[str, Any] = {"strategy": _STRATEGY[gpu.capacity], "restartJobOnWorkerRestart": True}
    if gpu.capacity == "flex_start":
        scheduling["timeout"] = f"{(gpu.max_run_hours or MAX_FLEX_START_HOURS) * 3600}s"
        scheduling["maxWaitDuration"] = f"{(settings.vertex.queue_hours or 24) * 3600}s"
    return scheduling


class CustomJob(dynamic.Resource, module="vertex", name="CustomJob"):
    """A job in Vertex AI, given by its request and its last known state.

    `request` is JSON and a secret, because `job.env` may hold one. Machine type and number are separate
    inputs, so that a preview and the cost policy can read them.
    """

    state: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        *,
        project: str,
        region: str,
        endpoint: str | None,
        start_minutes: int,
        machine_type: str,
        num_machines: int,
        request: pulumi.Input[str],
        opts: pulumi.ResourceOptions,
    ) -> None:
        """Register the job with a timeout that covers its time in the queue."""
        inputs = {
            "project": project,
            "region": region,
            "endpoint": endpoint or f"https://{region}-aiplatform.googleapis.com",
            "start_minutes": start_minutes,
            "machineType": machine_type,
            "numMachines": num_machines,
            "request": pulumi.Output.secret(request),
            "state": None,
        }
        # The engine must wait longer than `create` and `delete` do.
        timeouts = pulumi.ResourceOptions(
            custom_timeouts=pulumi.CustomTimeouts(create=f"{start_minutes + 10}m", delete=f"{_CANCEL_MINUTES + 10}m")
        )
        super().__init__(CustomJobProvider(), name, inputs, pulumi.ResourceOptions.merge(opts, timeouts))


class CustomJobProvider(OneLineProvider):
    """Creates, reads and cancels one CustomJob."""

    def diff(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.DiffResult:
        """Replace the immutable job if its request, project or region changes; delete the old one first."""
        replaces = [key for key in ("project", "region") if olds.get(key) != news.get(key)]
        if olds.get("digest") != digest(news.get("request")):
            replaces.append("request")
        changed = any(olds.get(key) != news.get(key) for key in ("endpoint", "start_minutes"))
        return dynamic.DiffResult(bool(replaces) or changed, replaces, [], delete_before_replace=True)

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        """Submit the job and wait until it runs or `start_minutes` have passed; delete a job that fails."""
        client = service.open_client(props["endpoint"])
        label = digest(props["request"])
        request = json.loads(props["request"])
        request["labels"] = {**request.get("labels", {}), LABEL: label}
        parent = f"projects/{props['project']}/locations/{props['region']}"

        def submit() -> Job:
            """Return the active job of this request, or create one."""
            # Looked up at each retry: a request whose response was lost may have created the job.
            return service.find_active(client, parent, label) or client.create_custom_job(
                parent=parent,
                custom_job=service.parse_job(request),
                retry=None,
                timeout=service.REQUEST_TIMEOUT_SECONDS,
            )

        job = service.call_with_retry(submit)
        state = service.wait_for_start(client, job, 60 * float(props["start_minutes"]))
        return dynamic.CreateResult(job.name, _outputs(props, state, label))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        """Return the current state; an empty id means that the job no longer exists."""
        job = service.find(service.open_client(props["endpoint"]), id_)
        if job is None:
            return dynamic.ReadResult("", {})
        return dynamic.ReadResult(id_, {**_without_provider(props), "state": job.state.name})

    def update(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.UpdateResult:
        """Record the endpoint and the waiting time for the next request; the job itself does not change."""
        return dynamic.UpdateResult(_outputs(news, olds["state"], olds["digest"]))

    def delete(self, id_: str, props: dict[str, Any]) -> None:
        """Cancel the job, wait until its machines are free, then delete it; ignore a job that no longer exists."""
        from google.api_core import exceptions

        client = service.open_client(props["endpoint"])
        try:
            service.call_with_retry(
                lambda: client.cancel_custom_job(name=id_, retry=None, timeout=service.REQUEST_TIMEOUT_SECONDS)
            )
        except service.RefusedError as refused:
            if isinstance(refused.__cause__, exceptions.NotFound):
                return
            # A job that has ended cannot be cancelled.
            job = service.find(client, id_)
            if job is not None and job.state.name not in SUCCEEDED + FAILED:
                raise
        service.wait_for(client, id_, (*SUCCEEDED, *FAILED), 60 * _CANCEL_MINUTES, "cancelled")
        service.delete(client, id_)


def digest(request: Any) -> str:
    """Return sixteen hexadecimal digits of a request's hash, empty if the request is not known yet."""
    return hashlib.sha256(request.encode()).hexdigest()[:16] if isinstance(request, str) else ""


def _outputs(props: Mapping[str, Any], state: str, label: str) -> dict[str, Any]:
    """Return what the stack's state keeps: the digest instead of the request."""
    kept = ("project", "region", "endpoint", "start_minutes", "machineType", "numMachines")
    return {**{key: props[key] for key in kept if key in props}, "state": state, "digest": label}


def _without_provider(props: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties without the serialized provider."""
    return {key: value for key, value in props.items() if key != "__provider"}
