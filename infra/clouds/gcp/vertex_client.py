"""Calls of Google's client for Vertex AI jobs, with retries and one-line errors.

The client is an optional package, and importing it takes seconds.
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
#: The label by which a job is found after a `pulumi up` that was interrupted between request and response.
LABEL = "pulumi-request"
#: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/JobState
SUCCEEDED = ("JOB_STATE_SUCCEEDED", "JOB_STATE_PARTIALLY_SUCCEEDED")
FAILED = ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")
STARTED = ("JOB_STATE_RUNNING", *SUCCEEDED)
_RETRY_SECONDS = 120
#: The message of an exhausted quota of machines, which a retry cannot fix; a request rate limit says "Quota exceeded".
_NO_QUOTA = "exceed quota limits"
REQUEST_TIMEOUT_SECONDS = 60
Value = TypeVar("Value")


class RefusedError(ServiceError):
    """An error response of the service; its `__cause__` is the client's exception."""


def open_client(endpoint: str) -> JobServiceClient:
    """Return Google's client over HTTPS, which proxies allow more often than gRPC."""
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.aiplatform_v1 import JobServiceClient
    except ModuleNotFoundError as error:
        raise ServiceError(f"the Python package {error.name} is missing. Fix: {packages.INSTALL}") from None
    try:
        host = endpoint.removeprefix("https://")
        return JobServiceClient(transport="rest", client_options={"api_endpoint": host})
    except DefaultCredentialsError:
        raise ServiceError(f"no credentials of Google Cloud. Fix: {LOGIN}") from None


def parse_job(request: Mapping[str, Any]) -> Job:
    """Parse the request with the service's own types, which reject unknown fields and values."""
    from google.cloud.aiplatform_v1 import CustomJob as Job

    job: Job = Job.from_json(json.dumps(request), ignore_unknown_fields=False)
    return job


def call_with_retry(call: Callable[[], Value]) -> Value:
    """Return a call's result, retried for two minutes while the service is busy, or raise a one-line ServiceError."""
    from google.api_core import exceptions, retry
    from google.auth.exceptions import RefreshError, TransportError
    from requests.exceptions import ConnectionError as BrokenError
    from requests.exceptions import Timeout

    transient = (exceptions.TooManyRequests, exceptions.ServerError, BrokenError, Timeout)

    def is_transient(error: BaseException) -> bool:
        """Return whether a retry may succeed."""
        return isinstance(error, transient) and _NO_QUOTA not in str(error)

    try:
        return retry.Retry(predicate=is_transient, initial=1, maximum=20, timeout=_RETRY_SECONDS)(call)()
    except exceptions.RetryError as error:
        raise RefusedError(
            f"Vertex AI still fails after {_RETRY_SECONDS} s of retries: {_one_line(error.cause)}"
        ) from error.cause
    except exceptions.GoogleAPICallError as error:
        raise RefusedError(f"Vertex AI rejects the request: {_one_line(error)}{_fix(error)}") from error
    except RefreshError as error:
        raise ServiceError(f"Google Cloud rejects the credentials: {_one_line(error)}. Fix: {LOGIN}") from None
    except TransportError as error:
        raise ServiceError(f"Google Cloud cannot be reached: {_one_line(error)}") from None


def _one_line(error: BaseException | None) -> str:
    """Return the service's message on one line, without the request that the client prepends."""
    message = re.sub(r"^[A-Z]+ https?://\S+: ", "", str(getattr(error, "message", None) or error))
    return " ".join(message.split())[:500]


def _fix(error: BaseException) -> str:
    """Return what the user can do about an error, empty if nothing is known."""
    from google.api_core import exceptions

    if isinstance(error, exceptions.TooManyRequests):
        return (
            ". Fix: request more under IAM & Admin > Quotas (service Vertex AI API, this region), or use fewer "
            "machines: pulumi config set --path gpu.nodes.desired 1"
        )
    if isinstance(error, exceptions.Forbidden):
        return (
            ". Fix: get the roles roles/aiplatform.user, to run jobs, and roles/iam.serviceAccountUser, to use the "
            "trainer's account"
        )
    return ""


def find(client: JobServiceClient, name: str) -> Job | None:
    """Return the job, None if it does not exist."""
    from google.api_core import exceptions

    try:
        return call_with_retry(lambda: client.get_custom_job(name=name, retry=None, timeout=REQUEST_TIMEOUT_SECONDS))
    except RefusedError as refused:
        if isinstance(refused.__cause__, exceptions.NotFound):
            return None
        raise


def find_active(client: JobServiceClient, parent: str, label: str) -> Job | None:
    """Return a job of the same request that has not ended, None if there is none."""
    request = {"parent": parent, "filter": f'labels.{LABEL}="{label}"'}
    jobs = client.list_custom_jobs(request=request, retry=None, timeout=REQUEST_TIMEOUT_SECONDS)
    ended = (*SUCCEEDED, *FAILED, "JOB_STATE_CANCELLING")
    return next((job for job in jobs if job.state.name not in ended), None)


def wait_for_start(client: JobServiceClient, job: Job, seconds: float) -> str:
    """Return the job's state once it runs, or after `seconds`; delete it and raise ServiceError if it fails."""
    state, error = wait_for(client, job.name, (*STARTED, *FAILED), seconds, None)
    if state not in FAILED:
        return state
    delete(client, job.name)
    raise ServiceError(
        f"the job ended as {state.removeprefix('JOB_STATE_')} before it ran: {error or 'no reason given'}"
    )


def wait_for(
    client: JobServiceClient, name: str, states: Sequence[str], seconds: float, goal: str | None
) -> tuple[str, str]:
    """Return state and error of a job once it is in one of `states` or deleted.

    After `seconds`, return its current state, or raise ServiceError if a `goal` is given.
    """
    deadline, pause = time.monotonic() + seconds, 0.5
    while True:
        job = find(client, name)
        state = job.state.name if job is not None else "JOB_STATE_CANCELLED"
        if job is None or state in states:
            return state, " ".join(job.error.message.split()) if job is not None else ""
        if time.monotonic() >= deadline:
            break
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(pause * 1.5, 15)
    if goal:
        minutes = math.ceil(seconds / 60)
        raise ServiceError(
            f"the job is not {goal} after {minutes} minutes: {name} is {state}. Fix: run `pulumi destroy` again"
        )
    return state, ""


def delete(client: JobServiceClient, name: str) -> None:
    """Delete the record of a job that has ended."""
    from google.api_core import exceptions

    try:
        operation = call_with_retry(
            lambda: client.delete_custom_job(name=name, retry=None, timeout=REQUEST_TIMEOUT_SECONDS)
        )
        call_with_retry(lambda: operation.result(timeout=300))  # type: ignore[no-untyped-call]
    except RefusedError as refused:
        if not isinstance(refused.__cause__, exceptions.NotFound):
            raise
