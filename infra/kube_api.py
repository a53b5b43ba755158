"""A client of the Kubernetes API that works with paths and JSON.

The official client's generated classes cover the built-in kinds only; generic requests read the jobs of every operator.
The official package still parses the kubeconfig and renews credentials. It is imported on first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from infra.text import one_line

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from urllib3 import BaseHTTPResponse

Object = Mapping[str, Any]
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_MERGE_PATCH = "application/merge-patch+json"

#: The API group and version of each kind that this project uses.
API_ROOTS = {
    "Job": "/apis/batch/v1",
    "PyTorchJob": "/apis/kubeflow.org/v1",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1",
    "Deployment": "/apis/apps/v1",
    "Workload": "/apis/kueue.x-k8s.io/v1beta2",
    "PersistentVolumeClaim": "/api/v1",
    "Pod": "/api/v1",
    "Service": "/api/v1",
    "Event": "/api/v1",
}


def api_path(namespace: str, kind: str, name: str = "") -> str:
    """Return the path of one object, or of the collection of a kind if no name is given."""
    assert kind in API_ROOTS, f"no API root for kind {kind}"
    return f"{API_ROOTS[kind]}/namespaces/{namespace}/{kind.lower()}s" + (f"/{name}" if name else "")


class KubeApiError(ValueError):
    """A request that the API server refused or did not answer.

    `status` is the HTTP status, None without an answer. `reason` is the message without the fix.
    """

    def __init__(self, reason: str, *, fix: str = "", status: int | None = None, path: str = "") -> None:
        """Create the error; its text is the reason, then the fix if there is one."""
        super().__init__(f"{reason}. Fix: {fix}" if fix else reason)
        self.reason, self.fix, self.status, self.path = reason, fix, status, path


class KubeconfigError(KubeApiError):
    """A kubeconfig that cannot be used."""


class KubeApi:
    """A client of one cluster. Its methods raise KubeApiError, whose text is one line."""

    def __init__(self, client: ApiClient, fix: str) -> None:
        """Create a client; `fix` tells the user what to do if the server is unreachable or refuses the credentials."""
        self.client, self._fix = client, fix
        self.host = str(client.configuration.host).rstrip("/")

    @classmethod
    def from_text(cls, kubeconfig: str, fix: str) -> KubeApi:
        """Create a client from the text of a kubeconfig, which is never written to disk."""
        import yaml
        from kubernetes.config import ConfigException, new_client_from_config_dict

        try:
            return cls(new_client_from_config_dict(yaml.safe_load(kubeconfig), persist_config=False), fix)
        except (ConfigException, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            # The error's text may quote credentials from the file.
            raise KubeconfigError(f"the kubeconfig cannot be used ({type(error).__name__})", fix=fix) from None

    @classmethod
    def from_file(cls, path: str, context: str | None) -> KubeApi:
        """Create a client from a kubeconfig file."""
        from kubernetes.config import ConfigException, list_kube_config_contexts, new_client_from_config
        from yaml import YAMLError

        try:
            contexts = [str(item["name"]) for item in list_kube_config_contexts(path)[0]]
            if context is not None and context not in contexts:
                allowed = ", ".join(contexts) or "none"
                raise KubeconfigError(f"{path} has no such context: got {context!r}; allowed: {allowed}")
            client = new_client_from_config(path, context=context, persist_config=False)
        except ConfigException as error:
            raise KubeconfigError(f"the kubeconfig {path} cannot be used: {one_line(error)}") from None
        except (YAMLError, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, KubeApiError):
                raise
            raise KubeconfigError(f"{path} is not a kubeconfig ({type(error).__name__})") from None
        return cls(client, f"check the server and the user in {path}")

    def get(self, path: str, **query: str) -> Object:
        """Return one object or list."""
        return cast("Object", json.loads(self._request("GET", path, query).data))

    def find(self, path: str, **query: str) -> Object | None:
        """Return one object or list; None if it does not exist or the cluster does not know its kind."""
        try:
            return self.get(path, **query)
        except KubeApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def items(self, path: str, **query: str) -> list[Object]:
        """Return the objects of a list; empty if the cluster does not know the kind."""
        found = self.find(path, **query)
        return list(found.get("items") or []) if found else []

    def text(self, path: str, **query: str) -> str:
        """Return a response that is not JSON, for example a log or metrics."""
        return str(self._request("GET", path, query).data.decode("utf-8", "replace"))

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Yield the lines of a response as they arrive, until the server closes it."""
        from urllib3.exceptions import HTTPError

        response = self._request("GET", path, query, stream=True)
        rest = b""
        try:
            for chunk in response.stream(65_536, decode_content=True):
                *complete, rest = (rest + chunk).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in complete)
        except HTTPError as error:
            raise KubeApiError(f"{self.host} closed the connection: {one_line(error)}", path=path) from None
        finally:
            response.close()
        if rest:
            yield rest.decode("utf-8", "replace")

    def patch(self, path: str, body: Object) -> Object:
        """Merge `body` into an object."""
        response = self._request("PATCH", path, {}, body, content_type=_MERGE_PATCH)
        return cast("Object", json.loads(response.data))

    def create(self, path: str, body: Object) -> Object:
        """Add an object to a collection."""
        return cast("Object", json.loads(self._request("POST", path, {}, body).data))

    def delete(self, path: str) -> None:
        """Delete an object and, in the background, its dependents."""
        self._request("DELETE", path, {"propagationPolicy": "Background"})

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        stream: bool = False,
    ) -> BaseHTTPResponse:
        """Send one request and return its response; raise KubeApiError if it fails."""
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "*/*", "Content-Type": content_type}
        for setting in self.client.configuration.auth_settings().values():
            headers[setting["key"]] = setting["value"]
        url = f"{self.host}{path}" + (f"?{urlencode(query)}" if query else "")
        timeout = Timeout(connect=_CONNECT_SECONDS, read=None if stream else _READ_SECONDS)
        try:
            response = self.client.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=None if body is None else json.dumps(body),
                preload_content=not stream,
                timeout=timeout,
                retries=False,
            )
        except HTTPError as error:
            reason = f"the API server {self.host} does not answer ({_innermost_reason(error)})"
            raise KubeApiError(reason, fix=self._fix, path=path) from None
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._refusal(method, path, response)
        return cast("BaseHTTPResponse", response)

    def _refusal(self, method: str, path: str, response: Any) -> KubeApiError:
        """Return the error for a response with a status of 400 or more."""
        data = response.data or response.read()
        try:
            message = one_line(json.loads(data)["message"])
        except (ValueError, KeyError, TypeError):
            message = one_line(data.decode("utf-8", "replace")) or str(response.reason)
        status = int(response.status)
        if status == HTTPStatus.UNAUTHORIZED:
            reason, fix = f"{self.host} does not accept these credentials ({status} {message})", self._fix
        elif status == HTTPStatus.FORBIDDEN:
            reason, fix = f"{message} ({status})", "ask the cluster's owner for a role that allows it"
        else:
            reason, fix = f"{self.host} answered {status} to {method} {path}: {message}", ""
        return KubeApiError(reason, fix=fix, status=status, path=path)


def _innermost_reason(error: BaseException) -> str:
    """Return why a connection failed, without the addresses of Python objects."""
    reason = getattr(error, "reason", None) or error
    return one_line(reason, 160).rpartition(">: ")[2] or type(error).__name__
