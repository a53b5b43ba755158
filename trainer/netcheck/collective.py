"""Time one collective and check its result, on the devices and the backend of the job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.runtime.process_group import Runtime

_WARMUP = 3
_PERIOD = 97  # a prime, so that the pattern does not align with parts of a power of two
_MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """One measured collective, equal in every process. `seconds` is the time of the slowest process."""

    operation: str
    size_mib: int
    seconds: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    slowest_rank: int
    slowest_host: str
    wrong: str | None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the result event."""
        return asdict(self)


def measure(operation: str, size_mib: int, iterations: int, runtime: Runtime) -> Measurement:
    """Check, warm up and time an operation on `size_mib` per process. Collective."""
    count = max(size_mib * _MIB // 4 // runtime.world_size, 1) * runtime.world_size  # float32 in equal parts
    correct = _check(operation, count, runtime)
    run = _operation(operation, torch.zeros(count, device=runtime.device))
    for _ in range(_WARMUP):
        run()
    _finish(runtime)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(iterations):
        run()
    _finish(runtime)
    mine = ((time.perf_counter() - began) / iterations, correct, socket.gethostname())
    everyone: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(everyone, mine)
    slowest = max(range(runtime.world_size), key=lambda rank: everyone[rank][0])
    seconds, _, host = everyone[slowest]
    algorithm = count * 4 / seconds / 1e9
    bad = [f"rank {rank} on {item[2]}" for rank, item in enumerate(everyone) if not item[1]]
    wrong = f"{operation} of {size_mib} MiB gave wrong numbers in {', '.join(bad[:4])}" if bad else None
    bus = algorithm * bus_factor(operation, runtime.world_size)
    return Measurement(operation, size_mib, seconds, algorithm, bus, slowest, host, wrong)


def bus_factor(operation: str, processes: int) -> float:
    """Return the ratio of bus to algorithm bandwidth (see trainer.netcheck.command)."""
    return (2 if operation == "all_reduce" else 1) * (processes - 1) / processes


def _operation(operation: str, buffer: Tensor) -> Callable[[], object]:
    """Return a function that runs the operation once on the buffer."""
    if operation == "all_reduce":
        return lambda: dist.all_reduce(buffer)
    received = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(received, buffer)


def _check(operation: str, count: int, runtime: Runtime) -> bool:
    """Return whether this process receives the correct numbers: small integers, so exact in float32. Collective."""
    rank, world = runtime.rank, runtime.world_size
    pattern = torch.arange(count, device=runtime.device) % _PERIOD
    if operation == "all_reduce":
        values = (pattern * (rank + 1)).float()
        dist.all_reduce(values)
        return torch.equal(values, (pattern * (world * (world + 1) // 2)).float())
    part = count // world
    position = pattern[:part]
    parts = torch.arange(world, device=runtime.device)[:, None]
    sent = (
        (position + _PERIOD * (rank * world + parts)).float().view(-1)
    )  # differs for each sender, receiver and position
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.equal(received, (position + _PERIOD * (parts * world + rank)).float().view(-1))


def _finish(runtime: Runtime) -> None:
    """Wait for the operations that are queued on the device."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
