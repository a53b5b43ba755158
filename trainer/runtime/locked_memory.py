"""The memory that this machine's processes may lock, which network cards with RDMA read and write.

The kernel refuses to register more than RLIMIT_MEMLOCK with a card unless the process has CAP_IPC_LOCK
(drivers/infiniband/core/umem.c). NCCL then falls back to TCP, or ends with "Cannot allocate memory".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError

#: Buffers, queues and proxies of one process of NCCL, with a reserve.
REQUIRED_BYTES = 2**30
#: Device plug-ins of InfiniBand and EFA give these files to a pod.
_DEVICES = Path("/dev/infiniband")
_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14  # its bit in linux/capability.h


@dataclass(frozen=True)
class LockedMemory:
    """What limits this process: RLIMIT_MEMLOCK, soft (before it was raised) and hard, the user, and CAP_IPC_LOCK.

    `effective` says that the capability has an effect, `granted` that the container has it, which helps root only.
    `num_devices` is the number of RDMA devices of this container.
    """

    soft_bytes: int
    hard_bytes: int
    uid: int
    effective: bool
    granted: bool
    num_devices: int

    @property
    def suffices(self) -> bool:
        """Return whether a process may lock REQUIRED_BYTES."""
        return self.effective or self.hard_bytes == resource.RLIM_INFINITY or self.hard_bytes >= REQUIRED_BYTES

    def fields(self) -> dict[str, Any]:
        """Return the facts for the JSON result."""
        return {
            "uid": self.uid,
            "memlock_soft": format_bytes(self.soft_bytes),
            "memlock_hard": format_bytes(self.hard_bytes),
            "ipc_lock": self._capability,
            "rdma_devices": self.num_devices,
        }

    def describe_problem(self, found: str = "RDMA cannot register memory") -> str:
        """Return one line: what is wrong, the limits, what is allowed, and what fixes it."""
        return (
            f"{found}: got RLIMIT_MEMLOCK {format_bytes(self.hard_bytes)}, uid {self.uid}, CAP_IPC_LOCK "
            f"{self._capability}; allowed: {format_bytes(REQUIRED_BYTES)} or more, or CAP_IPC_LOCK in effect. Fix: "
            "raise LimitMEMLOCK of the node's container runtime, or run the pod as root with capability IPC_LOCK; "
            "NCCL_NET=Socket uses TCP on purpose"
        )

    @property
    def _capability(self) -> str:
        if self.effective:
            return "in effect"
        return "granted without effect, as only root gets it" if self.granted else "missing"


def read_locked_memory() -> LockedMemory:
    """Raise the soft limit to the hard one, which needs no rights, and return the limits of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines() if ":" in line)
    effective, granted = (int(lines[name], 16) >> _CAP_IPC_LOCK & 1 == 1 for name in ("CapEff", "CapBnd"))
    num_devices = len(list(_DEVICES.glob("uverbs*")))
    return LockedMemory(soft, hard, os.geteuid(), effective, granted, num_devices)


def require_locked_memory(environ: Mapping[str, str]) -> LockedMemory | None:
    """Return the limits, or None if this process uses no RDMA device; raise UserError if they are too low."""
    if _chooses_tcp(environ) or not any(_DEVICES.glob("uverbs*")):
        return None
    found = read_locked_memory()
    if not found.suffices:
        raise _error(found.describe_problem(), environ)
    return found


def _chooses_tcp(environ: Mapping[str, str]) -> bool:
    """Return whether the user turned RDMA off; NCCL compares the name without case."""
    return environ.get("NCCL_NET", "").lower() == "socket" or environ.get("NCCL_IB_DISABLE") == "1"


def require_lock(found: LockedMemory, environ: Mapping[str, str]) -> float:
    """Lock REQUIRED_BYTES for a moment and return that in GiB; raise UserError if the kernel refuses."""
    reason = _try_lock(REQUIRED_BYTES)
    if reason:
        text = f"locking {format_bytes(REQUIRED_BYTES)} of memory failed ({reason})"
        raise _error(found.describe_problem(text), environ)
    return REQUIRED_BYTES / 2**30


def format_bytes(value: int) -> str:
    """Return a limit with a unit, such as `8 MiB` or `unlimited`."""
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**power:
            return f"{value / 2**power:g} {unit}"
    return f"{value} bytes"


def _error(text: str, environ: Mapping[str, str]) -> UserError:
    """Return an error that one process of each machine prints, because each machine has limits of its own."""
    error = UserError(text)
    error.reported = environ.get("LOCAL_RANK", "0") != "0"
    return error


def _try_lock(num_bytes: int) -> str | None:
    """Lock and release a buffer; return the reason if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        mapped = mmap.mmap(-1, num_bytes)
    except OSError as error:  # RLIMIT_AS, or no overcommitted memory
        return error.strerror
    with mapped as buffer:
        first = ctypes.c_char.from_buffer(buffer)
        refused = libc.mlock(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(num_bytes))
        reason = os.strerror(ctypes.get_errno()) if refused else None
        del first  # a buffer with pointers into it cannot be closed, which also unlocks it
    return reason
