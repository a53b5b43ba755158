"""A fake Vertex AI with the REST API of jobs on 127.0.0.1.

It validates requests with the service's published types and rejects what the types do not express, such as several
machines in the first pool.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt
from google.cloud.aiplatform_v1 import AcceleratorType, CustomJob
from google.protobuf.json_format import ParseError
from loopback import Handler, serve

Answer = tuple[int, dict[str, Any]]
ACCOUNT = "trainer@my-project.iam.gserviceaccount.com"
_JOBS = re.compile(r"/v1/(projects/([^/]+)/locations/([^/]+))/customJobs(?:/(\d+))?(:cancel)?$")
#: google.rpc.Code by HTTP status.
_CODES = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
_CODES |= {503: "UNAVAILABLE"}
_ENDED = ("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED")


@dataclass
class Service:
    """The state of the fake service.

    `path` are the states of a new job, one per read. `refusals` are the responses to the first requests to create;
    `lost` is the number of responses that never arrive.
    """

    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    path: list[str] = field(default_factory=lambda: ["JOB_STATE_PENDING", "JOB_STATE_RUNNING"])
    error: str = ""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    lost: int = 0
    num_cancelling_reads: int = 2
    public_key: str = ""
    requests: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, url: str, body: dict[str, Any]) -> Answer | None:
        """Handle a request and return status and body, None for a connection that breaks afterwards."""
        parts = urlsplit(url)
        self.requests.append(f"{method} {parts.path}")
        if "/operations/" in parts.path:
            return 200, {"name": parts.path.removeprefix("/v1/"), "done": True, "response": {"@type": _EMPTY}}
        found = _JOBS.match(parts.path)
        if not found:
            return _refusal(404, f"The requested URL {parts.path} was not found on this server.")
        parent, _project, _region, number, verb = found.groups()
        if method == "POST" and not number:
            return self._create(parent, body)
        if method == "GET" and not number:
            return self._list(parse_qs(parts.query))
        job = self.jobs.get(f"{parent}/customJobs/{number}")
        if job is None:
            return _refusal(404, f"CustomJob does not exist: {parent}/customJobs/{number}.")
        if method == "POST" and verb:
            return self._cancel(job)
        return self._delete(job) if method == "DELETE" else (200, self._read(job))

    def _create(self, parent: str, body: dict[str, Any]) -> Answer | None:
        if self.refusals:
            return _refusal(*self.refusals.pop(0))
        error = find_error(body, parent)
        if error:
            return _refusal(400, error)
        name = f"{parent}/customJobs/{len(self.jobs) + len(self.deleted) + 1000}"
        job = body | {"name": name, "state": "JOB_STATE_QUEUED", "createTime": "2026-11-21T00:00:00Z"}
        self.jobs[name] = {"job": job, "path": list(self.path), "error": self.error}
        if self.lost:
            self.lost -= 1
            return None
        return 200, job

    def _list(self, query: dict[str, list[str]]) -> Answer:
        match = re.fullmatch(r'labels\.([a-z-]+)="([0-9a-f]+)"', query["filter"][0])
        assert match, f"unknown filter: {query}"
        key, value = match.groups()
        return 200, {"customJobs": [one["job"] for one in self.jobs.values() if one["job"]["labels"].get(key) == value]}

    def _read(self, held: dict[str, Any]) -> dict[str, Any]:
        if held["path"]:
            held["job"]["state"] = held["path"].pop(0)
        if held["job"]["state"] == "JOB_STATE_FAILED":
            held["job"]["error"] = {"code": 3, "message": held["error"]}
        job: dict[str, Any] = held["job"]
        return job

    def _cancel(self, held: dict[str, Any]) -> Answer:
        if held["job"]["state"] in _ENDED:
            return _refusal(400, "CustomJob is already in a terminal state.", "FAILED_PRECONDITION")
        held["path"] = ["JOB_STATE_CANCELLING"] * self.num_cancelling_reads + ["JOB_STATE_CANCELLED"]
        return 200, {}

    def _delete(self, held: dict[str, Any]) -> Answer:
        job = held["job"]
        if job["state"] not in _ENDED:
            return _refusal(400, "CustomJob is not in a terminal state and cannot be deleted.", "FAILED_PRECONDITION")
        del self.jobs[job["name"]]
        self.deleted.append(job["name"])
        operation = job["name"].replace("customJobs/", "operations/")
        return 200, {"name": operation, "done": False}


_EMPTY = "type.googleapis.com/google.protobuf.Empty"


def _refusal(status: int, message: str, code: str | None = None) -> Answer:
    return status, {"error": {"code": status, "message": message, "status": code or _CODES[status]}}


def find_error(body: dict[str, Any], parent: str) -> str | None:
    """Return why the service rejects a job, None if it accepts it."""
    try:
        job = CustomJob.from_json(json.dumps(body), ignore_unknown_fields=False)
    except ParseError as error:
        return f"Invalid JSON payload received. {error}"
    spec, region = job.job_spec, parent.rpartition("/")[2]
    pools = spec.worker_pool_specs
    if not job.display_name:
        return "display_name is required."
    if not pools or pools[0].replica_count != 1:
        return "WorkerPoolSpec[0].replica_count must be 1."
    for pool in pools:
        if not pool.container_spec.image_uri:
            return "container_spec.image_uri is required."
        if pool.machine_spec.accelerator_type == AcceleratorType.ACCELERATOR_TYPE_UNSPECIFIED:
            return f"Machine type {pool.machine_spec.machine_type} needs an accelerator."
        if pool.replica_count < 1:
            return "replica_count must be at least 1."
    if spec.tensorboard:
        if not re.fullmatch(rf"projects/[^/]+/locations/{region}/tensorboards/\d+", spec.tensorboard):
            return f"tensorboard {spec.tensorboard} is not a Tensorboard of {region}."
        if not (spec.service_account and spec.base_output_directory.output_uri_prefix):
            return "service_account and base_output_directory are required with tensorboard."
    if spec.base_output_directory.output_uri_prefix[:5] not in ("", "gs://"):
        return "base_output_directory must be a Cloud Storage URI."
    for key, value in job.labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            return f"label {key}={value} is malformed."
    return None


@contextmanager
def serve_vertex(service: Service) -> Iterator[Service]:
    """Serve the API on a free port."""

    class ServiceHandler(Handler):
        def _serve(self) -> None:
            text = self.body()
            if not _signed(self.headers.get("Authorization", ""), service.public_key):
                return self._send(*_refusal(401, "Request had invalid authentication credentials.", "UNAUTHENTICATED"))
            with service.lock:
                answer = service.answer(self.command, self.path, json.loads(text or "{}"))
            if answer is None:
                self.connection.close()
                return None
            return self._send(*answer)

        do_GET = do_POST = do_DELETE = _serve

        def _send(self, status: int, body: dict[str, Any]) -> None:
            self.reply(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    with serve(ServiceHandler) as port:
        service.url = f"http://127.0.0.1:{port}"
        yield service


def _signed(authorization: str, public_key: str) -> bool:
    """Return whether the account's key has signed the token."""
    try:
        claims = jwt.decode(authorization.removeprefix("Bearer "), certs=public_key)
    except ValueError:
        return False
    return bool(claims["iss"] == ACCOUNT)


def credentials(folder: Path, service: Service) -> Path:
    """Write the key file of a service account whose tokens the service accepts."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    content = {
        "type": "service_account",
        "project_id": "my-project",
        "private_key_id": "0",
        "private_key": text,
        "client_email": ACCOUNT,
        "client_id": "0",
        "token_uri": f"{service.url}/token",
    }
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    service.public_key = public.decode()
    path = folder / "credentials.json"
    path.write_text(json.dumps(content))
    return path
