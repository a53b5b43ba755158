"""The netcheck command: correct bandwidths, exit code 1 for a bad network, and no hangs."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_jobs import ROOT, bounded, environment, torch_as_it_was, trainer

from trainer.main import main
from trainer.netcheck import collective as netbench
from trainer.netcheck import command as netcheck


def check(*options: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run `trainer launch netcheck` on CPUs."""
    return trainer("launch", "--nproc", str(processes), "netcheck", "--device", "cpu", "--iterations", "3", *options)


def result(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def three() -> subprocess.CompletedProcess[str]:
    """Return a finished check of three processes, whose buffers do not divide by three."""
    return check("--sizes-mib", "2,1", processes=3)


def test_both_operations_are_measured_at_every_size(three: subprocess.CompletedProcess[str]) -> None:
    assert three.returncode == 0, three.stderr
    assert three.stderr == "", "a library prints warnings"
    found = result(three)
    assert (found["ok"], found["backend"], found["processes"], found["failures"]) == (True, "gloo", 3, [])
    operations = [(item["size_mib"], item["operation"]) for item in found["measured"]]
    assert operations == [(1, "all_to_all"), (1, "all_reduce"), (2, "all_to_all"), (2, "all_reduce")]
    assert "GB/s" in three.stdout.splitlines()[2], "no table for the user"


def test_the_table_in_a_log_shows_complete_host_names(capsys: pytest.CaptureFixture[str]) -> None:
    host = "netcheck-" + "7" * 54  # the longest name of a pod, 63 characters
    numbers = {"operation": "all_reduce", "size_mib": 16, "seconds": 0.02, "slowest_rank": 1, "slowest_host": host}
    numbers |= {"algorithm_gb_per_s": 0.8, "bus_gb_per_s": 0.8}
    netcheck._print_result({"measured": [numbers], "processes": 2, "backend": "gloo"}, [])
    *table, _ = capsys.readouterr().out.splitlines()
    assert any(f"rank 1 on {host}" in line for line in table)


def test_bandwidths_follow_the_definitions_of_nccl_tests(three: subprocess.CompletedProcess[str]) -> None:
    for item in result(three)["measured"]:
        size = item["size_mib"] * 2**20 // 12 * 12
        assert item["algorithm_gb_per_s"] == pytest.approx(size / item["seconds"] / 1e9)
        factor = 4 / 3 if item["operation"] == "all_reduce" else 2 / 3
        assert item["bus_gb_per_s"] == pytest.approx(item["algorithm_gb_per_s"] * factor)


def test_a_network_below_the_minimum_fails_and_names_the_slowest_host() -> None:
    ended = check("--sizes-mib", "1,2", "--min-gb-per-s", "100000")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1, f"one line, from one process: {ended.stderr}"
    for operation in ("all_to_all", "all_reduce"):
        assert f"{operation} of 2 MiB is too slow" in ended.stderr
    assert "of 1 MiB" not in ended.stderr, "small sizes are limited by latency, not by bandwidth"
    assert "allowed: --min-gb-per-s 100000 or more; slowest: rank" in ended.stderr
    assert result(ended)["ok"] is False


def test_a_network_above_the_minimum_passes() -> None:
    ended = check("--sizes-mib", "1", "--min-gb-per-s", "0.000001")
    assert ended.returncode == 0, ended.stderr


def test_gloo_is_never_the_expected_fabric() -> None:
    ended = check("--expect-log", "NET/OFI Selected provider is efa")
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: the fabric of --expect-log 'NET/OFI Selected provider is efa' was not used: got backend gloo\n"
    )


def test_one_process_reports_that_it_has_no_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with torch_as_it_was():
        assert main(["netcheck", "--device", "cpu"]) == 0
    note, last = capsys.readouterr().out.splitlines()
    assert "one process has no peer to measure" in note
    assert json.loads(last)["measured"] == []


