"""The clouds' notices that a machine is about to go, read from its metadata server by one thread per machine.

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
from typing import Any, Protocol

from trainer.config import FaultConfig

_LINK_LOCAL = "http://169.254.169.254"  # the same address on all three clouds
_ANSWER_SECONDS = 2.0  # a metadata server is on the host: one that needs longer is not there
_log = logging.getLogger("trainer.runtime.spot_notices")


@dataclass(frozen=True)
class Notice:
    """What a cloud says about this machine: that it goes, or only that a save would be wise."""

    text: str
    goes: bool


class Cloud(Protocol):
    """How to ask one cloud. Raises OSError (urllib's errors among them) or ValueError where it gets no sense."""

    def present(self) -> bool:
        """Whether this machine is one of that cloud's."""

    def look(self) -> Notice | None:
        """The notice that stands, if any."""


class Metadata:
    """GET and PUT on a metadata server, never through a proxy."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, headers: dict[str, str], method: str = "GET") -> str | None:
        """The answer's text; None for 404, which is how they say "nothing"."""
        request = urllib.request.Request(self.endpoint + path, headers=headers, method=method)  # noqa: S310  # http only
        try:
            with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


class Aws:
    """EC2, by IMDSv2 alone: version 1 is refused on hardened instances."""

    def __init__(self, server: Metadata) -> None:
        self._server = server
        self._token: str | None = None

    def present(self) -> bool:
        """See Cloud."""
        return self._fresh_token() is not None

    def look(self) -> Notice | None:
        """See Cloud."""
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            said = json.loads(action)
            return Notice(f"AWS will {said['action']} this instance at {said['time']}", goes=True)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return Notice("AWS recommends to leave this instance (rebalance)", goes=False)
        return None

    def _get(self, path: str) -> str | None:
        token = self._token or self._fresh_token()
        try:
            return self._server.ask(path, {"X-aws-ec2-metadata-token": token or ""})
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            return self._server.ask(path, {"X-aws-ec2-metadata-token": self._fresh_token() or ""})  # it had expired

    def _fresh_token(self) -> str | None:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        self._token = self._server.ask("/latest/api/token", lifetime, "PUT")
        return self._token


class Azure:
    """Virtual machines and scale sets, whose events name all machines that they concern."""

    _HEADERS = {"Metadata": "true"}  # noqa: RUF012  # read only

    def __init__(self, server: Metadata) -> None:
        self._server = server
        self._name: str | None = None

    def present(self) -> bool:
        """See Cloud."""
        return self._own_name() is not None

    def look(self) -> Notice | None:
        """See Cloud."""
        name = self._name or self._own_name()
        answer = self._server.ask("/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        events: list[dict[str, Any]] = json.loads(answer or "{}").get("Events", [])
        mine = [e for e in events if name in e.get("Resources", []) and e.get("EventType") != "Freeze"]
        if not mine:
            return None
        return Notice(f"Azure announces {mine[0]['EventType']} of {name} for {mine[0].get('NotBefore') or 'now'}", True)

    def _own_name(self) -> str | None:
        answer = self._server.ask("/metadata/instance/compute?api-version=2021-02-01", self._HEADERS)
        self._name = json.loads(answer)["name"] if answer else None
        return self._name


class Gcp:
    """Compute Engine. A maintenance is announced up to an hour ahead, so it is a reason to save and not to go."""

    _HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012  # read only

    def __init__(self, server: Metadata) -> None:
        self._server = server

    def present(self) -> bool:
        """See Cloud."""
        return self._get("preempted") is not None

    def look(self) -> Notice | None:
        """See Cloud."""
        if self._get("preempted") == "TRUE":
            return Notice("Google Cloud preempts this instance", goes=True)
        event = self._get("maintenance-event")
        return Notice(f"Google Cloud announces {event}", goes=False) if event not in (None, "NONE") else None

    def _get(self, name: str) -> str | None:
        answer = self._server.ask(f"/computeMetadata/v1/instance/{name}", self._HEADERS)
        return answer.strip() if answer is not None else None


_CLOUDS: dict[str, Callable[[Metadata], Cloud]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}


def find_cloud(config: FaultConfig) -> Cloud | None:
    """The cloud that fault.notices names, or for auto the one whose metadata server answers."""
    server = Metadata(config.notices_endpoint or _LINK_LOCAL)
    if config.notices != "auto":
        return _CLOUDS[config.notices](server)
    for name, make in _CLOUDS.items():
        cloud = make(server)
        try:
            if cloud.present():
                _log.info("fault.notices auto: this is a machine of %s", name)
                return cloud
        except (OSError, ValueError, KeyError):  # this address answers in another cloud's way, or not at all
            continue
    _log.warning("fault.notices auto: no metadata server answers at %s, so no notice will be seen", server.endpoint)
    return None


class NoticeWatcher:
    """Calls `heard` once for each notice that is new, from a thread, until closed."""

    def __init__(self, config: FaultConfig, heard: Callable[[Notice], None]) -> None:
        self._config, self._heard = config, heard
        self._closed = threading.Event()
        self._complained = False

    def start(self) -> None:
        """Begin, unless fault.notices is off."""
        if self._config.notices != "off":
            threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def close(self) -> None:
        """No more looking."""
        self._closed.set()

    def _watch(self) -> None:
        cloud = find_cloud(self._config)
        known: Notice | None = None
        while cloud is not None:
            notice = self._look(cloud)
            if notice is not None and notice != known:
                known = notice
                self._heard(notice)
            if self._closed.wait(self._config.notices_poll_seconds):
                return

    def _look(self, cloud: Cloud) -> Notice | None:
        """One look. Trouble is told once until it is over: the next look may go well, and SIGTERM comes in any case."""
        try:
            notice = cloud.look()
        except (OSError, ValueError, KeyError) as error:
            if not self._complained:
                _log.warning("fault.notices: the metadata server gives no answer (%s); it is asked on", error)
            self._complained = True
            return None
        self._complained = False
        return notice
