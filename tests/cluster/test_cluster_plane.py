"""The harness itself: it leaves no process running and uses no network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import cluster_plane
from cluster_plane import Plane, wait_for

#: Starts a process in the network namespace, prints its ID and waits.
STARTER = """
import sys, time
from pathlib import Path
from cluster_plane import Plane
plane = Plane(Path(sys.argv[1]))
plane.logs.mkdir(parents=True)
plane.enter_namespace()
print(plane.spawn("sleep", "sleep", "600").pid, plane.processes[0][1].pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_every_process_ends_when_its_starter_is_killed(programs: None, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(cluster_plane.__file__).parent)}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "plane")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    started = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(started) == 2
    assert all(map(is_running, started))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_for("end of all processes", lambda: not any(map(is_running, started)), patience=60)


def test_the_control_plane_has_no_network_but_loopback(plane: Plane) -> None:
    interfaces = plane.run(["cat", "/proc/net/dev"]).stdout.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
