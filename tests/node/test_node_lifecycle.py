"""A node starts, runs one job and stops within a minute, and it leaves nothing on the machine, even if killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import node as node_commands
import node_build
import node_servers
import pytest
from cluster_plane import wait_for
from node_runs import BUSY, Run, background_load, record_measurement

SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
)
#: Names of the processes of a node.
SERVERS = {
    "kubelet",
    "containerd",
    "containerd-shim-runc-v2",
    "etcd",
    "kube-apiserver",
    "coredns",
    "pause",
    "node_supervisor",
}
SMALL = {"train": {"steps": 60, "batch_size": 64}, "checkpoint": {"every_steps": 0}}


@pytest.fixture(autouse=True)
def no_node(programs: None) -> Iterator[None]:
    """Exit if a node is already running, because these tests start and stop nodes; stop the node afterwards."""
    if (node := node_commands.Node()).is_alive and not node.is_orphan:
        pytest.exit("error: a node is already running. Fix: make node-down", returncode=2)
    yield
    node_commands.down()


def servers() -> set[str]:
    """Return process id and command of every process that belongs to a node.

    Other tests may run a control plane on this machine. The arguments of a node's servers contain the node's folder or
    containerd's namespace.
    """
    found = set()
    own = (str(node_commands.home()), "k8s.io", "/pause")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (words := command_of(folder)):
            names = {Path(word).name for word in words[:2]} | {Path(word).stem for word in words[:2]}
            if names & SERVERS and any(word.startswith(own) or f"={own[0]}" in word for word in words):
                found.add(f"{folder.name} {' '.join(words)[:80]}")
    return found


def command_of(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_text().split("\0")
    except OSError:  # the process has exited
        return []


def traces() -> dict[str, object]:
    """Return everything on this machine that a node could change."""
    links = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout
    return {
        "mounts": sorted(line.split()[4] for line in node_commands.mounts()),
        "links": sorted(line.split(":")[1].strip() for line in links.splitlines()),
        "control groups": [str(path) for path in node_servers.cgroups() if path.exists()],
        "settings of the kernel": {name: Path("/proc/sys", name).read_text() for name in SYSCTLS},
        "processes": sorted(servers()),
        "named networks": sorted(map(str, Path("/run/netns").glob("*"))),
        "folders": [str(path) for path in (node_commands.home(), Path(node_servers.VOLUME)) if path.exists()],
        "logs of pods": [name for name in ("/var/log/pods", "/var/log/containers") if Path(name).exists()],
    }


def test_a_node_starts_runs_a_job_and_stops_within_a_minute_and_leaves_nothing() -> None:
    load, before, began = background_load(), traces(), time.monotonic()
    node = node_commands.up(owned=True)
    ready = time.monotonic()
    run = Run(node, "minute", trainer=SMALL).start()
    assert run.result()["state"] == "complete"
    ended = time.monotonic()
    assert traces() != before, "traces() does not detect a node"
    node_commands.down()
    stopped = time.monotonic()
    assert traces() == before
    parts = f"start {ready - began:.1f} s, one job {ended - ready:.1f} s, stop {stopped - ended:.1f} s"
    record_measurement(f"{parts}; {load:.1f} busy processors before the test")
    assert stopped - began < 60 or load > BUSY


def test_node_down_removes_a_killed_node() -> None:
    before = traces()
    node = node_commands.up(owned=True)
    run = Run(node, "killed", trainer={"train": {"steps": 100_000}}).start()
    wait_for("running containers", lambda: any("/pause" in each for each in servers()))
    first = node.first_process
    os.kill(node.state["pid"], signal.SIGKILL)
    wait_for("end of process 1", lambda: node_commands.started_at(first) is None)
    assert run.volume
    assert servers() == set(), "the kernel must end every process of the namespace"
    assert node_commands.down() is True
    assert traces() == before
    assert node_commands.down() is False, "there must be nothing left to remove"


def test_a_node_starts_after_a_killed_one_without_node_down() -> None:
    before = traces()
    node = node_commands.up(owned=True)
    os.kill(node.state["pid"], signal.SIGKILL)
    wait_for("end of the recorded process", lambda: not node.is_alive)
    again = node_commands.up(owned=True)
    assert again.kubectl("get", "nodes", "--output=name").stdout == "node/node\n"
    node_commands.down()
    assert traces() == before


def test_up_prints_a_working_kubeconfig_and_rejects_a_second_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", node_build.PYTHONPATH)
    command = [sys.executable, str(Path(node_commands.__file__))]
    began = subprocess.run([*command, "up"], capture_output=True, text=True, check=False, timeout=120)
    assert began.returncode == 0, began.stderr
    kubeconfig = began.stdout.strip()
    kubectl = [str(node_commands.cluster_build.program("kubectl")), f"--kubeconfig={kubeconfig}"]
    shown = subprocess.run([*kubectl, "get", "nodes"], capture_output=True, text=True, check=False, timeout=60)
    assert "Ready" in shown.stdout, shown.stderr
    second = subprocess.run([*command, "up"], capture_output=True, text=True, check=False, timeout=120)
    assert second.returncode == 2
    assert "a node is already running" in second.stderr
    assert "Traceback" not in second.stderr
    ended = subprocess.run([*command, "down"], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert not Path(kubeconfig).exists()


def test_interrupting_a_start_leaves_nothing() -> None:
    before = traces()
    command = [sys.executable, str(Path(node_commands.__file__)), "up"]
    environment = os.environ | {"PYTHONPATH": node_build.PYTHONPATH}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for("starting node", (node_commands.home() / "logs" / "etcd.log").exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert traces() == before


def test_a_non_root_user_gets_a_one_line_error() -> None:
    # Import before setuid: another user may not be able to read the checkout.
    code = "import os, sys, node; os.setuid(65534); sys.exit(node.main(['up']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": node_build.PYTHONPATH},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: a node needs root, this is user 65534\n"


def test_a_typo_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        node_commands.main(["upp"])
    errors = capsys.readouterr().err
    assert "'upp'" in errors
    assert len(errors.splitlines()) == 1, errors


def test_a_build_without_disk_space_fails_and_removes_the_files_of_a_killed_build(tmp_path: Path) -> None:
    left = tmp_path / "torchrec-cloud" / "node" / "build-of-yesterday"
    left.mkdir(parents=True)
    code = "import sys, node_image; node_image.DISK_GIB = 10**6; sys.exit(node_image.main(['build']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": node_build.PYTHONPATH, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 2, done.stderr
    assert "needed: 1000000 GiB" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert not left.exists()
