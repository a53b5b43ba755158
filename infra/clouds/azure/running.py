"""A resource that cancels a job of Azure Machine Learning before the job is deleted.

The service refuses to delete a running job, and Pulumi's provider cannot cancel one. The states of stacks refer to this
module by its name, so it must not move.
"""

from __future__ import annotations

import os
import time
from http import HTTPStatus
from typing import Any

import pulumi
from pulumi import dynamic

from infra.clouds.azure.credentials import LOGIN
from infra.components import optional_packages as packages
from infra.components.one_line_errors import OneLineProvider, ServiceError

CLIENTS = ("azure.identity", "azure.core")
_VERSION = "2024-10-01"
#: https://learn.microsoft.com/rest/api/azureml/jobs/get, JobStatus
ENDED = ("Canceled", "Completed", "Failed")
_CANCEL_MINUTES = 20
_TIMEOUT_SECONDS = 60


class RunningJob(dynamic.Resource, module="azureml", name="RunningJob"):
    """A running job, given by its resource id: deleting it cancels the job and waits until its machines are free."""

    job: pulumi.Output[str]

    def __init__(self, name: str, *, endpoint: str, job: pulumi.Input[str], opts: pulumi.ResourceOptions) -> None:
        """Register the job's resource id, with a timeout for its cancellation."""
        timeout = pulumi.ResourceOptions(custom_timeouts=pulumi.CustomTimeouts(delete=f"{_CANCEL_MINUTES + 10}m"))
        inputs = {"endpoint": endpoint, "job": job}
        super().__init__(RunningJobProvider(), name, inputs, pulumi.ResourceOptions.merge(opts, timeout))


class RunningJobProvider(OneLineProvider):
    """Cancels the job on delete and does nothing before."""

    def diff(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.DiffResult:
        """Replace the resource for another job; update it for another address of the service."""
        replaces = ["job"] if olds.get("job") != news.get("job") else []
        changed = olds.get("endpoint") != news.get("endpoint")
        return dynamic.DiffResult(bool(replaces) or changed, replaces, [], delete_before_replace=True)

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        """Record the job, which its own resource has submitted."""
        return dynamic.CreateResult(props["job"], {key: props[key] for key in ("endpoint", "job")})

    def update(self, _id: str, _olds: dict[str, Any], news: dict[str, Any]) -> dynamic.UpdateResult:
        """Record the service's address for the cancellation."""
        return dynamic.UpdateResult({key: news[key] for key in ("endpoint", "job")})

    def delete(self, id_: str, props: dict[str, Any]) -> None:
        """Cancel the job and wait for its end; ignore a job that does not exist or has ended."""
        with Arm(props["endpoint"]) as arm:
            if arm.status(id_) in (None, *ENDED):
                return
            try:
                arm.cancel(id_)
            except ServiceError:
                # The job may have ended in the meantime; then it cannot be cancelled.
                if arm.status(id_) not in (None, *ENDED):
                    raise
            deadline, pause = time.monotonic() + 60 * _CANCEL_MINUTES, 0.5
            while (status := arm.status(id_)) not in (None, *ENDED):
                if time.monotonic() > deadline:
                    waited = f"the job is still {status} {_CANCEL_MINUTES} minutes after its cancellation"
                    raise ServiceError(f"{waited}: {id_}. Fix: run `pulumi destroy` again")
                time.sleep(pause)
                pause = min(pause * 1.5, 15)


class Arm:
    """A client of Azure Resource Manager for jobs; its policies retry and honour Retry-After."""

    def __init__(self, endpoint: str) -> None:
        """Open the client, or raise ServiceError if its packages are missing."""
        try:
            from azure.core import PipelineClient
            from azure.core.pipeline import policies
        except ModuleNotFoundError as error:
            raise ServiceError(f"the Python package {error.name} is missing. Fix: {packages.INSTALL}") from None
        self._options: dict[str, Any] = {
            "connection_timeout": _TIMEOUT_SECONDS,
            "enforce_https": endpoint.startswith("https:"),
        }
        self._client: PipelineClient[Any, Any] = PipelineClient(
            endpoint,
            policies=[
                policies.HeadersPolicy(),
                policies.RetryPolicy(retry_total=6),
                policies.BearerTokenCredentialPolicy(credential(), f"{endpoint}/.default"),
            ],
        )

    def __enter__(self) -> Arm:
        """Return the open client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self._client.close()

    def status(self, job: str) -> str | None:
        """Return the job's status, None if it does not exist."""
        response = self._request("GET", job)
        return None if response is None else str(response["properties"]["status"])

    def cancel(self, job: str) -> None:
        """Request the cancellation; the service reports CancelRequested until the job has ended."""
        self._request("POST", f"{job}/cancel")

    def _request(self, method: str, path: str) -> dict[str, Any] | None:
        """Return the JSON response, None if the resource does not exist; raise ServiceError for any other error."""
        from azure.core.exceptions import AzureError
        from azure.core.rest import HttpRequest

        request = HttpRequest(method, f"{path}?api-version={_VERSION}")
        request.url = self._client.format_url(request.url)
        try:
            response = self._client.send_request(request, **self._options)
        except AzureError as error:
            message = " ".join(str(error).split())[:300]
            raise ServiceError(
                f"Azure cannot be reached, or rejects the credentials: {message}. Fix: {LOGIN}"
            ) from None
        if response.status_code == HTTPStatus.NOT_FOUND:
            return None
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            message = " ".join(response.text().split())[:300]
            raise ServiceError(f"Azure Machine Learning returned {response.status_code} to {method} {path}: {message}")
        body: dict[str, Any] = response.json() if response.text() else {}
        return body


def credential() -> Any:
    """Return the credentials of Pulumi's provider: ARM_* if set, else what azure-identity finds (`az login`)."""
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    names = ("ARM_TENANT_ID", "ARM_CLIENT_ID", "ARM_CLIENT_SECRET")
    values = [os.environ.get(name) for name in names]
    if all(values):
        tenant, client, secret = map(str, values)
        return ClientSecretCredential(tenant, client, secret)
    return DefaultAzureCredential()
