"""Errors of dynamic resources, as Pulumi's own provider process reports them to the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from provider_mocks.recording import ROOT
from pulumi import dynamic
from pulumi.dynamic.dynamic import serialize_provider
from pulumi.runtime import rpc
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc
from pulumi.runtime.sync_await import _sync_await

from infra.components.one_line_errors import OneLineProvider, ServiceError


class Refused(OneLineProvider):
    """A provider whose service refuses every request."""

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        """Raise the error of the service."""
        raise ServiceError("the service answers 403")


class Broken(OneLineProvider):
    """A provider with a bug."""

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        """Raise an error that only a stack trace explains."""
        raise KeyError("state")


@pytest.fixture(scope="module")
def servicer() -> Iterator[Any]:
    """Start the process that the engine starts for dynamic resources."""
    folders = (ROOT, Path(__file__).parent, ROOT / "tests" / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-m", "pulumi.dynamic"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        port = process.stdout.readline().strip()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield provider_pb2_grpc.ResourceProviderStub(channel)
        process.kill()


def error_of_create(servicer: Any, provider: dynamic.ResourceProvider) -> str:
    """Return the text that the engine receives when `provider.create` fails."""
    inputs = _sync_await(rpc.serialize_properties({"__provider": serialize_provider(provider)}, {}))
    with pytest.raises(grpc.RpcError) as caught:
        servicer.Create(provider_pb2.CreateRequest(properties=inputs), timeout=60)
    return str(caught.value.details())


def test_the_error_of_a_service_is_shown_in_one_line(servicer: Any) -> None:
    assert error_of_create(servicer, Refused()) == "the service answers 403"


def test_any_other_error_keeps_its_stack_trace(servicer: Any) -> None:
    error_of_create(servicer, Refused())
    text = error_of_create(servicer, Broken())
    assert text.startswith("Traceback (most recent call last):")
    assert "KeyError: 'state'" in text
