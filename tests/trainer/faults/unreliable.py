"""An HTTP proxy in front of a store that fails some requests on demand."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from loopback import Handler, serve

SILENCE_SECONDS = 1.5  # longer than the timeout that the tests give a client
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass
class Trouble:
    """A fault for the next `times` requests with one of `methods`.

    `kind` is an HTTP status, `silent` (no answer for SILENCE_SECONDS), `cut` (the connection ends in the request body)
    or `cut_answer` (within the body of the answer).
    """

    kind: str
    times: int
    methods: tuple[str, ...] = ("PUT", "POST", "GET", "HEAD", "DELETE", "PATCH")


@dataclass
class Proxy:
    """A proxy on a port of 127.0.0.1; `log` has method, path and outcome of every request."""

    backend_port: int
    trouble: Trouble | None = None
    log: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._server = ExitStack()
        self.port = self._server.enter_context(serve(_Handler, owner=self))

    def fate(self, method: str, path: str) -> str:
        """Return `pass`, or the kind of fault for this request."""
        with self._lock:
            fate = "pass"
            if self.trouble is not None and self.trouble.times > 0 and method in self.trouble.methods:
                self.trouble.times -= 1
                fate = self.trouble.kind
            self.log.append((method, path, fate))
            return fate

    def met(self) -> int:
        """Return the number of requests that failed so far."""
        return sum(fate != "pass" for _, _, fate in self.log)

    def close(self) -> None:
        self._server.close()


class _Handler(Handler):
    owner: Proxy
    protocol_version = "HTTP/1.1"  # S3's client waits for `100 Continue` before it sends a body

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def serve(self) -> None:
        fate = self.owner.fate(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if fate == "cut":
            self.rfile.read(length // 2)
            self._reset()
            return
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else self.rfile.read(length)
        if fate == "silent":
            time.sleep(SILENCE_SECONDS)
            self._reset()
        elif fate.isdigit():
            self._answer(int(fate), {"Retry-After": "0"}, b"")
        else:
            self._answer(*self._ask_backend(body), half=fate == "cut_answer")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = serve

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _ask_backend(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.backend_port, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        data = answer.read()
        kept = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}
        if self.command == "HEAD" and answer.getheader("Content-Length"):
            kept["Content-Length"] = answer.getheader("Content-Length") or ""
        connection.close()
        return answer.status, kept, data

    def _answer(self, status: int, headers: dict[str, str], body: bytes, half: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if half:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self._reset()
        elif self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """Reset the connection without closing it properly, like a machine that disappears."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
