"""A Vertex AI CustomJob as a resource of Pulumi, whose provider for Google Cloud has none.

Google's client is an optional package, and importing it takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pulumi
from pulumi import dynamic

from infra import packages
from infra.clouds.gcp.credentials import LOGIN
from infra.clouds.gcp.settings import MAX_FLEX_START_HOURS, Settings
from infra.contract import ServiceRun
from infra.oneline import OneLineProvider, ServiceError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import CustomJob as Job
    from google.cloud.aiplatform_v1 import JobServiceClient

CLIENT = "google.cloud.aiplatform_v1"
#: How the job is found again after a `pulumi up` that was cut off between the request and its answer.
_LABEL = "pulumi-request"
#: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/JobState
_ENDED = ("JOB_STATE_SUCCEEDED", "JOB_STATE_PARTIALLY_SUCCEEDED")
_LOST = ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")
_RUNS = ("JOB_STATE_RUNNING", *_ENDED)
_CANCEL_MINUTES = 20
_BUSY_SECONDS = 120
#: What a quota of machines says, which no waiting mends; one of requests per minute says "Quota exceeded".
_NO_QUOTA = "exceed quota limits"
_STRATEGY = {"on_demand": "STANDARD", "reservation": "STANDARD", "spot": "SPOT", "flex_start": "FLEX_START"}
Value = TypeVar("Value")


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
    """A job in Vertex AI. `request` is its JSON, a secret because `job.env` may hold one; `state` is as last seen."""

    state: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        *,
        project: str,
        region: str,
        endpoint: str | None,
        start_minutes: int,
        request: pulumi.Input[str],
        opts: pulumi.ResourceOptions,
    ) -> None:
        inputs = {
            "project": project,
            "region": region,
            "endpoint": endpoint or f"https://{region}-aiplatform.googleapis.com",
            "start_minutes": start_minutes,
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
        client = _client(props["endpoint"])
        label = digest(props["request"])
        request = json.loads(props["request"])
        request["labels"] = {**request.get("labels", {}), _LABEL: label}
        parent = f"projects/{props['project']}/locations/{props['region']}"

        def submit() -> Job:
            # Asked again at every try: a request whose answer was lost may have made the job.
            return _active(client, parent, label) or client.create_custom_job(
                parent=parent, custom_job=_parsed(request), retry=None
            )

        job = _asked(submit)
        state = _started(client, job, 60 * float(props["start_minutes"]))
        return dynamic.CreateResult(job.name, _outputs(props, state, label))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        """The state now; an empty id tells Pulumi that the job is gone."""
        job = _found(_client(props["endpoint"]), id_)
        if job is None:
            return dynamic.ReadResult("", {})
        return dynamic.ReadResult(id_, {**_without_provider(props), "state": job.state.name})

    def update(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.UpdateResult:
        """How the service is reached and waited for concerns the next request, not the job."""
        return dynamic.UpdateResult(_outputs(news, olds["state"], olds["digest"]))

    def delete(self, id_: str, props: dict[str, Any]) -> None:
        """Cancel, wait until the machines are given back, remove the job; one that is gone already is no error."""
        from google.api_core import exceptions

        client = _client(props["endpoint"])
        try:
            _asked(lambda: client.cancel_custom_job(name=id_, retry=None))
        except _RefusedError as refused:
            if isinstance(refused.__cause__, exceptions.NotFound):
                return
            # A job that has ended cannot be cancelled, and need not be.
            job = _found(client, id_)
            if job is not None and job.state.name not in _ENDED + _LOST:
                raise
        _wait(client, id_, (*_ENDED, *_LOST), 60 * _CANCEL_MINUTES, "cancelled")
        _removed(client, id_)


def digest(request: Any) -> str:
    """Sixteen hexadecimal digits of a request, the same for the same one; none of what is not known yet."""
    return hashlib.sha256(request.encode()).hexdigest()[:16] if isinstance(request, str) else ""


def _outputs(props: Mapping[str, Any], state: str, label: str) -> dict[str, Any]:
    """What the state of the stack keeps: not the request, of which the digest is enough."""
    kept = {key: props[key] for key in ("project", "region", "endpoint", "start_minutes")}
    return {**kept, "state": state, "digest": label}


def _without_provider(props: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in props.items() if key != "__provider"}


# --- talking to the service ------------------------------------------------------------------------------------------


class _RefusedError(ServiceError):
    """An answer of the service that is an error; its cause is the client's own exception."""


def _client(endpoint: str) -> JobServiceClient:
    """Google's client over plain HTTPS, which proxies let through where gRPC is not."""
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.aiplatform_v1 import JobServiceClient
    except ModuleNotFoundError as error:
        raise ServiceError(f"the Python package {error.name} is missing; {packages.INSTALL}") from None
    try:
        host = endpoint.removeprefix("https://")
        return JobServiceClient(transport="rest", client_options={"api_endpoint": host})
    except DefaultCredentialsError:
        raise ServiceError(f"no credentials of Google Cloud; `{LOGIN}` makes some") from None


