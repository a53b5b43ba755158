"""A read-only client of Azure Resource Manager, the subscription that it uses, and what its exceptions mean."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from http import HTTPStatus
from typing import Any

from infra.clouds.azure.credentials import LOGIN
from infra.clouds.azure.doctor.causes import CREDENTIALS, DENIED, SUBSCRIPTION, UNREACHABLE
from infra.clouds.azure.registry_token import PushError
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import QueryFailedError

SCOPE = "https://management.azure.com/.default"
GRAPH_SCOPE = "https://graph.microsoft.com/.default"
_SUBSCRIPTION_KEY = "azure-native:subscriptionId"


class Arm:
    """Azure Resource Manager, read-only, with the credentials of azure-identity's default chain.

    The first request finds the subscription and the credentials, so that their failure is a finding of its check.
    """

    def __init__(self, endpoint: str, find_subscription: Callable[[], str], scope: str = SCOPE) -> None:
        """Store the endpoint and how to find the subscription; connect on the first request."""
        self._endpoint, self._find_subscription, self._scope = endpoint, find_subscription, scope

    @cached_property
    def subscription(self) -> str:
        """Return the id of the subscription."""
        return self._find_subscription()

    @property
    def root(self) -> str:
        """Return the path of the subscription."""
        return f"/subscriptions/{self.subscription}"

    @cached_property
    def _client(self) -> Any:
        from azure.core import PipelineClient
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy, HttpLoggingPolicy, RetryPolicy
        from azure.identity import DefaultAzureCredential

        credential = DefaultAzureCredential(exclude_interactive_browser_credential=True, process_timeout=20)
        token = BearerTokenCredentialPolicy(credential, self._scope)
        policies: list[Any] = [RetryPolicy(retry_total=1), token, HttpLoggingPolicy()]
        return PipelineClient(self._endpoint, policies=policies)

    def get(self, path: str, version: str, **query: str) -> Mapping[str, Any]:
        """Return one resource; raise HttpResponseError, which holds Azure's status, if Azure reports an error."""
        from azure.core.rest import HttpRequest

        return self._send(HttpRequest("GET", self._client.format_url(path), params={"api-version": version, **query}))

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer of a query whose conditions are in its body."""
        from azure.core.rest import HttpRequest

        return self._send(HttpRequest("POST", self._client.format_url(path), json=body))

    def list_all(self, path: str, version: str, **query: str) -> Iterator[Mapping[str, Any]]:
        """Yield every entry of a list, page by page."""
        from azure.core.rest import HttpRequest

        page = self.get(path, version, **query)
        while True:
            yield from page.get("value", ())
            next_link = page.get("nextLink")
            if not next_link:
                return
            page = self._send(HttpRequest("GET", str(next_link)))

    def allows(self, scope: str, action: str) -> bool:
        """Return whether these credentials may do `action` at a scope.

        Each entry is one role's permissions: what it allows less what it excludes.
        """
        return any(
            _matches(action, item["actions"]) and not _matches(action, item.get("notActions", ()))
            for item in self.list_all(f"{scope}/providers/Microsoft.Authorization/permissions", "2022-04-01")
        )

    def _send(self, request: Any) -> Mapping[str, Any]:
        # Tokens are sent over TLS only; plain HTTP is for loopback, as in tests.
        https = self._endpoint.startswith("https")
        response = self._client.send_request(request, connection_timeout=5, read_timeout=20, enforce_https=https)
        response.raise_for_status()
        body: Mapping[str, Any] = response.json()
        return body


def _matches(action: str, patterns: Sequence[str]) -> bool:
    """Return whether one of a role's patterns, in which * stands for any text, matches an action."""
    return any(fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)


def chosen_subscription(values: Mapping[str, str]) -> str:
    """Return the subscription that the provider uses: from configuration, environment or the Azure CLI's default."""
    configured = values.get(_SUBSCRIPTION_KEY)
    chosen = configured or os.environ.get("ARM_SUBSCRIPTION_ID") or os.environ.get("AZURE_SUBSCRIPTION_ID")
    if chosen:
        return chosen
    program = shutil.which("az")
    if program is None:
        raise QueryFailedError(SUBSCRIPTION, f"no `az` on PATH, no ARM_SUBSCRIPTION_ID, and no {_SUBSCRIPTION_KEY}")
    answer = subprocess.run(  # noqa: S603 - `az`, with arguments of our own
        [program, "account", "show", "--query", "id", "--output", "tsv"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=25,
    )
    if answer.returncode or not answer.stdout.strip():
        message = " ".join(answer.stderr.split())[:200] or "`az account show` names no subscription"
        raise QueryFailedError(CREDENTIALS, message, is_problem=True, login=LOGIN)
    return answer.stdout.strip()


def explain(error: Exception, arm: Arm | None = None) -> Exception:
    """Return a client's exception as a finding with its cause, any other exception unchanged."""
    if isinstance(error, QueryFailedError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return QueryFailedError(NO_CLIENT, f"the Python package {error.name} is missing")
    from azure.core import exceptions

    text = " ".join(str(getattr(error, "message", None) or error).split())[:300]
    if isinstance(error, exceptions.ClientAuthenticationError):
        return QueryFailedError(CREDENTIALS, text, is_problem=True, login=LOGIN)
    if isinstance(error, exceptions.HttpResponseError):
        return _explain_status(error, error.status_code or 0, text, arm.subscription if arm else "<id>")
    if isinstance(error, PushError) and error.status:
        return _explain_status(error, error.status, text, arm.subscription if arm else "<id>")
    if isinstance(error, (exceptions.AzureError, PushError)):
        return QueryFailedError(UNREACHABLE, text)
    return error


def _explain_status(error: Exception, status: int, text: str, subscription: str) -> Exception:
    """Return an error response as a finding with its cause, unchanged if the status has no known cause."""
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return QueryFailedError(SLOW, text)
    if status == HTTPStatus.UNAUTHORIZED:
        return QueryFailedError(CREDENTIALS, text, is_problem=True, login=LOGIN)
    if status == HTTPStatus.FORBIDDEN:
        return QueryFailedError(DENIED, text, subscription=subscription)
    if status == HTTPStatus.NOT_FOUND and "Subscription" in text:
        return QueryFailedError(SUBSCRIPTION, text, is_problem=True)
    return error
