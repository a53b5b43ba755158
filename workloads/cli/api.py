"""The Kubernetes API as paths and JSON, with the official client's way to log in.

One generic request serves jobs of every operator alike; the client's generated classes know the built-in kinds only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from workloads.cli.errors import CliError, RefusedError, one_line

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from urllib3 import BaseHTTPResponse

Object = Mapping[str, Any]
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_MERGE = "application/merge-patch+json"


class Api:
    """One cluster. Every method raises RefusedError, in one line, where the server does not do what is asked."""

    def __init__(self, client: ApiClient, mend: str) -> None:
        """`mend` is what a person can do when the server does not answer or knows nobody by these credentials."""
        self.client, self._mend = client, mend
        self.host = str(client.configuration.host).rstrip("/")

    @classmethod
    def from_text(cls, kubeconfig: str, mend: str) -> Api:
        """From a kubeconfig's text, which is never written to a disk."""
        import yaml
        from kubernetes.config import ConfigException, new_client_from_config_dict

        try:
            return cls(new_client_from_config_dict(yaml.safe_load(kubeconfig), persist_config=False), mend)
        except (ConfigException, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            # The error's text may quote the file, credentials and all.
            raise CliError(f"the stack's output `kubeconfig` cannot be used ({type(error).__name__}); {mend}") from None

    @classmethod
    def from_file(cls, path: str, context: str | None) -> Api:
        """From a kubeconfig file."""
        from kubernetes.config import ConfigException, list_kube_config_contexts, new_client_from_config
        from yaml import YAMLError

        try:
            contexts = [str(item["name"]) for item in list_kube_config_contexts(path)[0]]
            if context is not None and context not in contexts:
                raise CliError(f"--context is {context!r}; {path} has: {', '.join(contexts) or 'none'}")
            client = new_client_from_config(path, context=context, persist_config=False)
        except ConfigException as error:
            raise CliError(f"--kubeconfig {path}: {one_line(error)}") from None
        except (YAMLError, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CliError):
                raise
            raise CliError(f"--kubeconfig {path}: not a kubeconfig ({type(error).__name__})") from None
        return cls(client, f"check the server and the user of {path}")

    def get(self, path: str, **query: str) -> Object:
        """One object or list."""
        return cast("Object", json.loads(self._request("GET", path, query).data))

    def find(self, path: str, **query: str) -> Object | None:
        """One object or list; None where there is none, or where the cluster does not know the kind."""
        try:
            return self.get(path, **query)
        except RefusedError as error:
            if error.status == 404:  # HTTP: not found
                return None
            raise

    def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a list; none where the cluster does not know the kind."""
        found = self.find(path, **query)
        return list(found.get("items") or []) if found else []

    def text(self, path: str, **query: str) -> str:
        """A page that is not JSON: logs, metrics."""
        return str(self._request("GET", path, query).data.decode("utf-8", "replace"))

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """A page line by line as it comes; it ends when the server ends it."""
        from urllib3.exceptions import HTTPError

        response = self._request("GET", path, query, stream=True)
        rest = b""
        try:
            for piece in response.stream(65_536, decode_content=True):
                *whole, rest = (rest + piece).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in whole)
        except HTTPError as error:
            raise RefusedError(f"{self.host} broke off: {one_line(error)}", 0) from None
        finally:
            response.close()
        if rest:
            yield rest.decode("utf-8", "replace")

    def patch(self, path: str, body: Object) -> Object:
        """Merge `body` into an object."""
        return cast("Object", json.loads(self._request("PATCH", path, {}, body, kind=_MERGE).data))

    def create(self, path: str, body: Object) -> Object:
        """Add an object to a collection."""
        return cast("Object", json.loads(self._request("POST", path, {}, body).data))

    def delete(self, path: str) -> None:
        """Remove an object and, after it, what it owns."""
        self._request("DELETE", path, {"propagationPolicy": "Background"})

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        *,
        kind: str = "application/json",
        stream: bool = False,
    ) -> BaseHTTPResponse:
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "*/*", "Content-Type": kind}
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
            raise RefusedError(
                f"the API server {self.host} does not answer ({_cause(error)}); {self._mend}", 0
            ) from None
        if response.status >= 400:  # HTTP: every error
            raise self._refused(method, path, response)
        return cast("BaseHTTPResponse", response)

    def _refused(self, method: str, path: str, response: Any) -> RefusedError:
        data = response.read() if response.data is None or not response.data else response.data
        try:
            said = one_line(json.loads(data)["message"])
        except (ValueError, KeyError, TypeError):
            said = one_line(data.decode("utf-8", "replace")) or str(response.reason)
        status = int(response.status)
        if status == 401:  # HTTP: unauthorised
            return RefusedError(f"{self.host} does not accept these credentials (401 {said}); {self._mend}", status)
        if status == 403:  # HTTP: forbidden
            return RefusedError(f"{said} (403); ask the cluster's owner for a role that allows it", status)
        return RefusedError(f"{self.host} answered {status} to {method} {path}: {said}", status)


def _cause(error: BaseException) -> str:
    """The innermost reason, without the addresses of Python objects."""
    reason = getattr(error, "reason", None) or error
    words = one_line(reason, 160)
    return words.rpartition(">: ")[2] or type(error).__name__


def namespaced(namespace: str, kind: str, name: str = "") -> str:
    """The path of a collection or of one object: `pods`, or a key of `PATHS`."""
    root = PATHS.get(kind, "/api/v1")
    return f"{root}/namespaces/{namespace}/{_plural(kind)}" + (f"/{name}" if name else "")


PATHS = {
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


def _plural(kind: str) -> str:
    assert kind in PATHS, f"no path for {kind}"
    return f"{kind.lower()}s"