def test_a_process_that_never_joins_ends_the_check_after_the_timeout(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.exit(subprocess.call([sys.executable, '-m', 'trainer', 'netcheck', '--timeout-s', '8']))\n"
        "sys.stdin.read()\n"
        "import time; time.sleep(100)\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ended = bounded([sys.executable, *launcher, str(script)], 90)
    assert ended.returncode != 0
    assert "error: netcheck did not finish within --timeout-s 8, while starting the process group" in ended.stderr


@pytest.mark.parametrize("operation", ["all_to_all", "all_reduce"])
def test_wrong_results_are_detected(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    with torch_as_it_was():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert netbench._check(operation, 1_000, runtime)
        assert netbench.measure(operation, 1, 1, runtime).wrong is None
        name = "all_to_all_single" if operation == "all_to_all" else "all_reduce"
        original = getattr(dist, name)

        def corrupting(target: torch.Tensor, *others: Any) -> None:
            original(target, *others)
            target[777] += 1

        monkeypatch.setattr(dist, name, corrupting)
        assert not netbench._check(operation, 1_000, runtime)
        wrong = netbench.measure(operation, 1, 1, runtime).wrong
    assert wrong is not None
    assert f"{operation} of 1 MiB gave wrong numbers in rank 0 on" in wrong


def log_failures(text: str | None, expected: str, folder: Path) -> list[str]:
    """Return the failures that NCCL's log of a single process causes."""
    runtime: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    log = folder / "nccl.log"
    if text is not None:
        log.write_text(text)
    with torch_as_it_was():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return netcheck._missing_log(expected, runtime, log)


SOCKET = "vm:12:12 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>\nvm:12:12 [0] NCCL INFO Using network Socket\n"


def test_a_log_with_the_expected_fabric_passes(tmp_path: Path) -> None:
    assert (
        log_failures(
            "vm:1:1 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa\n", "provider is efa", tmp_path
        )
        == []
    )


def test_a_silent_fallback_to_tcp_is_reported_with_the_network_used(tmp_path: Path) -> None:
    (failure,) = log_failures(SOCKET, "NET/IB", tmp_path)
    assert "NCCL's log does not contain --expect-log 'NET/IB' in 1 of 1 processes, first rank 0 on" in failure
    assert "got 'NET/Socket : Using [0]eth0:10.0.0.4<0>'" in failure


def test_a_missing_log_is_reported(tmp_path: Path) -> None:
    (failure,) = log_failures(None, "NET/IB", tmp_path)
    assert "got no network" in failure


def test_options_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "netcheck.json"
    file.write_text(json.dumps({"sizes_mib": [1], "min_gb_per_s": 100000, "iterations": 1}))
    ended = trainer("launch", "--nproc", "2", "netcheck", "--config", str(file), "--min-gb-per-s", "0.000001")
    assert ended.returncode == 0, "the command line wins over the file"
    assert [item["size_mib"] for item in result(ended)["measured"]] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--min-gb-per-s", "-1"], "--min-gb-per-s: got '-1'; allowed: a number above 0"),
        (["--sizes-mib", "1,x"], "--sizes-mib: got 'x'; allowed: an integer of 1 or more"),
        (["--iteration", "2"], "unknown option --iteration (did you mean --iterations?)"),
        (["--config", "no/such.json"], "--config no/such.json: cannot be read"),
    ],
)
def test_a_wrong_option_is_refused(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["netcheck", *arguments]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1


def test_two_processes_report_a_wrong_option_once() -> None:
    ended = check("--sizes-mib", "0")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, f"one line, from one process: {ended.stderr}"


@pytest.mark.parametrize("command", ["preprocess", "fetch", "netcheck"])
def test_each_command_is_listed_and_its_help_explains_its_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    assert f"\n  {command} " in capsys.readouterr().out
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: python -m trainer {command}" in text
    assert "--progress" in text


def test_under_an_operator_the_machine_of_rank_0_exits_first() -> None:
    # The training operator deletes running pods when the first one succeeds, and with them the log of rank 0.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    operator = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "first"}
    operator["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "trainer", "launch", "netcheck", "--device=cpu", "--sizes-mib=1", "--iterations=1"]
    machines = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(**operator))
        for _ in range(2)
    ]
    try:
        ends: queue.Queue[int] = queue.Queue()
        for index, machine in enumerate(machines):
            threading.Thread(target=lambda i=index, m=machine: (m.wait(), ends.put(i)), daemon=True).start()
        first = machines[index := ends.get(timeout=120)]
        second = machines[1 - index]
        with pytest.raises(subprocess.TimeoutExpired):  # a kubelet needs that long to report the first exit
            second.wait(timeout=2)
        assert '"event": "result"' in first.communicate(timeout=30)[0], "it is not the machine of rank 0"
        assert '"event": "result"' not in second.communicate(timeout=60)[0]
        assert (first.returncode, second.returncode) == (0, 0)
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
