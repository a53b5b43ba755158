"""A fake Kubernetes API server on loopback, with the parts of the API that `python -m workloads` uses.

It serves lists by label, objects, logs, the pod proxy, port-forwarding and merge patches. Its errors (401, 403, 404,
409) have the text of the real server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from loopback import Handler, serve

TOKEN = "a-token-that-must-not-be-shown"
_POD = re.compile(r"^/api/v1/namespaces/([^/]+)/pods/([^/:]+)(?::(\d+))?/(log|proxy|portforward)(/.*)?$")
#: Collections of a plain cluster; collections of operators exist after a test adds an object.
_KNOWN = re.compile(
    r"^/(api/v1/(namespaces/[^/]+/(pods|events|services)|nodes)|apis/batch/v1/namespaces/[^/]+/jobs"
    r"|apis/apps/v1/namespaces/[^/]+/deployments)$"
)


class FakeCluster:
    """The state of the cluster: `objects` by path, `logs` and `metrics` by pod, `forbidden` (verb, part of a path)."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[str]] = {}
        self.previous_logs: dict[str, list[str]] = {}
        self.metrics: dict[str, str] = {}
        self.kinds: set[str] = set()
        self.forbidden: set[tuple[str, str]] = set()
        self.conflicts = 0
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def add(self, collection: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """Add an object to a collection; the cluster serves its kind from then on."""
        kept = deepcopy(dict(item))
        kept["metadata"].setdefault("creationTimestamp", "2026-11-21T10:00:00Z")
        self.objects[f"{collection}/{kept['metadata']['name']}"] = kept
        self.kinds.add(collection)
        return kept

    def kubeconfig(self, folder: Path, token: str = TOKEN) -> Path:
        """Write and return a kubeconfig file of this cluster."""
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(self.config(token)))
        return path

    def config(self, token: str = TOKEN) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "fake", "user": "me"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": token}}],
        }


@contextmanager
def serve_cluster(cluster: FakeCluster) -> Iterator[FakeCluster]:
    """Serve the cluster's API on a free port of loopback."""
    with serve(_Handler, cluster=cluster) as port:
        cluster.url = f"http://127.0.0.1:{port}"
        yield cluster


