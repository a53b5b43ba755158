"""The exchange of a token of Entra ID for one with which Docker pushes, once the role has arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs

import loopback
import pytest

from infra.clouds.azure import registry_token
from infra.clouds.azure.registry_token import PushError, push_token


class _Registry(loopback.Handler):
    """The authentication server of a registry; `answers` are the statuses of its next answers, then 200."""

    answers: list[int]
    requests: list[tuple[str, dict[str, str]]]

    def do_POST(self) -> None:
        form = {key: value for key, (value,) in parse_qs(self.body().decode()).items()}
        self.requests.append((self.path, form))
        status = self.answers.pop(0) if self.answers else 200
        errors = {"errors": [{"code": "UNAUTHORIZED", "message": "authentication\nrequired"}]}
        tokens = {"refresh_token": "of-the-registry", "access_token": "for-the-push"}
        self.reply(status, json.dumps(tokens if status == 200 else errors).encode())


@pytest.fixture
def serve() -> Iterator[Callable[[list[int]], tuple[str, list[tuple[str, dict[str, str]]]]]]:
    """Start a registry that gives these answers; return its host and the list of its requests."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(answers: list[int]) -> tuple[str, list[tuple[str, dict[str, str]]]]:
            requests: list[tuple[str, dict[str, str]]] = []
            port = stack.enter_context(loopback.serve(_Registry, answers=answers, requests=requests))
            return f"127.0.0.1:{port}", requests

        yield start


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without waiting."""
    monkeypatch.setattr(registry_token, "_PAUSE_SECONDS", 0.001)


def test_a_token_of_entra_is_exchanged_for_one_that_can_push(serve: Callable[..., tuple[str, list[object]]]) -> None:
    server, requests = serve([])
    assert asyncio.run(push_token(server, "trainer", "of-entra")) == "of-the-registry"
    scope = {"scope": "repository:trainer:pull,push", "refresh_token": "of-the-registry"}
    assert requests == [
        ("/oauth2/exchange", {"grant_type": "access_token", "service": server, "access_token": "of-entra"}),
        ("/oauth2/token", {"grant_type": "refresh_token", "service": server} | scope),
    ]


def test_up_waits_until_the_role_has_arrived(serve: Callable[..., tuple[str, list[object]]]) -> None:
    server, requests = serve([200, 401, 200, 401])
    assert asyncio.run(push_token(server, "trainer", "of-entra")) == "of-the-registry"
    assert len(requests) == 6


def test_a_missing_role_is_reported_in_the_registrys_words(
    serve: Callable[..., tuple[str, list[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_token, "ROLE_WAIT_SECONDS", 0.0)
    server, _ = serve([401])
    with pytest.raises(PushError, match=r"^401 authentication required$") as caught:
        asyncio.run(push_token(server, "trainer", "of-entra"))
    assert caught.value.status == 401


def test_an_unreachable_registry_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_token, "REACH_WAIT_SECONDS", 0.0)
    with pytest.raises(PushError) as caught:
        asyncio.run(push_token(f"127.0.0.1:{loopback.free_port()}", "trainer", "of-entra"))
    assert caught.value.status is None


@pytest.mark.parametrize("status", [200, 401])
def test_an_answer_that_breaks_off_is_an_error_of_the_push(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(loopback.Handler):
        def do_POST(self) -> None:
            self.body()
            self.send_response(status)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{}")
            self.close_connection = True

    monkeypatch.setattr(registry_token, "ROLE_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(registry_token, "REACH_WAIT_SECONDS", 0.0)
    with loopback.serve(Cut) as port, pytest.raises(PushError):
        asyncio.run(push_token(f"127.0.0.1:{port}", "trainer", "of-entra"))