def _parsed(request: Mapping[str, Any]) -> Job:
    """The request in the service's own types, which refuse a field or a value that they do not know."""
    from google.cloud.aiplatform_v1 import CustomJob as Job

    return Job.from_json(json.dumps(request), ignore_unknown_fields=False)


def _asked(call: Callable[[], Value]) -> Value:
    """The answer, asked again for two minutes while the service is busy; _RefusedError says in one line why not."""
    from google.api_core import exceptions, retry
    from google.auth.exceptions import RefreshError, TransportError
    from requests.exceptions import ConnectionError as BrokenError

    def passing(error: BaseException) -> bool:
        busy = (exceptions.TooManyRequests, exceptions.ServiceUnavailable, exceptions.GatewayTimeout, BrokenError)
        return isinstance(error, busy) and _NO_QUOTA not in str(error)

    try:
        return retry.Retry(predicate=passing, initial=1, maximum=20, timeout=_BUSY_SECONDS)(call)()
    except exceptions.RetryError as error:
        raise _RefusedError(f"Vertex AI was asked again and again: {_said(error.cause)}") from error.cause
    except exceptions.GoogleAPICallError as error:
        raise _RefusedError(f"Vertex AI refuses: {_said(error)}{_advice(error)}") from error
    except RefreshError as error:
        raise ServiceError(f"Google Cloud refuses the credentials ({_said(error)}); `{LOGIN}` renews them") from None
    except TransportError as error:
        raise ServiceError(f"Google Cloud is not reached: {_said(error)}") from None


def _said(error: BaseException | None) -> str:
    """The service's own words on one line, without the request that the client puts before them."""
    said = re.sub(r"^[A-Z]+ https?://\S+: ", "", str(getattr(error, "message", None) or error))
    return " ".join(said.split())[:500]


def _advice(error: BaseException) -> str:
    """What a person can do about it."""
    from google.api_core import exceptions

    if isinstance(error, exceptions.TooManyRequests):
        return (
            "; ask for more under IAM & Admin > Quotas (service Vertex AI API, this region), or take fewer machines: "
            "pulumi config set --path gpu.nodes.desired 1"
        )
    if isinstance(error, exceptions.Forbidden):
        return (
            "; the role roles/aiplatform.user lets you run jobs, roles/iam.serviceAccountUser as the trainer's account"
        )
    return ""


def _found(client: JobServiceClient, name: str) -> Job | None:
    """The job, None where there is none."""
    from google.api_core import exceptions

    try:
        return _asked(lambda: client.get_custom_job(name=name, retry=None))
    except _RefusedError as refused:
        if isinstance(refused.__cause__, exceptions.NotFound):
            return None
        raise


def _active(client: JobServiceClient, parent: str, label: str) -> Job | None:
    """A job of the same request that has not ended."""
    request = {"parent": parent, "filter": f'labels.{_LABEL}="{label}"'}
    jobs = client.list_custom_jobs(request=request, retry=None)
    return next((job for job in jobs if job.state.name not in (*_ENDED, *_LOST, "JOB_STATE_CANCELLING")), None)


def _started(client: JobServiceClient, job: Job, seconds: float) -> str:
    """The state in which the job is left; ServiceError where it ended without having run, and then it is removed."""
    state, error = _wait(client, job.name, (*_RUNS, *_LOST), seconds, None)
    if state not in _LOST:
        return state
    _removed(client, job.name)
    raise ServiceError(
        f"the job ended as {state.removeprefix('JOB_STATE_')} before it ran: {error or 'no reason given'}"
    )


def _wait(
    client: JobServiceClient, name: str, states: Sequence[str], seconds: float, wanted: str | None
) -> tuple[str, str]:
    """State and error of a job once it is in one of `states`, or gone; after `seconds` as it is, or ServiceError."""
    until, pause = time.monotonic() + seconds, 0.5
    while True:
        job = _found(client, name)
        state = job.state.name if job is not None else "JOB_STATE_CANCELLED"
        if job is None or state in states:
            return state, " ".join(job.error.message.split()) if job is not None else ""
        if time.monotonic() >= until:
            break
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(pause * 1.5, 15)
    if wanted:
        minutes = math.ceil(seconds / 60)
        raise ServiceError(f"the job is not {wanted} after {minutes} minutes ({state}): {name}; `pulumi destroy` again")
    return state, ""


def _removed(client: JobServiceClient, name: str) -> None:
    """Delete the record of a job that has ended."""
    from google.api_core import exceptions

    try:
        _asked(lambda: client.delete_custom_job(name=name, retry=None).result(timeout=300))
    except _RefusedError as refused:
        if not isinstance(refused.__cause__, exceptions.NotFound):
            raise