class _Handler(Handler):
    cluster: FakeCluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._is_allowed("GET"):
            path, query = self._path()
            if match := _POD.match(path):
                self._pod(match, query)
            elif path in self.cluster.objects:
                self._json(200, self.cluster.objects[path])
            else:
                self._list(path, query)

    def do_PATCH(self) -> None:
        if self._is_allowed("PATCH"):
            path, _ = self._path()
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            body = self._object()
            found = self.cluster.objects.get(path)
            if found is None:
                self._status(404, f'"{path.rpartition("/")[2]}" not found')
            elif self.cluster.conflicts:
                self.cluster.conflicts -= 1
                self._status(409, "the object has been modified; please apply your changes to the latest version")
            else:
                _merge(found, body)
                self._json(200, found)

    def do_POST(self) -> None:
        if self._is_allowed("POST"):
            path, _ = self._path()
            body = self._object()
            name = body["metadata"]["name"]
            if f"{path}/{name}" in self.cluster.objects:
                self._status(409, f'jobs.batch "{name}" already exists')
            else:
                self._json(201, self.cluster.add(path, body))

    def do_DELETE(self) -> None:
        if self._is_allowed("DELETE"):
            path, _ = self._path()
            if self.cluster.objects.pop(path, None) is None:
                self._status(404, f'"{path.rpartition("/")[2]}" not found')
            else:
                self._json(200, {"kind": "Status", "status": "Success"})

    def _path(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, dict(parse_qsl(parts.query))

    def _object(self) -> Any:
        return json.loads(self.body())

    def _is_allowed(self, verb: str) -> bool:
        path, _ = self._path()
        self.cluster.requests.append((verb, self.path))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._status(401, "Unauthorized")
            return False
        if any(verb == one and part in path for one, part in self.cluster.forbidden):
            what = path.rpartition("/")[2]
            self._status(403, f'{what} is forbidden: User "me" cannot {verb.lower()} resource "{what}"')
            return False
        return True

    def _list(self, path: str, query: Mapping[str, str]) -> None:
        if not (path in self.cluster.kinds or _KNOWN.match(path)):
            self._status(404, "the server could not find the requested resource")
            return
        members = [item for key, item in self.cluster.objects.items() if key.rpartition("/")[0] == path]
        selector = query.get("labelSelector", "")
        chosen = [item for item in members if matches(item["metadata"].get("labels") or {}, selector)]
        self._json(200, {"kind": "List", "items": chosen})

    def _pod(self, match: re.Match[str], query: Mapping[str, str]) -> None:
        namespace, name, port, what, rest = match.groups()
        if f"/api/v1/namespaces/{namespace}/pods/{name}" not in self.cluster.objects:
            self._status(404, f'pods "{name}" not found')
        elif what == "portforward":
            self._forward(query)
        elif what == "log":
            self._log(name, query)
        elif name in self.cluster.metrics and port == "9400" and rest == "/metrics":
            self.reply(200, self.cluster.metrics[name].encode(), {"Content-Type": "text/plain"})
        else:
            self._status(503, "error trying to reach service: dial tcp 10.0.0.1:9400: connect: connection refused")

    def _log(self, name: str, query: Mapping[str, str]) -> None:
        logs = self.cluster.previous_logs if query.get("previous") == "true" else self.cluster.logs
        if name not in logs:
            self._status(400, f'container "trainer" in pod "{name}" is waiting to start: ContainerCreating')
            return
        lines = logs[name][-int(query["tailLines"]) :] if "tailLines" in query else logs[name]
        self.reply(200, "".join(f"{line}\n" for line in lines).encode(), {"Content-Type": "text/plain"})

    def _forward(self, query: Mapping[str, str]) -> None:
        """Forward one port over a real web socket; it answers every HTTP request with the port number."""
        accept = hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode())
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(accept.digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        self.wfile.flush()
        port = int(query["ports"])
        for channel in (0, 1):  # the first frame of a channel is the port, little-endian
            self._frame(bytes([channel]) + struct.pack("<H", port))
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            frame = self._receive()
            if frame is None:
                return
            request += frame[1:]
        page = f"port {port} of the pod".encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\nConnection: close\r\n\r\n".encode()
        self._frame(b"\x00" + head + page)
        self.wfile.write(b"\x88\x02\x03\xe8")  # close frame, status 1000
        self.wfile.flush()
        self.close_connection = True

    def _frame(self, data: bytes) -> None:
        assert len(data) < 126
        self.wfile.write(bytes([0x82, len(data)]) + data)
        self.wfile.flush()

    def _receive(self) -> bytes | None:
        head = self.rfile.read(2)
        if len(head) < 2 or head[0] & 0x0F == 8:
            return None
        size = head[1] & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", self.rfile.read(2))
        mask = self.rfile.read(4)
        return bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(size)))

    def _status(self, code: int, message: str) -> None:
        if int(self.headers.get("Content-Length") or 0) and self.command in ("PATCH", "POST") and code in (401, 403):
            self.rfile.read(int(self.headers["Content-Length"]))
        self._json(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def _json(self, code: int, body: object) -> None:
        self.reply(code, json.dumps(body).encode(), {"Content-Type": "application/json"})


def matches(labels: Mapping[str, str], selector: str) -> bool:
    """Return whether labels match a selector such as `a=b,c in (d,e)`."""
    for part in filter(None, re.split(r",(?![^()]*\))", selector)):
        key, word, values = part.partition(" in ")
        if word:
            if labels.get(key) not in values.strip("()").split(","):
                return False
        elif labels.get(part.partition("=")[0]) != part.partition("=")[2]:
            return False
    return True


def _merge(target: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if isinstance(value, Mapping):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value
