"""Metadata servers of the clouds as documented, including their error responses."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from loopback import Handler, serve


@dataclass
class MetadataServer:
    """The metadata server of one `cloud`.

    `notice` is the current notice: for AWS `instance-action` or `rebalance`, for Azure the list of events, for GCP
    `preempted` or a maintenance event. `fault` is `slow`, or an HTTP status for every request.
    """

    cloud: str
    notice: object = None
    fault: str | None = None
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._server = ExitStack()
        self.url = f"http://127.0.0.1:{self._server.enter_context(serve(_Handler, server_state=self))}"

    def __enter__(self) -> MetadataServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


class _Handler(Handler):
    server_state: MetadataServer

    def do_PUT(self) -> None:
        state = self.server_state
        state.requests.append(f"PUT {self.path}")
        if state.cloud != "aws" or self.path != "/latest/api/token":
            self._respond(405)
        elif self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") is None:
            self._respond(400)
        else:
            token = f"token-{len(state.requests)}"
            state.tokens = {token}
            self._respond(200, token)

    def do_GET(self) -> None:
        state = self.server_state
        state.requests.append(f"GET {self.path}")
        if state.fault == "slow":
            time.sleep(4)
        if state.fault is not None and state.fault.isdigit():
            self._respond(int(state.fault))
        else:
            getattr(self, f"_{state.cloud}")(state)

    def _aws(self, state: MetadataServer) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") not in state.tokens:
            self._respond(401)
        elif self.path == "/latest/meta-data/spot/instance-action" and state.notice == "instance-action":
            self._respond(200, json.dumps({"action": "terminate", "time": "2030-01-01T00:00:00Z"}))
        elif self.path == "/latest/meta-data/events/recommendations/rebalance" and state.notice == "rebalance":
            self._respond(200, json.dumps({"noticeTime": "2030-01-01T00:00:00Z"}))
        else:
            self._respond(404)

    def _azure(self, state: MetadataServer) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("Metadata") != "true" or "api-version=" not in query:
            self._respond(400)
        elif path == "/metadata/instance/compute":
            self._respond(200, json.dumps({"name": "gpu_3"}))
        elif path == "/metadata/scheduledevents":
            self._respond(200, json.dumps({"DocumentIncarnation": 1, "Events": state.notice or []}))
        else:
            self._respond(404)

    def _gcp(self, state: MetadataServer) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._respond(403)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            self._respond(200, "TRUE" if state.notice == "preempted" else "FALSE")
        elif self.path == "/computeMetadata/v1/instance/maintenance-event":
            self._respond(200, str(state.notice) if state.notice not in (None, "preempted") else "NONE")
        else:
            self._respond(404)

    def _respond(self, status: int, text: str = "") -> None:
        try:
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        except ConnectionError:  # the client did not wait
            self.close_connection = True
