"""Process 1 of a node's namespaces: starts the servers and restarts those that exit. All end with this process.

Arguments: the node's folder and the file descriptor of a socket on which this machine listens for the API server. The
socket belongs to the machine's network and this process to the node's, so connections can pass between the two.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import node_servers
from node_servers import NodePlane

CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.5


class Supervised(NodePlane):
    """Servers that are restarted unless the folder `stopped` contains their name."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port)
        self.commands: dict[str, tuple[str, ...]] = {}
        for name in ("pids", "stopped", "logs"):
            (folder / name).mkdir()

    def spawn(self, name: str, *command: str, environment: object = None) -> subprocess.Popen[bytes]:
        """Start a server; write its process id to `pids/<name>` and append its output to `logs/<name>.log`."""
        assert environment is None
        self.commands[name] = command
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes = [each for each in self.processes if each[0] != name] + [(name, process)]
        (self.folder / "pids" / name).write_text(str(process.pid))
        return process

    def watch(self) -> None:
        """Restart exited servers and reap orphaned processes of the containers, forever."""
        while True:
            for name, process in list(self.processes):
                if process.poll() is not None and not (self.folder / "stopped" / name).exists():
                    self.spawn(name, *self.commands[name])
            reap({process.pid for _, process in self.processes})
            time.sleep(POLL_SECONDS)


def reap(own: set[int]) -> None:
    """Wait for every exited child except the servers, whose Popen objects wait for them."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def forward(listener: socket.socket, port: int) -> None:
    """Forward each connection from this machine's loopback to the API server on the node's loopback."""
    while True:
        outer, _ = listener.accept()
        try:
            inner = socket.create_connection(("127.0.0.1", port))
        except OSError:  # the API server is down: behave like a closed port
            outer.close()
            continue
        for source, target in ((outer, inner), (inner, outer)):
            threading.Thread(target=copy, args=(source, target), daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes in one direction until they end; after an error close both sockets."""
    try:
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            each.close()


def exit_now(_number: int, _frame: FrameType | None) -> None:
    """Exit; the kernel then ends every process of these namespaces."""
    os._exit(0)


def main() -> int:
    """Start all servers and supervise them; write an error to the file `failed`."""
    folder, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGTERM, exit_now)
    if sys.stdin.readline() != "go\n":  # the parent exited before it could record this process
        return 1
    port = listener.getsockname()[1]
    try:
        node_servers.prepare_mounts(folder)
        node_servers.prepare_network()
        node_servers.make_cgroups()
        plane = Supervised(folder, port)
        threading.Thread(target=forward, args=(listener, port), daemon=True).start()
        plane.start()
    except Exception as error:
        traceback.print_exc()
        (folder / "failed").write_text(f"{type(error).__name__}: {error}")
        return 1
    (folder / "started").touch()
    plane.watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
