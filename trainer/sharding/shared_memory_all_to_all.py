"""The all-to-all of pooled embeddings between CPU processes of one machine, through memory that they share.

gloo sends every byte through the loopback device, with two copies in the kernel and threads that take cores from the
model. In this all-to-all a process writes the data for the others into memory that they have mapped, announces it by a
collective of four bytes, and each process copies its part to its destination. Errors and time limits are those of that
collective, so a process that dies is noticed as with gloo.

The memory is anonymous (memfd_create(2)) and opened through /proc/<pid>/fd. It counts as memory of the processes, does
not need a large /dev/shm, and is freed when a process is killed.

Shapes: W processes, B_r samples of process r and B of all, D_r columns that it looks up and D of all.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.runtime.process_group import Runtime

_FLOAT_BYTES = 4
_PAGE_FLOATS = 2**21 // _FLOAT_BYTES  # in a huge page
_SLOTS = 2


def use_shared_memory(dists: Sequence[TwPooledEmbeddingDist], config: TrainConfig, runtime: Runtime) -> str:
    """Replace the all-to-all of `dists` as `sharding.exchange` selects; return the exchange in use. Collective.

    Raises UserError if `shared_memory` is selected but not possible.
    """
    if runtime.world_size == 1 and config.sharding.exchange == "auto":
        return "none"
    group, description = create_shared_memory_group(config, runtime)
    if group is None:
        return description
    for pooled in dists:  # TorchRec sets the same attribute at the first use
        pooled._dist = SharedMemoryAllToAll(group, pooled._dim_sum_per_rank, pooled._callbacks or ())  # type: ignore[assignment]
    return description if dists else "collective: no table is sharded table_wise or column_wise"


def create_shared_memory_group(config: TrainConfig, runtime: Runtime) -> tuple[dist.ProcessGroup | None, str]:
    """Return a group for shared memory, or None, and a description of the exchange in use. Collective.

    Raises UserError if `shared_memory` is selected but not possible.
    """
    if config.sharding.exchange == "collective":
        return None, "collective"
    obstacle = _find_obstacle(config, runtime)
    if obstacle is None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.train.timeout_seconds))
        assert isinstance(group, dist.ProcessGroup), "every process is a member"
        obstacle = _try_to_share(group)
        if obstacle is None:
            return group, "shared_memory"
    if config.sharding.exchange == "shared_memory":
        raise UserError(f"sharding.exchange is shared_memory, but {obstacle}; allowed: auto, collective")
    return None, f"collective: {obstacle}"


def _find_obstacle(config: TrainConfig, runtime: Runtime) -> str | None:
    """Return why shared memory is impossible, None if it may work; the same on every process."""
    precisions = (config.sharding.forward_precision, config.sharding.backward_precision)
    if runtime.world_size == 1:
        return "there is one process"
    if runtime.device.type != "cpu":
        return f"the device is {runtime.device.type}"
    if runtime.local_world_size != runtime.world_size:
        return "the processes are on several machines"
    if precisions != ("fp32", "fp32"):
        return f"sharding.forward_precision and backward_precision are {' and '.join(precisions)}, not fp32"
    return None


def _try_to_share(group: dist.ProcessGroup) -> str | None:
    """Return why these processes cannot share memory, None if they can. Collective."""
    try:
        _Memory(group, 1)
    except OSError as error:
        return f"memory cannot be shared: {error.strerror}"
    return None


class _Memory:
    """float32 memory of each process of a group, mapped by all of them, with huge pages if the system has them."""

    def __init__(self, group: dist.ProcessGroup, floats: int) -> None:
        """Create and map the memory; raise OSError on all processes if one of them fails. Collective."""
        self.floats = -(-floats // _PAGE_FLOATS) * _PAGE_FLOATS
        me, everyone = dist.get_rank(group), range(dist.get_world_size(group))
        failure: OSError | None = None
        descriptor, of_rank = -1, []
        try:
            descriptor = os.memfd_create("trainer-exchange")
            os.ftruncate(descriptor, self.floats * _FLOAT_BYTES)
        except OSError as error:
            failure = error
        places = _all_gather(group, (os.getpid(), descriptor))
        try:
            for rank, (pid, number) in zip(everyone, places, strict=True):
                of_rank.append(self._map(descriptor if rank == me else f"/proc/{pid}/fd/{number}"))
        except OSError as error:
            failure = failure or error
        failed = next((error for error in _all_gather(group, failure) if error is not None), None)
        if descriptor >= 0:
            os.close(descriptor)  # all processes have mapped it
        if failed is not None:
            raise failed
        self.mine, self.of_rank = of_rank[me], of_rank

    def _map(self, file: int | str) -> Tensor:
        descriptor = os.open(file, os.O_RDWR) if isinstance(file, str) else file
        memory = mmap.mmap(descriptor, self.floats * _FLOAT_BYTES)
        if isinstance(file, str):
            os.close(descriptor)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32)


def _all_gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class _Channel:
    """One direction of the all-to-all: each process writes pieces, which the others then read.

    Two alternating slots make one collective per exchange enough: a process writes to a slot again only after a later
    exchange, which the others enter after they have read the slot.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._memory: _Memory | None = None
        self._pending: Any = None
        self._slot = 0
        self._signal = torch.zeros(1)

    def start(self, floats: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Write pieces (offset in floats, values) to this process's slot of at least `floats`, and announce them."""
        assert self._pending is None, "the previous pieces were never read"
        if self._memory is None or self._memory.floats < floats * _SLOTS:
            self._memory = _Memory(self._group, floats * _SLOTS)  # sizes are the same on all processes
        self._slot = (self._slot + 1) % _SLOTS
        for offset, piece in pieces:
            self._view(self._memory.mine, offset, piece.shape).copy_(piece)
        self._pending = dist.all_reduce(self._signal, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait until all processes have written."""
        self._pending.wait()
        self._pending = None

    def piece(self, rank: int, offset: int, shape: Sequence[int]) -> Tensor:
        """Return what process `rank` wrote at `offset`; valid until the exchange after the next one."""
        assert self._memory is not None
        return self._view(self._memory.of_rank[rank], offset, shape)

    def _view(self, memory: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
        assert self._memory is not None
        start = self._slot * (self._memory.floats // _SLOTS) + offset
        return memory[start : start + shape[0] * shape[1]].view(shape[0], shape[1])


@dataclass
class _Transfer:
    """The transfer of one batch: sums forward, their gradients backward."""

    samples: list[int]  # B_r
    first: list[int]  # samples before those of process r; the last entry is B
    own_gradient: Tensor | None = field(default=None)


class SharedMemoryAllToAll(nn.Module):
    """Replaces TorchRec's PooledEmbeddingsAllToAll: (B, D_me) of all samples -> (B_me, D) of all tables."""

    def __init__(
        self, group: dist.ProcessGroup, columns: Sequence[int], callbacks: Sequence[Callable[[Tensor], Tensor]]
    ) -> None:
        super().__init__()
        self._callbacks = callbacks  # they concatenate column shards
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.columns = list(columns)  # D_r
        self.first = [0, *accumulate(self.columns)]
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.sums, self.gradients = _Channel(group), _Channel(group)

    def forward(self, local_embs: Tensor, batch_size_per_rank: list[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Start the exchange and return an awaitable of its result."""
        samples = batch_size_per_rank or [local_embs.shape[0] // self.world_size] * self.world_size
        transfer = _Transfer(samples, [0, *accumulate(samples)])
        sent = _Send.apply(local_embs, self, transfer)
        result = PooledEmbeddingsAwaitable(_Received(self, transfer, local_embs, sent))
        result.callbacks.extend(self._callbacks)
        return result

    def columns_of(self, rank: int) -> slice:
        """Return the position of process `rank`'s columns among all columns."""
        return slice(self.first[rank], self.first[rank + 1])


class _Received(Awaitable[Tensor]):
    """An awaitable of a batch's pooled embeddings."""

    def __init__(self, all_to_all: SharedMemoryAllToAll, transfer: _Transfer, local: Tensor, sent: Tensor) -> None:
        super().__init__()
        self._arguments = (sent, local.detach(), all_to_all, transfer)

    def _wait_impl(self) -> Tensor:
        received: Tensor = _Receive.apply(*self._arguments)
        return received


class _Send(torch.autograd.Function):
    """Sends the other processes their samples; its backward pass receives the gradients that they sent."""

    @staticmethod
    def forward(ctx: Any, local_BD: Tensor, all_to_all: SharedMemoryAllToAll, transfer: _Transfer) -> Tensor:
        """Send (B, D_me) and return a token that connects this function to _Receive."""
        ctx.all_to_all, ctx.transfer = all_to_all, transfer
        columns, samples = local_BD.shape[1], transfer.first
        pieces = ((samples[r] * columns, local_BD[samples[r] : samples[r + 1]]) for r in all_to_all.others)
        all_to_all.sums.start(samples[-1] * max(all_to_all.columns), pieces)
        return local_BD.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient (B, D_me), divided by W as in TorchRec because each process averages over its samples."""
        all_to_all, transfer = ctx.all_to_all, ctx.transfer
        all_to_all.gradients.wait()
        me, columns, samples = all_to_all.rank, all_to_all.columns[all_to_all.rank], transfer.first
        gradient_BD = transfer.own_gradient.new_empty(samples[-1], columns)
        divisor = all_to_all.world_size if get_gradient_division() else 1
        for rank in range(all_to_all.world_size):
            shape = (transfer.samples[rank], columns)
            received = (
                transfer.own_gradient
                if rank == me
                else all_to_all.gradients.piece(rank, shape[0] * all_to_all.first[me], shape)
            )
            torch.div(received, divisor, out=gradient_BD[samples[rank] : samples[rank + 1]])
        transfer.own_gradient = None
        return gradient_BD, None, None


class _Receive(torch.autograd.Function):
    """Receives the sums that other processes sent; its backward pass sends them their gradients."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, local_BD: Tensor, all_to_all: SharedMemoryAllToAll, transfer: _Transfer) -> Tensor:
        """Return (B_me, D) from (B, D_me) of this process and the sums of the others."""
        ctx.all_to_all, ctx.transfer = all_to_all, transfer
        all_to_all.sums.wait()
        me, own = all_to_all.rank, transfer.samples[all_to_all.rank]
        pooled_BD = local_BD.new_empty(own, all_to_all.first[-1])
        pooled_BD[:, all_to_all.columns_of(me)] = local_BD[transfer.first[me] : transfer.first[me + 1]]
        for rank in all_to_all.others:
            columns = all_to_all.columns[rank]
            received = all_to_all.sums.piece(rank, transfer.first[me] * columns, (own, columns))
            pooled_BD[:, all_to_all.columns_of(rank)] = received
        return pooled_BD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradient (B_me, D) and return the token's gradient."""
        all_to_all, transfer, gradient_BD = ctx.all_to_all, ctx.transfer, gradients[0]
        samples = transfer.samples[all_to_all.rank]
        pieces = ((samples * all_to_all.first[r], gradient_BD[:, all_to_all.columns_of(r)]) for r in all_to_all.others)
        all_to_all.gradients.start(max(transfer.samples) * all_to_all.first[-1], pieces)
        transfer.own_gradient = gradient_BD[:, all_to_all.columns_of(all_to_all.rank)]
        return gradient_BD.new_zeros(1), None, None, None
