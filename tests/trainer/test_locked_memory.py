"""Locked memory: limits and capabilities are read, and RDMA without them is refused before NCCL starts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_jobs import torch_as_it_was

from trainer.errors import UserError
from trainer.main import main
from trainer.runtime import locked_memory
from trainer.runtime.locked_memory import LockedMemory, format_bytes, require_lock, require_locked_memory

GIB = 2**30


def limits(soft: int, *, uid: int = 10001, effective: bool = False, granted: bool = False) -> LockedMemory:
    return LockedMemory(soft, soft, uid, effective, granted, num_devices=8)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this machine look as if it had two RDMA devices."""
    for number in range(2):
        (tmp_path / f"uverbs{number}").touch()
    monkeypatch.setattr(locked_memory, "_DEVICES", tmp_path)
    return tmp_path


def limited(monkeypatch: pytest.MonkeyPatch, found: LockedMemory) -> None:
    """Make this process have limits."""
    monkeypatch.setattr(locked_memory, "read_locked_memory", lambda: found)


@pytest.mark.parametrize(
    ("found", "suffices"),
    [
        (limits(64 * 2**10), False),
        (limits(8 * 2**20), False),
        (limits(8 * 2**20, granted=True), False),
        (limits(8 * 2**20, uid=0), False),
        (limits(8 * 2**20, uid=0, effective=True, granted=True), True),
        (limits(GIB), True),
        (limits(2**50), True),
        (limits(resource.RLIM_INFINITY), True),
    ],
)
def test_a_limit_of_a_gibibyte_or_the_capability_in_effect_suffices(found: LockedMemory, suffices: bool) -> None:
    assert found.suffices is suffices


def test_the_error_names_the_limits_the_capability_and_the_fix_in_one_line() -> None:
    assert limits(8 * 2**20, granted=True).describe_problem() == (
        "RDMA cannot register memory: got RLIMIT_MEMLOCK 8 MiB, uid 10001, CAP_IPC_LOCK granted without effect, as "
        "only root gets it; allowed: 1 GiB or more, or CAP_IPC_LOCK in effect. Fix: raise LimitMEMLOCK of the node's "
        "container runtime, or run the pod as root with capability IPC_LOCK; NCCL_NET=Socket uses TCP on purpose"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [(65536, "64 KiB"), (8 * 2**20, "8 MiB"), (2**50, "1 PiB"), (resource.RLIM_INFINITY, "unlimited"), (0, "0 bytes")],
)
def test_limits_are_printed_with_a_unit(value: int, shown: str) -> None:
    assert format_bytes(value) == shown


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    program = (
        "import resource as r; from trainer.runtime.locked_memory import read_locked_memory;"
        "_, hard = r.getrlimit(r.RLIMIT_MEMLOCK); r.setrlimit(r.RLIMIT_MEMLOCK, (65536, hard));"
        "found = read_locked_memory(); assert (found.soft_bytes, found.hard_bytes) == (65536, hard), found;"
        "assert r.getrlimit(r.RLIMIT_MEMLOCK) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_machine_without_rdma_devices_needs_no_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_memory, "_DEVICES", tmp_path / "missing")
    limited(monkeypatch, limits(65536))
    assert require_locked_memory({}) is None


@pytest.mark.parametrize("chosen", [{"NCCL_NET": "Socket"}, {"NCCL_NET": "socket"}, {"NCCL_IB_DISABLE": "1"}])
def test_tcp_on_purpose_needs_no_locked_memory(
    devices: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]
) -> None:
    limited(monkeypatch, limits(65536))
    assert require_locked_memory(chosen) is None
    with pytest.raises(UserError, match="RLIMIT_MEMLOCK 64 KiB"):
        require_locked_memory({})


@pytest.mark.parametrize(("local_rank", "reported"), [("0", False), ("3", True)])
def test_one_process_of_each_machine_prints_the_error(
    local_rank: str, reported: bool, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, limits(65536))
    with pytest.raises(UserError) as raised:
        require_locked_memory({"LOCAL_RANK": local_rank, "RANK": "11"})
    assert raised.value.reported is reported


def test_a_refused_lock_is_an_error_with_the_kernels_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_memory, "_try_lock", lambda num_bytes: "Cannot allocate memory")
    with pytest.raises(
        UserError, match=r"^locking 1 GiB of memory failed \(Cannot allocate memory\): got RLIMIT_MEMLOCK"
    ):
        require_lock(limits(2**50), {})


def test_the_kernel_limits_a_user_without_the_capability() -> None:
    """Lock 1 MiB with a limit of 64 KiB, as another user than root."""
    program = (
        "import os, resource as r; from trainer.runtime import locked_memory as m;"
        "assert m._try_lock(2**20) is None or os.geteuid();"
        "r.setrlimit(r.RLIMIT_MEMLOCK, (65536, 65536));"
        "os.geteuid() or os.setuid(10001);"
        "assert m._try_lock(2**20) == 'Cannot allocate memory', m._try_lock(2**20);"
        "assert m._try_lock(2**15) is None; assert not m.read_locked_memory().suffices"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_netcheck_refuses_before_it_starts_with_exit_code_2(
    devices: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limited(monkeypatch, limits(8 * 2**20))
    assert main(["netcheck"]) == 2
    assert capsys.readouterr().err.startswith("error: RDMA cannot register memory: got RLIMIT_MEMLOCK 8 MiB")


def test_netcheck_on_cpus_needs_no_locked_memory(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, limits(8 * 2**20))
    with torch_as_it_was():
        assert main(["netcheck", "--device", "cpu"]) == 0


def test_netcheck_shows_the_limits_of_each_machine(
    devices: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limited(monkeypatch, limits(2**50))
    monkeypatch.setattr(locked_memory, "_try_lock", lambda num_bytes: None)
    with torch_as_it_was():
        assert main(["netcheck"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    (machine,) = json.loads(last)["machines"]
    assert machine | {"host": ""} == {
        "host": "",
        "uid": 10001,
        "memlock_soft": "1 PiB",
        "memlock_hard": "1 PiB",
        "ipc_lock": "missing",
        "rdma_devices": 8,
        "locked_gib": 1.0,
    }
    assert any("1 PiB" in line and "RLIMIT_MEMLOCK" not in line for line in table), "no row in the table"


@pytest.mark.parametrize(
    ("device", "local_world", "refused"),
    [("cuda", "8", True), ("cuda", "16", False), ("cpu", "8", False)],
    ids=["two machines", "one machine", "CPUs"],
)
def test_a_training_on_several_machines_is_refused_before_nccl_starts(
    device: str, local_world: str, refused: bool, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.config import TrainLoopConfig
    from trainer.runtime import process_group

    class StartedError(Exception):
        """The process group was started."""

    def start(*arguments: object) -> None:
        raise StartedError

    limited(monkeypatch, limits(8 * 2**20))
    monkeypatch.setattr(process_group, "_choose_device", lambda *arguments: torch.device(device))
    monkeypatch.setattr(process_group, "choose_precision", lambda *arguments: ("fp32", "test"))
    monkeypatch.setattr(process_group, "apply_precision", lambda precision: None)
    monkeypatch.setattr(process_group, "_init_process_group", start)
    environ = {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local_world}
    with (
        torch_as_it_was(),
        pytest.raises(UserError if refused else StartedError) as raised,
        process_group.init_runtime(TrainLoopConfig(), environ),
    ):
        pass
    assert "RDMA cannot register memory" in str(raised.value) or not refused
