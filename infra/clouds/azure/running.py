"""What cancels a job of Azure Machine Learning before it is deleted: the service deletes none that runs, and Pulumi's
provider does not know how to cancel."""

from __future__ import annotations

import os
import time
from typing import Any

import pulumi
from pulumi import dynamic

from infra.clouds.azure.credentials import LOGIN
from infra.components import optional_packages as packages
from infra.components.one_line_errors import OneLineProvider, ServiceError

CLIENTS = ("azure.identity", "azure.core")
_VERSION = "2024-10-01"
#: https://learn.microsoft.com/rest/api/azureml/jobs/get, JobStatus.
ENDED = ("Canceled", "Completed", "Failed")
_CANCEL_MINUTES = 20
_TIMEOUT_SECONDS = 60


class RunningJob(dynamic.Resource, module="azureml", name="RunningJob"):
    """Stands for the running of a job (its resource id): deleting it ends the job and waits for its machines."""

    job: pulumi.Output[str]

    def __init__(self, name: str, *, endpoint: str, job: pulumi.Input[str], opts: pulumi.ResourceOptions) -> None:
        patient = pulumi.ResourceOptions(custom_timeouts=pulumi.CustomTimeouts(delete=f"{_CANCEL_MINUTES + 10}m"))
        inputs = {"endpoint": endpoint, "job": job}
        super().__init__(RunningJobProvider(), name, inputs, pulumi.ResourceOptions.merge(opts, patient))


class RunningJobProvider(OneLineProvider):
    """Does nothing until the end."""

    def diff(self, _id: str, olds: dict[str, Any], news: dict[str, Any]) -> dynamic.DiffResult:
        """Another job is another running; another address of the service is not."""
        replaces = ["job"] if olds.get("job") != news.get("job") else []
        changed = olds.get("endpoint") != news.get("endpoint")
        return dynamic.DiffResult(bool(replaces) or changed, replaces, [], delete_before_replace=True)

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        """The job was submitted by the resource before this one."""
        return dynamic.CreateResult(props["job"], {key: props[key] for key in ("endpoint", "job")})

    def update(self, _id: str, _olds: dict[str, Any], news: dict[str, Any]) -> dynamic.UpdateResult:
        """The address is used at the end."""
        return dynamic.UpdateResult({key: news[key] for key in ("endpoint", "job")})

    def delete(self, id_: str, props: dict[str, Any]) -> None:
        """Cancel and wait for the end; a job that is gone, or has ended, is let be."""
        with Arm(props["endpoint"]) as arm:
            if arm.status(id_) in (None, *ENDED):
                return
            try:
                arm.cancel(id_)
            except ServiceError:
                # It may have ended in the meantime, and what has ended cannot be cancelled.
                if arm.status(id_) not in (None, *ENDED):
                    raise
            until, pause = time.monotonic() + 60 * _CANCEL_MINUTES, 0.5
            while (status := arm.status(id_)) not in (None, *ENDED):
                if time.monotonic() > until:
                    waited = f"the job is still {status} {_CANCEL_MINUTES} minutes after it was cancelled"
                    raise ServiceError(f"{waited}: {id_}; `pulumi destroy` again")
                time.sleep(pause)
                pause = min(pause * 1.5, 15)


class Arm:
    """Azure's resource manager, as far as a job needs it; the client's own policies retry and honour Retry-After."""

    def __init__(self, endpoint: str) -> None:
        try:
            from azure.core import PipelineClient
            from azure.core.pipeline import policies
        except ModuleNotFoundError as error:
            raise ServiceError(f"the Python package {error.name} is missing; {packages.INSTALL}") from None
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
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def status(self, job: str) -> str | None:
        """JobStatus, None where there is no such job."""
        answer = self._ask("GET", job)
        return None if answer is None else str(answer["properties"]["status"])

    def cancel(self, job: str) -> None:
        """Ask for the end; the service goes on to answer CancelRequested for a while."""
        self._ask("POST", f"{job}/cancel")

    def _ask(self, method: str, path: str) -> dict[str, Any] | None:
        from azure.core.exceptions import AzureError
        from azure.core.rest import HttpRequest

        request = HttpRequest(method, f"{path}?api-version={_VERSION}")
        request.url = self._client.format_url(request.url)
        try:
            answer = self._client.send_request(request, **self._options)
        except AzureError as error:
            said = " ".join(str(error).split())[:300]
            raise ServiceError(f"Azure is not reached, or refuses the credentials: {said}; `{LOGIN}`") from None
        if answer.status_code == 404:  # gone
            return None
        if answer.status_code >= 400:  # HTTP's errors
            said = " ".join(answer.text().split())[:300]
            raise ServiceError(f"Azure Machine Learning answers {answer.status_code} to {method} {path}: {said}")
        found: dict[str, Any] = answer.json() if answer.text() else {}
        return found


def credential() -> Any:
    """As whom Pulumi's provider came: ARM_* where they are set, else whoever azure-identity finds (`az login`)."""
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    names = ("ARM_TENANT_ID", "ARM_CLIENT_ID", "ARM_CLIENT_SECRET")
    given = [os.environ.get(name) for name in names]
    if all(given):
        tenant, client, secret = map(str, given)
        return ClientSecretCredential(tenant, client, secret)
    return DefaultAzureCredential()
