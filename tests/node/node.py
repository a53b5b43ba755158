"""Start and stop one real Kubernetes node: `python tests/node/node.py up | down`.

The node consists of namespaces (processes, mounts, network) that end with one process, and of one folder. The folder
records that process, so `down` also cleans up after a killed node.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import cluster_build
import node_build
import node_image
import node_servers
from cluster_build import BuildError, say
from cluster_plane import Plane, PlaneError, wait_for

SUPERVISOR = Path(__file__).resolve().parent / "node_supervisor.py"
ISOLATE = ("unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")


class NodeError(Exception):
    """The reason why a node did not start or stop, in one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `{self.prog} --help` lists the allowed values\n")


def home() -> Path:
    """Return the folder of the node; only one node can run at a time."""
    return node_build.cache() / "run"


class Node(Plane):
    """A running node, seen from outside: its kubeconfig, and its processes for fault injection."""

    def __init__(self) -> None:
        super().__init__(home())

    @property
    def state(self) -> dict[str, Any]:
        """The state that `up` recorded; empty if there is no node."""
        path = self.folder / "state.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    @property
    def is_alive(self) -> bool:
        """Whether the recorded process is running; its start time excludes a reused process id."""
        state = self.state
        return bool(state) and started_at(state["pid"]) == state["started_at"]

    @property
    def is_ending(self) -> bool:
        """Whether process 1 still exists: the kernel ends every other process of the namespace first."""
        first = self.state.get("first")
        return first is not None and started_at(first[0]) == first[1]

    @property
    def is_orphan(self) -> bool:
        """Whether the owner of the node exited without stopping it."""
        owner = self.state["owner"]
        return owner is not None and started_at(owner[0]) != owner[1]

    @property
    def first_process(self) -> int:
        """The process id, on this machine, of process 1 in the node's namespaces."""
        pid = self.state["pid"]
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def attach(self) -> Node:
        """Run the commands of `Plane` in the node's network."""
        self.port = self.state["port"]
        self.inside = ["nsenter", "--target", str(self.first_process), "--net"]
        return self

    def run_inside(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in all namespaces of the node, so that process ids are those of the node."""
        enter = ["nsenter", "--target", str(self.first_process), "--mount", "--pid", "--net"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise PlaneError(f"`{' '.join(command)}` in the node ended with {done.returncode}: {done.stderr}")
        return done

    def halt(self, server: str) -> None:
        """Kill a server and do not restart it."""
        (self.folder / "stopped" / server).touch()
        self.run_inside("kill", "-KILL", (self.folder / "pids" / server).read_text())

    def resume(self, server: str) -> None:
        """Allow the restart of a halted server."""
        (self.folder / "stopped" / server).unlink()

    def restart(self, server: str) -> None:
        """Kill a server; the supervisor restarts it."""
        self.run_inside("kill", "-KILL", (self.folder / "pids" / server).read_text())


def started_at(pid: int) -> int | None:
    """Return the start time of a process in kernel ticks, or None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


@contextmanager
def lock_node() -> Iterator[None]:
    """Allow one `up` or `down` at a time."""
    node_build.cache().mkdir(parents=True, exist_ok=True)
    with (node_build.cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build() -> None:
    """Build everything that a node needs; a running node uses these files, so it is an error."""
    check_no_node()
    if node_image.is_built():
        cluster_build.build(node_build.NEEDED)
        return
    cluster_build.build([node_build.MODULES["pause"]])  # it is part of the sandbox image
    with node_image.build_in_background():
        cluster_build.build(node_build.NEEDED)


def check_no_node() -> None:
    """Raise NodeError if a node is running and its owner, too."""
    node = Node()
    if node.is_alive and not node.is_orphan:
        raise NodeError(f"a node is already running: got {node.kubeconfig}. Fix: make node-down")


def up(*, owned: bool = False) -> Node:
    """Start a node and wait until it is ready. An `owned` node may be removed after this process has ended."""
    with lock_node():
        check_no_node()
        node = Node()
        clear(node)
        try:
            start(node, owner=os.getpid() if owned else None)
        except BaseException:
            keep_logs(node)
            clear(node)
            raise
        return node


def start(node: Node, owner: int | None) -> None:
    """Start process 1 and wait until the node is ready; `owner` is the id of the process that owns it."""
    node.folder.mkdir(parents=True, mode=0o711)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        (node.folder / "supervisor.log").open("wb") as log,
    ):
        number = listener.fileno()
        process = subprocess.Popen(
            [*ISOLATE, sys.executable, str(SUPERVISOR), str(node.folder), str(number)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[number],
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": node_build.PYTHONPATH},
        )
        state: dict[str, Any] = {
            "pid": process.pid,
            "started_at": started_at(process.pid),
            "port": listener.getsockname()[1],
        }
        state["owner"] = [owner, started_at(owner)] if owner else None
    (node.folder / "state.json").write_text(json.dumps(state))
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.close()

    def is_started() -> bool:
        if process.poll() is not None:
            failed = node.folder / "failed"
            error = failed.read_text() if failed.is_file() else (node.folder / "supervisor.log").read_text()[-500:]
            raise NodeError(f"the node did not start: {error}")
        return (node.folder / "started").exists()

    wait_for("node", is_started)
    first = node.first_process
    (node.folder / "state.json").write_text(json.dumps(state | {"first": [first, started_at(first)]}))
    node.attach()
    wait_for("ready node", lambda: is_ready(node))
    wait_for("service account `default`", lambda: node.kubectl("get", "sa", "default", check=False).returncode == 0)


def is_ready(node: Node) -> bool:
    found = node.kubectl("get", "node", node_servers.NODE, "--output=json", check=False)
    conditions = json.loads(found.stdout)["status"]["conditions"] if found.returncode == 0 else []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def down() -> bool:
    """Remove the node, even a killed one; return whether there was anything to remove."""
    with lock_node():
        node = Node()
        existed = node.folder.exists() or any(path.exists() for path in node_servers.cgroups())
        clear(node)
        return existed


def clear(node: Node) -> None:
    """End process 1 of the node's namespaces; the kernel then ends the other processes, mounts and network."""
    if node.is_alive:
        pid = node.state["pid"]
        # `unshare` waits for process 1, so end that first; end `unshare` itself if it has not forked yet.
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]) if children else pid, signal.SIGKILL)
    wait_for("end of the node's processes", lambda: not namespace_members(node))
    wait_for("removal of control groups", remove_cgroups)
    if mounted := [line.split()[4] for line in mounts() if line.split()[4].startswith(f"{node.folder}/")]:
        raise NodeError(f"mounts below {node.folder}: got {', '.join(mounted)}. Fix: umount them")
    wait_for("removal of the node's folder", lambda: remove_folder(node.folder))


