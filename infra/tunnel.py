"""A tunnel to a private Kubernetes API: a program that forwards a port of this machine for as long as it runs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOGGER = logging.getLogger(__name__)

#: The output of a component that holds a tunnel's facts.
OUTPUT = "tunnel"
#: How long a new machine may take until it accepts a session, and the pause between two attempts.
START_SECONDS, PAUSE_SECONDS = 300.0, 1.0
#: How long a machine that ran before may take.
REOPEN_SECONDS = 60.0
_HANDSHAKE_SECONDS = 10
#: How often a tunnel is used. Session Manager ends a session after 20 idle minutes, or as the account has set it:
#: https://docs.aws.amazon.com/systems-manager/latest/userguide/session-preferences-timeout.html
KEEP_ALIVE_SECONDS = 50.0
_MAX_PAUSE_SECONDS = 60.0
#: How long the command may take to end after SIGTERM.
_GRACE_SECONDS = 2.0
#: Ports below the range from which Linux and macOS choose ports of their own.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


class TunnelError(ValueError):
    """A tunnel that cannot be opened; its text is one line with the fix."""


class NotOpenError(TunnelError):
    """A tunnel whose machine refuses it or does not answer: `reason` is the error without the fix."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. Fix: {fix}")
        self.reason = reason


@dataclass(frozen=True)
class Tunnel:
    """How to reach an API server through `port` of this machine.

    `command` forwards the port until it is killed and needs `programs`, each with the address of its installation
    guide. It fails with `not_ready` in its message while the machine in the network starts. The server at the other end
    has a certificate for `server_name` from `authority` (PEM in base64).
    """

    command: tuple[str, ...]
    programs: Mapping[str, str]
    not_ready: str
    port: int
    server_name: str
    authority: str

    @classmethod
    def from_json(cls, text: str) -> Tunnel:
        """Return the tunnel that `to_json` wrote."""
        facts = json.loads(text)
        return cls(**{**facts, "command": tuple(facts["command"])})

    def to_json(self) -> str:
        """Return the facts as a component's output stores them."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def answers(self) -> bool:
        """Return whether the API server answers at the port; raise TunnelError if another program does."""
        context = ssl.create_default_context(cadata=base64.b64decode(self.authority).decode())
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # clusters' own authorities lack what it requires
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), _HANDSHAKE_SECONDS) as raw,
                context.wrap_socket(raw, server_hostname=self.server_name),
            ):
                return True
        except ssl.SSLCertVerificationError:
            raise TunnelError(
                f"port {self.port} of this machine is not the API server {self.server_name}: another program uses it, "
                f"such as the tunnel of another stack. Fix: end the program (lsof -i :{self.port})"
            ) from None
        except OSError:
            return False


def port_of(project: str, stack: str) -> int:
    """Return the port of this machine for a stack's tunnel, the same each time: the state stores it."""
    return _FIRST_PORT + zlib.crc32(f"{project}/{stack}".encode()) % _NUM_PORTS


def redirect(kubeconfig: str, port: int) -> str:
    """Return a kubeconfig in JSON for the same server through a port of this machine, with its certificate's name."""
    document = json.loads(kubeconfig)
    for entry in document["clusters"]:
        cluster = entry["cluster"]
        cluster |= {"server": f"https://127.0.0.1:{port}", "tls-server-name": server_name(cluster["server"])}
    return json.dumps(document)


def server_name(server: str) -> str:
    """Return the host name in a server's address."""
    return server.removeprefix("https://").partition("/")[0].partition(":")[0]


def find(resources: Sequence[Mapping[str, Any]]) -> Tunnel | None:
    """Return the tunnel of a stack from its state; None if its API needs none or its machine is not in the state."""
    texts = [(item.get("outputs") or {}).get(OUTPUT) for item in resources if not item.get("custom")]
    found = next((Tunnel.from_json(text) for text in texts if isinstance(text, str)), None)
    return found if found and find_machine(found, resources) else None


