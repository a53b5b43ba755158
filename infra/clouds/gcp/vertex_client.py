"""Google's client for Vertex AI's jobs, asked so that every refusal is one line for a person.

It is an optional package, and importing it takes seconds.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from infra.clouds.gcp.credentials import LOGIN
from infra.components import optional_packages as packages
from infra.components.one_line_errors import ServiceError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import CustomJob as Job
    from google.cloud.aiplatform_v1 import JobServiceClient

CLIENT = "google.cloud.aiplatform_v1"
#: How the job is found again after a `pulumi up` that was cut off between the request and its answer.
LABEL = "pulumi-request"
#: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/JobState
ENDED = ("JOB_STATE_SUCCEEDED", "JOB_STATE_PARTIALLY_SUCCEEDED")
LOST = ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")
RUNS = ("JOB_STATE_RUNNING", *ENDED)
_BUSY_SECONDS = 120
#: What a quota of machines says, which no waiting fixes; one of requests per minute says "Quota exceeded".
_NO_QUOTA = "exceed quota limits"
ASKED_SECONDS = 60
Value = TypeVar("Value")


class RefusedError(ServiceError):
    """An answer of the service that is an error; its cause is the client's own exception."""


def open_client(endpoint: str) -> JobServiceClient:
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


def parsed(request: Mapping[str, Any]) -> Job:
    """The request in the service's own types, which refuse a field or a value that they do not know."""
    from google.cloud.aiplatform_v1 import CustomJob as Job

    job: Job = Job.from_json(json.dumps(request), ignore_unknown_fields=False)
    return job


def asked(call: Callable[[], Value]) -> Value:
    """The answer, asked again for two minutes while the service is busy; RefusedError says in one line why not."""
    from google.api_core import exceptions, retry
    from google.auth.exceptions import RefreshError, TransportError
    from requests.exceptions import ConnectionError as BrokenError
    from requests.exceptions import Timeout

    busy = (exceptions.TooManyRequests, exceptions.ServerError, BrokenError, Timeout)

    def passing(error: BaseException) -> bool:
        return isinstance(error, busy) and _NO_QUOTA not in str(error)

    try:
        return retry.Retry(predicate=passing, initial=1, maximum=20, timeout=_BUSY_SECONDS)(call)()
    except exceptions.RetryError as error:
        raise RefusedError(f"Vertex AI was asked again and again: {_said(error.cause)}") from error.cause
    except exceptions.GoogleAPICallError as error:
        raise RefusedError(f"Vertex AI refuses: {_said(error)}{_advice(error)}") from error
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


def found(client: JobServiceClient, name: str) -> Job | None:
    """The job, None where there is none."""
    from google.api_core import exceptions

    try:
        return asked(lambda: client.get_custom_job(name=name, retry=None, timeout=ASKED_SECONDS))
    except RefusedError as refused:
        if isinstance(refused.__cause__, exceptions.NotFound):
            return None
        raise


def active(client: JobServiceClient, parent: str, label: str) -> Job | None:
    """A job of the same request that has not ended."""
    request = {"parent": parent, "filter": f'labels.{LABEL}="{label}"'}
    jobs = client.list_custom_jobs(request=request, retry=None, timeout=ASKED_SECONDS)
    return next((job for job in jobs if job.state.name not in (*ENDED, *LOST, "JOB_STATE_CANCELLING")), None)


def started(client: JobServiceClient, job: Job, seconds: float) -> str:
    """The state in which the job is left; ServiceError where it ended without having run, and then it is removed."""
    state, error = wait_for(client, job.name, (*RUNS, *LOST), seconds, None)
    if state not in LOST:
        return state
    removed(client, job.name)
    raise ServiceError(
        f"the job ended as {state.removeprefix('JOB_STATE_')} before it ran: {error or 'no reason given'}"
    )


def wait_for(
    client: JobServiceClient, name: str, states: Sequence[str], seconds: float, wanted: str | None
) -> tuple[str, str]:
    """State and error of a job once it is in one of `states`, or gone; after `seconds` as it is, or ServiceError."""
    until, pause = time.monotonic() + seconds, 0.5
    while True:
        job = found(client, name)
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


def removed(client: JobServiceClient, name: str) -> None:
    """Delete the record of a job that has ended."""
    from google.api_core import exceptions

    try:
        operation = asked(lambda: client.delete_custom_job(name=name, retry=None, timeout=ASKED_SECONDS))
        asked(lambda: operation.result(timeout=300))  # type: ignore[no-untyped-call]
    except RefusedError as refused:
        if not isinstance(refused.__cause__, exceptions.NotFound):
            raise
