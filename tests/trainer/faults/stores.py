"""Servers of the storage protocols of three clouds on 127.0.0.1, each behind an unreliable proxy."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import importlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loopback import free_port
from unreliable import Proxy

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrec-cloud"
GCS_VERSION, AZURITE_VERSION = "v1.56.1", "3.37.0"


@dataclass
class Bucket:
    """A bucket for checkpoints: its URI, the environment that sends its client through the proxy, and the proxy."""

    uri: str
    environ: dict[str, str]
    proxy: Proxy


@contextmanager
def s3() -> Iterator[Bucket]:
    server = pytest.importorskip("moto.server", reason="moto is not installed: make install-test")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    proxy = Proxy(port)
    keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        yield Bucket("s3://bucket/runs", keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}, proxy)
    finally:
        proxy.close()
        moto.stop()


@contextmanager
def gs() -> Iterator[Bucket]:
    program = _build("fake-gcs-server", _build_gcs)
    port = free_port()
    proxy = Proxy(port)
    url = f"http://127.0.0.1:{proxy.port}"
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-external-url", url]
    with _server([str(program), *where, "-log-level", "error"], port):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/storage/v1/b?project=tests",
            data=b'{"name": "bucket"}',
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        yield Bucket("gs://bucket/runs", {"STORAGE_EMULATOR_HOST": url}, proxy)
    proxy.close()


@contextmanager
def abfs() -> Iterator[Bucket]:
    program = _build(f"azurite-{AZURITE_VERSION}/node_modules/.bin/azurite-blob", _build_azurite)
    port, key = free_port(), base64.b64encode(b"not a secret").decode()
    proxy = Proxy(port)
    command = [str(program), "--silent", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    with _server([*command, "--skipApiVersionCheck", "--disableTelemetry"], port, {"AZURITE_ACCOUNTS": f"tests:{key}"}):
        endpoint = f"http://127.0.0.1:{proxy.port}/tests"
        connection = f"DefaultEndpointsProtocol=http;AccountName=tests;AccountKey={key};BlobEndpoint={endpoint};"
        from azure.storage.blob import BlobServiceClient

        BlobServiceClient.from_connection_string(connection).create_container("bucket")
        yield Bucket("abfs://bucket/runs", {"AZURE_STORAGE_CONNECTION_STRING": connection}, proxy)
    proxy.close()


class _ShortSleeps(ModuleType):
    """The module asyncio with sleeps of at most 0.05 s."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        """Sleep no longer than 0.05 s."""
        await asyncio.sleep(min(seconds, 0.05))


def shorten_client_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stores' own clients retry at once; S3 and Google Cloud wait up to half a minute, Azure 15 s and more."""
    from azure.storage.blob._shared.policies_async import ExponentialRetry

    monkeypatch.setattr(ExponentialRetry, "get_backoff_time", lambda *_: 0.05)
    for name in ("s3fs.core", "aiobotocore.endpoint", "gcsfs.core", "gcsfs.retry"):
        monkeypatch.setattr(importlib.import_module(name), "asyncio", _ShortSleeps("asyncio"))


SERVERS = {"s3": s3, "gs": gs, "abfs": abfs}


def _build(name: str, build: list[str]) -> Path:
    """Build a program on its first use and return its path in the cache; skip the test if that is not possible."""
    program = CACHE / (name if "/" in name else f"bin/{name}")
    if program.exists():
        return program
    tool = build[0]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed, and {program} does not exist")
    program.parent.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environ = os.environ | {"GOBIN": str(CACHE / "bin")}
        done = subprocess.run(build, check=False, env=environ, capture_output=True, text=True, timeout=600)
    if not program.exists():
        pytest.skip(f"`{' '.join(build)}` did not build {program}: {done.stderr[-300:]}")
    return program


_build_gcs = ["go", "install", f"github.com/fsouza/fake-gcs-server@{GCS_VERSION}"]
_prefix = str(CACHE / f"azurite-{AZURITE_VERSION}")
_build_azurite = ["npm", "install", "--no-fund", "--no-audit", "--prefix", _prefix, f"azurite@{AZURITE_VERSION}"]


@contextmanager
def _server(command: list[str], port: int, environ: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env=os.environ | (environ or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{command[0]} did not start (exit code {process.poll()})")
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
