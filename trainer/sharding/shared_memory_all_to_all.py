"""The all-to-all of pooled embeddings between CPU processes of one machine, through memory that they share.

gloo sends every byte through the loopback device: two copies in the kernel, and threads that take the cores from the
model. Here a process writes what the others need into memory that they have mapped, tells them so by a collective of
four bytes, and each reads its part right into place. Errors and time limits are those of that collective, so a process
that dies is noticed as before.

The memory is anonymous (memfd_create(2)) and reached through /proc/<pid>/fd: it counts as the processes' own, /dev/shm
may be small, and nothing is left behind by a process that is killed.

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
_PAGE_FLOATS = 2**21 // _FLOAT_BYTES  # of a huge page
_SLOTS = 2


def use_shared_memory(dists: Sequence[TwPooledEmbeddingDist], config: TrainConfig, runtime: Runtime) -> str:
    """Collective: give the `dists` of a sharded model shared memory where `sharding.exchange` wants it; what they have.

    Raises UserError where it is asked for by name and cannot be had.
    """
    if runtime.world_size == 1 and config.sharding.exchange == "auto":
        return "none"
    group, told = create_shared_memory_group(config, runtime)
    if group is None:
        return told
    for pooled in dists:  # where TorchRec puts its own at the first use
        pooled._dist = SharedMemoryAllToAll(group, pooled._dim_sum_per_rank, pooled._callbacks or ())  # type: ignore[assignment]
    return told if dists else "collective: no table is sharded table_wise or column_wise"


def create_shared_memory_group(config: TrainConfig, runtime: Runtime) -> tuple[dist.ProcessGroup | None, str]:
    """Collective: a group for an exchange through shared memory, or None; and what `sharding.exchange` has come to.

    Raises UserError as above.
    """
    wanted = config.sharding.exchange
    if wanted == "collective":
        return None, "collective"
    obstacle = _obstacle(config, runtime)
    if obstacle is None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.train.timeout_seconds))
        assert isinstance(group, dist.ProcessGroup), "every process is in it"
        obstacle = _forbidden(group)
        if obstacle is None:
            return group, "shared_memory"
    if wanted == "shared_memory":
        raise UserError(f"sharding.exchange is shared_memory, but {obstacle}; legal here: auto, collective")
    return None, f"collective: {obstacle}"


def _obstacle(config: TrainConfig, runtime: Runtime) -> str | None:
    """What rules it out, the same on every process."""
    wire = (config.sharding.forward_precision, config.sharding.backward_precision)
    if runtime.world_size == 1:
        return "there is one process"
    if runtime.device.type != "cpu":
        return f"the device is {runtime.device.type}"
    if runtime.local_world_size != runtime.world_size:
        return "the processes are on several machines"
    if wire != ("fp32", "fp32"):
        return f"sharding.forward_precision and backward_precision are {' and '.join(wire)}, and it carries fp32"
    return None


def _forbidden(group: dist.ProcessGroup) -> str | None:
    """Collective: why processes here cannot share memory, found by trying."""
    try:
        _Memory(group, 1)
    except OSError as error:
        return f"memory cannot be shared here: {error.strerror}"
    return None


class _Memory:
    """Memory of each process of a group, mapped by all of them, as float32; huge pages where the system has them."""

    def __init__(self, group: dist.ProcessGroup, floats: int) -> None:
        """Collective. Raises OSError on all processes where one of them cannot."""
        self.floats = -(-floats // _PAGE_FLOATS) * _PAGE_FLOATS
        me, everyone = dist.get_rank(group), range(dist.get_world_size(group))
        failure: OSError | None = None
        descriptor, of_rank = -1, []
        try:
            descriptor = os.memfd_create("trainer-exchange")
            os.ftruncate(descriptor, self.floats * _FLOAT_BYTES)
        except OSError as error:
            failure = error
        places = _gathered(group, (os.getpid(), descriptor))
        try:
            for rank, (pid, number) in zip(everyone, places, strict=True):
                of_rank.append(self._mapped(descriptor if rank == me else f"/proc/{pid}/fd/{number}"))
        except OSError as error:
            failure = failure or error
        failed = next((error for error in _gathered(group, failure) if error is not None), None)
        if descriptor >= 0:
            os.close(descriptor)  # all have mapped it
        if failed is not None:
            raise failed
        self.mine, self.of_rank = of_rank[me], of_rank

    def _mapped(self, where: int | str) -> Tensor:
        descriptor = os.open(where, os.O_RDWR) if isinstance(where, str) else where
        memory = mmap.mmap(descriptor, self.floats * _FLOAT_BYTES)
        if isinstance(where, str):
            os.close(descriptor)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32)


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class _Channel:
    """One direction of an exchange: pieces written by each process, then read by the others.

    Two slots in turn make one collective per exchange enough: a process writes to a slot again only after a later
    exchange, which the others enter when they have read what was in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._memory: _Memory | None = None
        self._under_way: Any = None
        self._turn = 0
        self._said = torch.zeros(1)

    def start(self, floats: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Write pieces (offset in floats, values) to this process's slot of at least `floats`, and say so."""
        assert self._under_way is None, "the pieces before these were never read"
        if self._memory is None or self._memory.floats < floats * _SLOTS:
            self._memory = _Memory(self._group, floats * _SLOTS)  # all processes see the same sizes
        self._turn = (self._turn + 1) % _SLOTS
        for offset, piece in pieces:
            self._at(self._memory.mine, offset, piece.shape).copy_(piece)
        self._under_way = dist.all_reduce(self._said, group=self._group, async_op=True)

    def wait(self) -> None:
        """Until all processes have written."""
        self._under_way.wait()
        self._under_way = None

    def piece(self, rank: int, offset: int, shape: Sequence[int]) -> Tensor:
        """What process `rank` wrote at `offset`; valid until the exchange after the next one."""
        assert self._memory is not None
        return self._at(self._memory.of_rank[rank], offset, shape)

    def _at(self, memory: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
        assert self._memory is not None
        start = self._turn * (self._memory.floats // _SLOTS) + offset
        return memory[start : start + shape[0] * shape[1]].view(shape[0], shape[1])


@dataclass
class _Trip:
    """One batch on its way: sums forward, their gradients back."""

    samples: list[int]  # B_r
    first: list[int]  # samples before those of process r; one more entry: B
    own_gradient: Tensor | None = field(default=None)


class SharedMemoryAllToAll(nn.Module):
    """In the place of TorchRec's PooledEmbeddingsAllToAll: (B, D_me) of all samples -> (B_me, D) of all tables."""

    def __init__(
        self, group: dist.ProcessGroup, columns: Sequence[int], callbacks: Sequence[Callable[[Tensor], Tensor]]
    ) -> None:
        super().__init__()
        self._callbacks = callbacks  # column shards are put side by side by them
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.columns = list(columns)  # D_r
        self.first = [0, *accumulate(self.columns)]
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.forth, self.back = _Channel(group), _Channel(group)

    def forward(self, local_embs: Tensor, batch_size_per_rank: list[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Starts the exchange; the result waits for it."""
        samples = batch_size_per_rank or [local_embs.shape[0] // self.world_size] * self.world_size
        trip = _Trip(samples, [0, *accumulate(samples)])
        arrival = PooledEmbeddingsAwaitable(_Arrival(self, trip, local_embs, _Send.apply(local_embs, self, trip)))
        arrival.callbacks.extend(self._callbacks)
        return arrival

    def columns_of(self, rank: int) -> slice:
        """Where the columns of process `rank` are among all."""
        return slice(self.first[rank], self.first[rank + 1])


class _Arrival(Awaitable[Tensor]):
    """The promise of a batch's pooled embeddings."""

    def __init__(self, exchange: SharedMemoryAllToAll, trip: _Trip, local: Tensor, sent: Tensor) -> None:
        super().__init__()
        self._taken = (sent, local.detach(), exchange, trip)

    def _wait_impl(self) -> Tensor:
        received: Tensor = _Receive.apply(*self._taken)
        return received


class _Send(torch.autograd.Function):
    """Forward hands the other processes their samples; backward collects the gradients that they have sent."""

    @staticmethod
    def forward(ctx: Any, local_BD: Tensor, exchange: SharedMemoryAllToAll, trip: _Trip) -> Tensor:
        """(B, D_me) -> a token that ties this to _Receive."""
        ctx.exchange, ctx.trip = exchange, trip
        columns, samples = local_BD.shape[1], trip.first
        pieces = ((samples[r] * columns, local_BD[samples[r] : samples[r + 1]]) for r in exchange.others)
        exchange.forth.start(samples[-1] * max(exchange.columns), pieces)
        return local_BD.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        """-> gradient (B, D_me), divided by W as TorchRec does it: every process has the mean over its samples."""
        exchange, trip = ctx.exchange, ctx.trip
        exchange.back.wait()
        me, columns, samples = exchange.rank, exchange.columns[exchange.rank], trip.first
        gradient_BD = trip.own_gradient.new_empty(samples[-1], columns)
        divisor = exchange.world_size if get_gradient_division() else 1
        for rank in range(exchange.world_size):
            shape = (trip.samples[rank], columns)
            arrived = (
                trip.own_gradient if rank == me else exchange.back.piece(rank, shape[0] * exchange.first[me], shape)
            )
            torch.div(arrived, divisor, out=gradient_BD[samples[rank] : samples[rank + 1]])
        trip.own_gradient = None
        return gradient_BD, None, None


class _Receive(torch.autograd.Function):
    """Forward collects the sums that other processes have sent; backward hands them their gradients."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, local_BD: Tensor, exchange: SharedMemoryAllToAll, trip: _Trip) -> Tensor:
        """(B, D_me) of this process -> (B_me, D)."""
        ctx.exchange, ctx.trip = exchange, trip
        exchange.forth.wait()
        me, own = exchange.rank, trip.samples[exchange.rank]
        pooled_BD = local_BD.new_empty(own, exchange.first[-1])
        pooled_BD[:, exchange.columns_of(me)] = local_BD[trip.first[me] : trip.first[me + 1]]
        for rank in exchange.others:
            columns = exchange.columns[rank]
            arrived = exchange.forth.piece(rank, trip.first[me] * columns, (own, columns))
            pooled_BD[:, exchange.columns_of(rank)] = arrived
        return pooled_BD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """(B_me, D) -> the token's."""
        exchange, trip, gradient_BD = ctx.exchange, ctx.trip, gradients[0]
        samples = trip.samples[exchange.rank]
        pieces = ((samples * exchange.first[r], gradient_BD[:, exchange.columns_of(r)]) for r in exchange.others)
        exchange.back.start(max(trip.samples) * exchange.first[-1], pieces)
        trip.own_gradient = gradient_BD[:, exchange.columns_of(exchange.rank)]
        return gradient_BD.new_zeros(1), None, None, None
