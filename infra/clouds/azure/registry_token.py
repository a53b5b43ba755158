"""The token with which Docker pushes to an Azure registry, in exchange for one of Entra ID.

https://github.com/Azure/acr/blob/main/docs/AAD-OAuth.md
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlencode
from uuid import UUID

#: The user name that announces a refresh token as the password.
USER = str(UUID(int=0))
#: A role assignment takes up to ten minutes to arrive (Azure RBAC, troubleshooting).
ROLE_WAIT_SECONDS = 600.0
#: A new registry takes a moment to get its name and its firewall rules.
REACH_WAIT_SECONDS = 60.0
_TIMEOUT_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 20.0


class PushError(Exception):
    """The registry refuses this caller; `status` is that of its answer, None without one."""

    def __init__(self, cause: str, status: int | None = None) -> None:
        super().__init__(cause)
        self.status = status


def refresh_token(server: str, entra_token: str) -> str:
    """Return a token of the registry, valid for three hours; raise PushError if it answers with an error."""
    form = {"grant_type": "access_token", "service": server, "access_token": entra_token}
    token = _post(server, "exchange", form).get("refresh_token")
    if not token:
        raise PushError("the registry answered without a token")
    return str(token)


async def push_token(server: str, repository: str, entra_token: str) -> str:
    """Return a token that can push, and wait until the role and the firewall rules of a new registry have arrived.

    Raise PushError, with the registry's answer, if they have not.
    """
    started, pause = time.monotonic(), _PAUSE_SECONDS
    while True:
        try:
            return await asyncio.to_thread(_checked_token, server, repository, entra_token)
        except PushError as error:
            allowed = ROLE_WAIT_SECONDS if error.status else REACH_WAIT_SECONDS
            if time.monotonic() - started + pause > allowed:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _checked_token(server: str, repository: str, entra_token: str) -> str:
    token = refresh_token(server, entra_token)
    _check_push(server, repository, token)
    return token


def _check_push(server: str, repository: str, token: str) -> None:
    """Raise PushError unless the registry grants a push to the repository."""
    scope = f"repository:{repository}:pull,push"
    _post(server, "token", {"grant_type": "refresh_token", "service": server, "scope": scope, "refresh_token": token})


def _post(server: str, action: str, form: Mapping[str, str]) -> Mapping[str, object]:
    """Post a form to the registry's authentication server and return its answer."""
    # Docker also uses HTTP for registries on this machine.
    scheme = "http" if server.partition(":")[0] in ("127.0.0.1", "localhost") else "https"
    url = f"{scheme}://{server}/oauth2/{action}"
    try:
        with urllib.request.urlopen(url, urlencode(form).encode(), _TIMEOUT_SECONDS) as answer:  # noqa: S310  # http only
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise PushError(f"{error.code} {_message(_read_body(error))}", error.code) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PushError(str(getattr(error, "reason", error))) from None
    return found if isinstance(found, dict) else {}


def _read_body(error: urllib.error.HTTPError) -> bytes:
    """Return as much of an error's body as arrived."""
    try:
        return error.read()
    except http.client.IncompleteRead as cut:
        return cut.partial


def _message(body: bytes) -> str:
    """Return the registry's own words for an error, in one line."""
    try:
        text = str(json.loads(body)["errors"][0]["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]
