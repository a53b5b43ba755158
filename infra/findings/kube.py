"""A cluster's API as paths and JSON, read only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from infra.findings.common_causes import API_CLOSED, API_FORBIDDEN, API_LOGIN
from infra.findings.model import QueryFailedError

Object = Mapping[str, Any]
_TIMEOUT = (5, 20)


class Kube:
    """One cluster. What it does not answer is a QueryFailedError with the cause."""

    def __init__(self, kubeconfig: str, login: str) -> None:
        """From a kubeconfig's text, which is never written to a disk; `login` renews its credentials."""
        from kubernetes.config import ConfigException, new_client_from_config_dict

        self._login = login
        try:
            self._client = new_client_from_config_dict(yaml.safe_load(kubeconfig), persist_config=False)
        except (ConfigException, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            # The error's text may quote the file, credentials and all.
            told = f"the kubeconfig cannot be used ({type(error).__name__})"
            raise QueryFailedError(API_LOGIN, told, is_problem=True, login=login) from None
        self._client.configuration.retries = False
        self.host = str(self._client.configuration.host)

    def get(self, path: str, **query: str) -> Object:
        """One object or list; an empty one where the cluster does not know the kind."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            found = self._client.call_api(
                path,
                "GET",
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                _request_timeout=_TIMEOUT,
            )
        except ApiException as error:
            return self._refused(path, error)
        except HTTPError as error:
            told = f"{self.host} does not answer ({type(getattr(error, 'reason', None) or error).__name__})"
            raise QueryFailedError(API_CLOSED, told) from None
        assert isinstance(found, dict), f"{path} is no object"
        return found

    def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a list."""
        return list(self.get(path, **query).get("items") or [])

    def _refused(self, path: str, error: Any) -> Object:
        if error.status == 404:  # HTTP: not found
            return {}
        what = path.rpartition("/")[2]
        if error.status == 403:  # HTTP: forbidden
            raise QueryFailedError(API_FORBIDDEN, f"{self.host} refuses to list {what} (403)", what=what) from None
        if error.status == 401:  # HTTP: unauthorised
            raise QueryFailedError(
                API_LOGIN, f"{self.host} knows nobody by these credentials", is_problem=True, login=self._login
            ) from None
        raise QueryFailedError(API_CLOSED, f"{self.host} answers {error.status} for {what}") from None
