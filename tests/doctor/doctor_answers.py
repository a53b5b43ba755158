"""A loopback server with recorded responses of cloud APIs, and helpers that run checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

from loopback import Handler, serve

from infra import stack_files
from infra.doctor.runner import answer
from infra.findings.model import Check, Context, Finding

Answer = tuple[int, object] | Callable[[Mapping[str, str], bytes], tuple[int, object]]


class Recorded:
    """Responses by path: status and JSON, or a function of query and body; `requests` are those received."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, str, Mapping[str, str]]] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.url = ""

    def put(self, path: str, body: object, status: int = 200) -> None:
        """Add a JSON response."""
        self.answers[path] = (status, body)


@contextmanager
def serving(recorded: Recorded) -> Iterator[Recorded]:
    """Serve the responses on a free port."""
    with serve(_Handler, recorded=recorded) as port:
        recorded.url = f"http://127.0.0.1:{port}"
        yield recorded


class _Handler(Handler):
    recorded: Recorded
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        body = self.body()
        self.recorded.requests.append((self.command, self.path, dict(self.headers)))
        found = self.recorded.answers.get(parts.path, (404, {"error": {"code": 404, "message": f"no {parts.path}"}}))
        if callable(found):
            found = found(dict(parse_qsl(parts.query)) | {"authorization": self.headers.get("Authorization", "")}, body)
        status, content = found
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        headers = dict(self.recorded.headers.get(parts.path, {}))
        if status == 200:
            headers.pop("WWW-Authenticate", None)
        self.reply(status, data, {"Content-Type": "application/json"} | headers)

    do_GET = do_POST = do_HEAD = _answer


def run_checks(checks: Sequence[Check], *names: str) -> dict[str, list[Finding]]:
    """Run checks in this thread, each after the one it needs, and return their findings by name."""
    by_name = {check.name: check for check in checks}
    found: dict[str, list[Finding]] = {}

    def ask(name: str) -> None:
        check = by_name[name]
        if check.needs and check.needs not in found:
            ask(check.needs)
        found[name] = answer(check)

    for name in names or tuple(by_name):
        if name not in found:
            ask(name)
    return found


def one(found: Mapping[str, Sequence[Finding]], name: str) -> Finding:
    """Return the only finding of a check."""
    (finding,) = found[name]
    return finding


def read_context(
    stack: str, overrides: Mapping[str, object] | None = None, outputs: Mapping[str, object] | None = None
) -> Context:
    """Return the context of one of this repository's stacks."""
    read = stack_files.read(stack, overrides)
    parsed = read.parse()
    return Context(parsed.settings, read.values, parsed.sections["job"].model_extra or {}, outputs)
