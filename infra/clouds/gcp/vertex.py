"""A Vertex AI CustomJob as a resource of Pulumi, whose provider for Google Cloud has none.

The provider runs in a process of the engine's; `vertex_client.py` is how it speaks to the service.
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
from infra.clouds.gcp.vertex_client import ENDED, LABEL, LOST
from infra.components.one_line_errors import OneLineProvider
from infra.contract import ServiceRun

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import CustomJob as Job

_CANCEL_MINUTES = 20
_STRATEGY = {"on_demand": "STANDARD", "reservation": "STANDARD", "spot": "SPOT", "flex_start": "FLEX_START"}


# --- the request -----------------------------------------------------------------------------------------------------


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
    """The body of projects.locations.customJobs.create. The first machine is a pool of its own, as the service wants.

    With this output folder AIP_CHECKPOINT_DIR is where the run's checkpoints lie on every other launcher too.
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
    """The machine; Vertex AI spells the accelerator as Compute Engine does, in capitals."""
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
    """A machine that is lost takes the job with it, and all begin again together, from the newest checkpoint."""
    gpu = settings.gpu
    scheduling: dict[str, Any] = {"strategy": _STRATEGY[gpu.capacity], "restartJobOnWorkerRestart": True}
    if gpu.capacity == "flex_start":
        scheduling["timeout"] = f"{(gpu.max_run_hours or MAX_FLEX_START_HOURS) * 3600}s"
        scheduling["maxWaitDuration"] = f"{(settings.vertex.queue_hours or 24) * 3600}s"
    return scheduling


# --- the resource ----------------------------------------------------------------------------------------------------


class CustomJob(dynamic.Resource, module="vertex", name="CustomJob"):
    """A job in Vertex AI. `request` is its JSON, a secret because `job.env` may hold one; `state` is as last seen.

    What costs money is said beside it, for those who look at a preview and for policies.
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
        # A job that waits for its machines is waited for; the engine must not give up first.
        patient = pulumi.ResourceOptions(
            custom_timeouts=pulumi.CustomTimeouts(create=f"{start_minutes + 10}m", delete=f"{_CANCEL_MINUTES + 10}m")
        )
        super().__init__(CustomJobProvider(), name, inputs, pulumi.ResourceOptions.merge(opts, patient))


class CustomJobProvider(OneLineProvider):
    """Creates, looks at and cancels one CustomJob."""

    def diff(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.DiffResult:
        """A job cannot be changed: another request, project or region is another job, after the old one's end."""
        replaces = [key for key in ("project", "region") if olds.get(key) != news.get(key)]
        if olds.get("digest") != digest(news.get("request")):
            replaces.append("request")
        changed = any(olds.get(key) != news.get(key) for key in ("endpoint", "start_minutes"))
        return dynamic.DiffResult(bool(replaces) or changed, replaces, [], delete_before_replace=True)

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        """Submit and wait until it runs, or has waited long enough in the queue; a job that fails is removed."""
        client = service.open_client(props["endpoint"])
        label = digest(props["request"])
        request = json.loads(props["request"])
        request["labels"] = {**request.get("labels", {}), LABEL: label}
        parent = f"projects/{props['project']}/locations/{props['region']}"

        def submit() -> Job:
            # Asked again at every try: a request whose answer was lost may have made the job.
            return service.active(client, parent, label) or client.create_custom_job(
                parent=parent, custom_job=service.parsed(request), retry=None, timeout=service.ASKED_SECONDS
            )

        job = service.asked(submit)
        state = service.started(client, job, 60 * float(props["start_minutes"]))
        return dynamic.CreateResult(job.name, _outputs(props, state, label))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        """The state now; an empty id tells Pulumi that the job is gone."""
        job = service.found(service.open_client(props["endpoint"]), id_)
        if job is None:
            return dynamic.ReadResult("", {})
        return dynamic.ReadResult(id_, {**_without_provider(props), "state": job.state.name})

    def update(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.UpdateResult:
        """How the service is reached and waited for concerns the next request, not the job."""
        return dynamic.UpdateResult(_outputs(news, olds["state"], olds["digest"]))

    def delete(self, id_: str, props: dict[str, Any]) -> None:
        """Cancel, wait until the machines are given back, remove the job; one that is gone already is no error."""
        from google.api_core import exceptions

        client = service.open_client(props["endpoint"])
        try:
            service.asked(lambda: client.cancel_custom_job(name=id_, retry=None, timeout=service.ASKED_SECONDS))
        except service.RefusedError as refused:
            if isinstance(refused.__cause__, exceptions.NotFound):
                return
            # A job that has ended cannot be cancelled, and need not be.
            job = service.found(client, id_)
            if job is not None and job.state.name not in ENDED + LOST:
                raise
        service.wait_for(client, id_, (*ENDED, *LOST), 60 * _CANCEL_MINUTES, "cancelled")
        service.removed(client, id_)


def digest(request: Any) -> str:
    """Sixteen hexadecimal digits of a request, the same for the same one; none of what is not known yet."""
    return hashlib.sha256(request.encode()).hexdigest()[:16] if isinstance(request, str) else ""


def _outputs(props: Mapping[str, Any], state: str, label: str) -> dict[str, Any]:
    """What the state of the stack keeps: not the request, of which the digest is enough."""
    kept = ("project", "region", "endpoint", "start_minutes", "machineType", "numMachines")
    return {**{key: props[key] for key in kept if key in props}, "state": state, "digest": label}


def _without_provider(props: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in props.items() if key != "__provider"}