def find_machine(tunnel: Tunnel, resources: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the URN of the machine, the resource whose ID the command names."""
    machines = (item["urn"] for item in resources if item.get("custom") and item.get("id") in tunnel.command)
    return next(machines, None)


class Session:
    """A running tunnel. It ends with `close`, and with this process, however this process ends."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the command."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # The guard ends the command when this process closes the pipe. A group of its own keeps Ctrl-C away from both:
        # the engine finishes running steps, which need the tunnel.
        self._guard = subprocess.Popen(  # noqa: S603 - the cloud's own program
            [sys.executable, "-I", str(Path(__file__).resolve()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            process_group=0,
        )

    @property
    def has_ended(self) -> bool:
        """Return whether the command has ended by itself."""
        return self._guard.poll() is not None

    def errors(self) -> str:
        """Return the last line of standard error without its full stop, empty without any."""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        return next((line.strip().removesuffix(".") for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End the command."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.wait()
        self._errors.close()


def start(tunnel: Tunnel, seconds: float = START_SECONDS) -> Session | None:
    """Return a session once the API server answers; None if another process holds the tunnel already."""
    if tunnel.answers():
        return None
    for program, guide in tunnel.programs.items():
        if not shutil.which(program):
            raise TunnelError(f"the tunnel to the Kubernetes API needs the program {program}. Fix: install it, {guide}")
    deadline = time.monotonic() + seconds
    session, message = Session(tunnel.command), ""
    try:
        while not tunnel.answers():
            has_ended = session.has_ended
            message = session.errors() or message
            _check(tunnel, message or "no message", has_ended=has_ended, is_late=time.monotonic() > deadline)
            if has_ended:
                session.close()
                session = Session(tunnel.command)
            time.sleep(PAUSE_SECONDS)
    except BaseException:
        session.close()
        raise
    return session


def _check(tunnel: Tunnel, message: str, *, has_ended: bool, is_late: bool) -> None:
    """Raise NotOpenError if the command was refused, or if it is late."""
    command = shlex.join(tunnel.command)
    if has_ended and tunnel.not_ready not in message:
        raise NotOpenError(f"the tunnel to the Kubernetes API ended: {message}", command)
    if is_late:
        reason = f"the tunnel to the Kubernetes API did not open in time: {message}"
        raise NotOpenError(reason, f"run this until it works, then try again: {command}")


class Keeper:
    """A thread that uses a tunnel often enough and opens it again when its session has ended, until `close`.

    Sessions end while a long step, such as the build of an image, leaves them idle, and sometimes for no reason:
    https://github.com/aws/session-manager-plugin/issues/135
    """

    def __init__(self, tunnel: Tunnel, session: Session) -> None:
        """Keep this session, which is closed with the keeper."""
        self._tunnel, self._session = tunnel, session
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until another thread closes the tunnel, or for Ctrl-C."""
        self._closed.wait()

    def close(self) -> None:
        """Close the tunnel."""
        self._closed.set()
        self._thread.join()
        self._session.close()

    def _keep(self) -> None:
        pause, used = PAUSE_SECONDS, time.monotonic()
        while not self._closed.wait(pause):
            if self._session.has_ended:
                self._reopen(self._session.errors() or "no message")
                pause, used = min(2 * pause, _MAX_PAUSE_SECONDS), time.monotonic()
            elif time.monotonic() - used >= KEEP_ALIVE_SECONDS:
                if not (self._answers() or self._answers()):
                    self._reopen("the API server does not answer")
                pause, used = PAUSE_SECONDS, time.monotonic()

    def _answers(self) -> bool:
        try:
            return self._tunnel.answers()
        except TunnelError as error:
            _LOGGER.warning("%s", error)
            return False

    def _reopen(self, reason: str) -> None:
        _LOGGER.warning("the tunnel to the Kubernetes API is opened again, because it ended: %s", reason)
        self._session.close()
        self._session = Session(self._tunnel.command)


@contextmanager
def held(tunnel: Tunnel | None, seconds: float = START_SECONDS) -> Iterator[None]:
    """Hold the tunnel open, if there is one."""
    keeper = hold(tunnel, seconds) if tunnel else None
    try:
        yield
    finally:
        if keeper:
            keeper.close()


def hold(tunnel: Tunnel, seconds: float = START_SECONDS) -> Keeper | None:
    """Open the tunnel until the keeper is closed; None if another process holds it already."""
    session = start(tunnel, seconds)
    return Keeper(tunnel, session) if session else None


#: The tunnels of this process, which end with it.
_KEEPERS: list[Keeper] = []


def hold_until_exit(tunnel: Tunnel) -> None:
    """Hold the tunnel open until this process ends."""
    if keeper := hold(tunnel):
        _KEEPERS.append(keeper)


def _guard(command: Sequence[str]) -> int:
    """Run the command until it ends or standard input is closed."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)  # noqa: S603

    def end_with_parent() -> None:
        sys.stdin.read()
        _end_group(child.pid)

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    _end_group(child.pid)  # `aws` may leave its plugin behind
    return code


def _end_group(group: int) -> None:
    """End a process group: SIGTERM, then SIGKILL for processes that ignore it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
