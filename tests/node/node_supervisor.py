"""Process 1 of a node's namespaces: starts the servers, starts one again that ended, and takes all with it at its end.

Its arguments are the node's folder and the number of an open socket on which this machine listens for the API server:
the socket belongs to the machine's network although this process is in another, so connections pass between the two.
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

PIECE = 1 << 16
AGAIN_SECONDS = 0.5


class Supervised(NodePlane):
    """Servers that are started again, unless their name is in the folder `stopped`."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port)
        self.commands: dict[str, tuple[str, ...]] = {}
        for name in ("pids", "stopped", "logs"):
            (folder / name).mkdir()

    def spawn(self, name: str, *command: str, environment: object = None) -> subprocess.Popen[bytes]:
        """Start a server; its process is told in `pids/<name>`, its output goes on in `logs/<name>.log`."""
        assert environment is None
        self.commands[name] = command
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes = [each for each in self.processes if each[0] != name] + [(name, process)]
        (self.folder / "pids" / name).write_text(str(process.pid))
        return process

    def watch(self) -> None:
        """For ever: start what ended, and reap what the containers' shims left to process 1."""
        while True:
            for name, process in list(self.processes):
                if process.poll() is not None and not (self.folder / "stopped" / name).exists():
                    self.spawn(name, *self.commands[name])
            reap({process.pid for _, process in self.processes})
            time.sleep(AGAIN_SECONDS)


def reap(own: set[int]) -> None:
    """Wait for every ended child that is no server's; those are waited for by their own objects."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def forward(listener: socket.socket, port: int) -> None:
    """Carry each connection on this machine's loopback to the API server on the node's."""
    while True:
        outer, _ = listener.accept()
        try:
            inner = socket.create_connection(("127.0.0.1", port))
        except OSError:  # the API server is not there: as if this port were closed
            outer.close()
            continue
        for source, target in ((outer, inner), (inner, outer)):
            threading.Thread(target=copy, args=(source, target), daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Bytes one way until they end; then both ways end."""
    try:
        while piece := source.recv(PIECE):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            each.close()


def end(_number: int, _frame: FrameType | None) -> None:
    """The kernel ends every process of these namespaces with this one."""
    os._exit(0)


def main() -> int:
    """Start everything and keep it; what went wrong is in `failed`."""
    folder, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGTERM, end)
    if sys.stdin.readline() != "go\n":  # who started this has gone before it could note this process
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