def namespace_members(node: Node) -> bool:
    """Return whether any process of the node exists: `unshare`, process 1, its children, or containers."""
    busy = any(path.is_dir() and cgroup_is_busy(path) for path in node_servers.cgroups())
    return node.is_alive or node.is_ending or busy


def cgroup_is_busy(top: Path) -> bool:
    return any(
        (Path(folder) / "cgroup.procs").read_text().strip() for folder, _, _ in os.walk(top) if Path(folder).is_dir()
    )


def remove_cgroups() -> bool:
    try:
        node_servers.remove_cgroups()
    except OSError:  # a process in it is still ending
        return False
    return True


def remove_folder(folder: Path) -> bool:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return not folder.exists()
    except OSError:  # a killed server wrote once more
        return False
    return True


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def keep_logs(node: Node) -> Path | None:
    """Copy the servers' logs to where they outlive the node."""
    kept = node_image.ROOT / ".cache" / "node-logs"
    if not node.folder.is_dir():
        return None
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in ("logs", "pod-logs"):
        if (node.folder / name).is_dir():
            shutil.copytree(node.folder / name, kept / name)
    if (node.folder / "supervisor.log").is_file():
        shutil.copy(node.folder / "supervisor.log", kept)
    return kept


def run(verb: str) -> None:
    if reason := node_build.obstacle():
        raise NodeError(reason)
    if verb == "down":
        say("node removed" if down() else "there was no node")
        return
    build()
    began = time.monotonic()
    node = up()
    seconds = time.monotonic() - began
    say(f"ready after {seconds:.0f} s, with image {node_image.IMAGE}; `make node-down` removes it")
    sys.stdout.write(f"{node.kubeconfig}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing an error, or 130 after Ctrl-C."""
    parser = Parser(prog="python tests/node/node.py", description=__doc__)
    parser.add_argument("verb", choices=("up", "down"), help="start or remove the node")
    verb = parser.parse_args(arguments).verb

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        run(verb)
    except (NodeError, BuildError, PlaneError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; `make node-down` cleans up")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
