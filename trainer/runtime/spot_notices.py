"""Spot interruption notices of the clouds, read from the metadata server by one thread per machine.

Sources: AWS "Spot Instance interruption notices" and "rebalance recommendations" (IMDSv2), Azure "Scheduled Events for
Linux VMs", Google Cloud "Compute Engine metadata: preempted, maintenance-event".
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from trainer.config import FaultConfig

_LINK_LOCAL = "http://169.254.169.254"  # the same address on all three clouds
_TIMEOUT_SECONDS = 2.0  # a metadata server runs on the host, so a slower answer means that there is none
_log = logging.getLogger("trainer.runtime.spot_notices")


@dataclass(frozen=True)
class Notice:
    """A notice about this machine: the cloud terminates it, or only recommends a save."""

    text: str
    terminates: bool


class Cloud(Protocol):
    """The notices of one cloud. The methods raise OSError (like urllib) or ValueError for an unusable answer."""

    def is_present(self) -> bool:
        """Return whether this machine belongs to the cloud."""

    def read(self) -> Notice | None:
        """Return the current notice, if any."""


class Metadata:
    """GET and PUT on a metadata server, never through a proxy."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def request(self, path: str, headers: dict[str, str], method: str = "GET") -> str | None:
        """Return the text of the answer, None for status 404, which means that there is no notice."""
        message = urllib.request.Request(self.endpoint + path, headers=headers, method=method)  # noqa: S310  # http only
        try:
            with self._opener.open(message, timeout=_TIMEOUT_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise


class Aws:
    """Amazon EC2, by IMDSv2 only, because hardened instances refuse version 1."""

    def __init__(self, server: Metadata) -> None:
        self._server = server
        self._token: str | None = None

    def is_present(self) -> bool:
        """Return whether the metadata server is this cloud's."""
        return self._renew_token() is not None

    def read(self) -> Notice | None:
        """Return the current notice, if any."""
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            notice = json.loads(action)
            return Notice(f"AWS will {notice['action']} this instance at {notice['time']}", terminates=True)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return Notice("AWS recommends leaving this instance (rebalance)", terminates=False)
        return None

    def _get(self, path: str) -> str | None:
        try:
            return self._get_with_token(path, self._token or self._renew_token())
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.UNAUTHORIZED:
                raise
            return self._get_with_token(path, self._renew_token())  # the token had expired

    def _get_with_token(self, path: str, token: str | None) -> str | None:
        return self._server.request(path, {"X-aws-ec2-metadata-token": token or ""})

    def _renew_token(self) -> str | None:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        self._token = self._server.request("/latest/api/token", lifetime, "PUT")
        return self._token


class Azure:
    """Azure virtual machines and scale sets, whose events name every machine concerned."""

    _HEADERS = {"Metadata": "true"}  # noqa: RUF012  # read only

    def __init__(self, server: Metadata) -> None:
        self._server = server
        self._name: str | None = None

    def is_present(self) -> bool:
        """Return whether the metadata server is this cloud's."""
        return self._read_name() is not None

    def read(self) -> Notice | None:
        """Return the current notice, if any."""
        name = self._name or self._read_name()
        answer = self._server.request("/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        events: list[dict[str, Any]] = json.loads(answer or "{}").get("Events", [])
        mine = [e for e in events if name in e.get("Resources", []) and e.get("EventType") != "Freeze"]
        if not mine:
            return None
        kind, when = mine[0]["EventType"], mine[0].get("NotBefore") or "now"
        return Notice(f"Azure announces {kind} of {name} for {when}", terminates=True)

    def _read_name(self) -> str | None:
        answer = self._server.request("/metadata/instance/compute?api-version=2021-02-01", self._HEADERS)
        self._name = json.loads(answer)["name"] if answer else None
        return self._name


class Gcp:
    """Compute Engine. It announces maintenance up to an hour ahead, which is a reason to save but not to stop."""

    _HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012  # read only

    def __init__(self, server: Metadata) -> None:
        self._server = server

    def is_present(self) -> bool:
        """Return whether the metadata server is this cloud's."""
        return self._get("preempted") is not None

    def read(self) -> Notice | None:
        """Return the current notice, if any."""
        if self._get("preempted") == "TRUE":
            return Notice("Google Cloud preempts this instance", terminates=True)
        event = self._get("maintenance-event")
        return Notice(f"Google Cloud announces {event}", terminates=False) if event not in (None, "NONE") else None

    def _get(self, name: str) -> str | None:
        answer = self._server.request(f"/computeMetadata/v1/instance/{name}", self._HEADERS)
        return answer.strip() if answer is not None else None


_CLOUDS: dict[str, Callable[[Metadata], Cloud]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}


def find_cloud(config: FaultConfig) -> Cloud | None:
    """Return the cloud that fault.notices names; for auto, detect it by its metadata server, None if none answers."""
    server = Metadata(config.notices_endpoint or _LINK_LOCAL)
    if config.notices != "auto":
        return _CLOUDS[config.notices](server)
    for name, create in _CLOUDS.items():
        cloud = create(server)
        try:
            if cloud.is_present():
                _log.info("fault.notices auto: this machine is on %s", name)
                return cloud
        except (OSError, ValueError, KeyError):  # another cloud answers at this address, or nothing does
            continue
    _log.warning(
        "fault.notices auto: no metadata server answers at %s, so spot notices are not watched", server.endpoint
    )
    return None


class NoticeWatcher:
    """Calls `handle` once for each new notice, from a thread, until closed."""

    def __init__(self, config: FaultConfig, handle: Callable[[Notice], None]) -> None:
        self._config, self._handle = config, handle
        self._closed = threading.Event()
        self._failure_logged = False

    def start(self) -> None:
        """Start the thread, unless fault.notices is off."""
        if self._config.notices != "off":
            threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _watch(self) -> None:
        cloud = find_cloud(self._config)
        handled: Notice | None = None
        while cloud is not None:
            notice = self._read(cloud)
            if notice is not None and notice != handled:
                handled = notice
                self._handle(notice)
            if self._closed.wait(self._config.notices_poll_seconds):
                return

    def _read(self, cloud: Cloud) -> Notice | None:
        """Read the notice; log only the first of several failures, because SIGTERM comes in any case."""
        try:
            notice = cloud.read()
        except (OSError, ValueError, KeyError) as error:
            if not self._failure_logged:
                _log.warning("fault.notices: the metadata server gives no answer (%s); polling continues", error)
            self._failure_logged = True
            return None
        self._failure_logged = False
        return notice
