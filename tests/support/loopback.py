"""Servers, ports and a network guard on 127.0.0.1."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

_CONNECT = socket.socket.connect
_LOCAL = {"127.0.0.1", "::1", "localhost"}


class Handler(BaseHTTPRequestHandler):
    """A request handler that logs nothing to standard error."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def body(self) -> bytes:
        """Return the request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Answer with a status, a body and headers; an answer to HEAD has no body."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[int]:
    """Serve requests on a free port of 127.0.0.1 and yield the port; set `attributes` on the handler's class."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (handler,), attributes))
    server.daemon_threads = True
    # Every shutdown waits for one poll interval, half a second by default.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    """Return an unused port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def refuse_connections(monkeypatch: pytest.MonkeyPatch, *, loopback: bool) -> None:
    """Fail a test that connects to another machine, or with `loopback=False` to any address."""

    def connect(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        allowed = loopback and host in _LOCAL
        assert allowed, f"the test connects to {address}"
        _CONNECT(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", connect)
