"""The boto3 clients of one region, and what their exceptions mean."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from infra.clouds.aws.credentials import LOGIN
from infra.clouds.aws.doctor.causes import CREDENTIALS, DENIED, UNREACHABLE
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import QueryFailedError

Clients = Callable[[str], Any]

#: More than the checks that use one service at the same time: urllib3 logs a warning for each connection above it.
_MAX_CONNECTIONS = 32

_DENIED = ("AccessDenied", "UnauthorizedOperation", "AuthFailure.")
_REJECTED_CREDENTIALS = (
    "ExpiredToken",
    "RequestExpired",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "AuthFailure",
)


def open_clients(region: str) -> Clients:
    """Return a function that creates the client of a service once; its timeouts are short because the user waits."""
    clients: dict[str, Any] = {}
    lock = threading.Lock()  # checks run in parallel, and reading the description of EC2 takes a second

    def client(service: str) -> Any:
        import boto3
        from botocore.config import Config

        with lock:
            if service not in clients:
                config = Config(
                    connect_timeout=5,
                    read_timeout=15,
                    retries={"mode": "standard", "total_max_attempts": 2},
                    max_pool_connections=_MAX_CONNECTIONS,
                )
                clients[service] = boto3.session.Session(region_name=region).client(service, config=config)
        return clients[service]

    return client


def explain(error: Exception, region: str) -> Exception:
    """Return a client's exception as a finding with its cause, any other exception unchanged."""
    if isinstance(error, ModuleNotFoundError):
        return QueryFailedError(NO_CLIENT, f"the Python package {error.name} is missing")
    from botocore import exceptions

    text = " ".join(str(error).split())[:300]
    if isinstance(error, exceptions.ClientError):
        code = str(error.response["Error"]["Code"])
        status = int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return QueryFailedError(SLOW, text)
        if any(denied in code for denied in _DENIED):
            return QueryFailedError(DENIED, text)
        rejected = code in _REJECTED_CREDENTIALS
        return QueryFailedError(CREDENTIALS, text, is_problem=True, login=LOGIN) if rejected else error
    if isinstance(error, (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError)):
        return QueryFailedError(UNREACHABLE, text, region=region)
    if isinstance(error, exceptions.BotoCoreError):
        return QueryFailedError(CREDENTIALS, text, is_problem=True, login=LOGIN)
    return error
