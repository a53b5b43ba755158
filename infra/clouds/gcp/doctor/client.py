"""A read-only client of Google's REST APIs, and what its exceptions mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any

from infra.clouds.gcp.credentials import LOGIN
from infra.clouds.gcp.doctor.causes import CREDENTIALS, DENIED, SERVICE, UNREACHABLE
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import QueryFailedError

#: The reasons of an error by a service that the project has not enabled.
DISABLED = frozenset({"SERVICE_DISABLED", "accessNotConfigured"})
_SERVICES = (
    "artifactregistry", "cloudbilling", "cloudkms", "cloudresourcemanager", "compute", "container", "file", "iam",
    "oauth2", "serviceusage", "storage",
)  # fmt: skip
#: The endpoints of the services by the first part of their names.
ENDPOINTS: Mapping[str, str] = {name: f"https://{name}.googleapis.com" for name in _SERVICES}
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


class ApiError(Exception):
    """An error response, with the service's status and reasons."""

    def __init__(self, code: int, status: str, message: str, reasons: Sequence[str]) -> None:
        """Keep the HTTP code, the service's status and its reasons."""
        self.code, self.status, self.reasons = code, status, reasons
        super().__init__(message)


class Rest:
    """Google's REST APIs, read-only, with the application default credentials, which the first request looks up."""

    @cached_property
    def credentials(self) -> Any:
        """Return the application default credentials."""
        import google.auth

        credentials, _ = google.auth.default(scopes=_SCOPES)
        return credentials

    @cached_property
    def _session(self) -> Any:
        from google.auth.transport.requests import AuthorizedSession

        session: Any = AuthorizedSession  # untyped
        return session(self.credentials)

    def get(self, service: str, path: str, **query: str) -> Mapping[str, Any]:
        """Return one resource; raise ApiError if the service reports an error."""
        response = self._session.get(f"{ENDPOINTS[service]}/{path}", params=query, timeout=20)
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            raise _api_error(response)
        body: Mapping[str, Any] = response.json()
        return body

    def post(self, service: str, path: str) -> Mapping[str, Any]:
        """Return the answer of a query that Google serves by POST; raise ApiError if the service reports an error."""
        response = self._session.post(f"{ENDPOINTS[service]}/{path}", json={}, timeout=20)
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            raise _api_error(response)
        body: Mapping[str, Any] = response.json()
        return body

    def list_all(self, service: str, path: str, key: str, **query: str) -> Iterator[Any]:
        """Yield every entry of a list, page by page; of an aggregated list, its name and part.

        Raise QueryFailedError for a list without the entries of a location that did not answer.
        """
        token = ""
        while True:
            page = self.get(service, path, **query, **({"pageToken": token} if token else {}))
            entries = page.get(key) or []
            _require_all_locations(page, entries)
            yield from entries.items() if isinstance(entries, dict) else entries
            token = page.get("nextPageToken", "")
            if not token:
                return


def _require_all_locations(page: Mapping[str, Any], entries: Mapping[str, Any] | Sequence[Any]) -> None:
    """Raise QueryFailedError if a location did not answer, whose entries a list then lacks without an error.

    `unreachable`: https://google.aip.dev/217 (Filestore, Artifact Registry, Storage); `unreachables` and the warning
    UNREACHABLE: https://cloud.google.com/compute/docs/reference/rest/v1/instances/aggregatedList; `missingZones`:
    https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/ListClustersResponse
    """
    missing = [str(name) for field in ("unreachable", "unreachables", "missingZones") for name in page.get(field) or ()]
    parts = entries.items() if isinstance(entries, Mapping) else ()
    for name, part in (("the project", page), *parts):
        warning = part.get("warning") if isinstance(part, Mapping) else None
        if warning and warning.get("code") == "UNREACHABLE":
            missing.append(str(name))
    if missing:
        raise QueryFailedError(SLOW, f"incomplete list, no answer from {', '.join(dict.fromkeys(missing))}")


def _api_error(response: Any) -> ApiError:
    """Parse an error response: https://cloud.google.com/apis/design/errors.

    Compute's older form lists `errors` instead of `details`.
    """
    try:
        body = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return ApiError(response.status_code, "", " ".join(response.text.split())[:200], ())
    reasons = [str(item.get("reason")) for item in (*body.get("details", ()), *body.get("errors", ()))]
    message = " ".join(str(body.get("message", "")).split())[:300]
    return ApiError(response.status_code, str(body.get("status", "")), message, reasons)


def explain(error: Exception, project: str) -> Exception:
    """Return a client's exception as a finding with its cause, any other exception unchanged."""
    if isinstance(error, ModuleNotFoundError):
        return QueryFailedError(NO_CLIENT, f"the Python package {error.name} is missing")
    if isinstance(error, ApiError):
        return _explain_api_error(error, project)
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    text = " ".join(str(error).split())[:300]
    if isinstance(error, GoogleAuthError):
        return QueryFailedError(CREDENTIALS, text, is_problem=True, login=LOGIN)
    if isinstance(error, RequestException):
        return QueryFailedError(UNREACHABLE, text)
    return error


def _explain_api_error(error: ApiError, project: str) -> Exception:
    """Return an error response as a finding with its cause, unchanged if its code has no known cause."""
    if error.code == HTTPStatus.TOO_MANY_REQUESTS or error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return QueryFailedError(SLOW, f"{error.code} {error}")
    if DISABLED & set(error.reasons):
        match = re.search(r"(\w+\.googleapis\.com)", str(error))
        name = match[1] if match else "compute.googleapis.com"
        return QueryFailedError(SERVICE, str(error), services=name, project=project)
    if error.code == HTTPStatus.FORBIDDEN:
        return QueryFailedError(DENIED, str(error), project=project)
    if error.code == HTTPStatus.UNAUTHORIZED:
        return QueryFailedError(CREDENTIALS, str(error), is_problem=True, login=LOGIN)
    return error
