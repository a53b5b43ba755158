"""Measure the rates of this machine's processes, all at once as in training, in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-untyped]  # has no types at all
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # type: ignore[import-untyped]
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-untyped]
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from trainer.config import TrainConfig
from trainer.data import SourceContext, open_source
from trainer.model.dlrm import build_model
from trainer.planning.roofline import GIB, Rates
from trainer.planning.work import Shard, Work, embedding_bytes, flops_per_sample
from trainer.runtime.process_group import Runtime
from trainer.sharding.optimizers import dense_factory
from trainer.sharding.rowwise_adagrad import use_coalesced_update
from trainer.sharding.shared_memory_all_to_all import SharedMemoryAllToAll, create_shared_memory_group

_SECONDS, _WARMUP_CALLS, _MIN_CALLS, _MAX_CALLS = 1.0, 2, 5, 200
_TABLE_BYTES = GIB
_MESSAGE_BYTES = 64 * 1024**2


def measure_rates(config: TrainConfig, runtime: Runtime, work: Work, shards: Sequence[Shard]) -> Rates:
    """Measure the rates of this process while the others do the same work, as in a step (collective)."""
    local = config.train.batch_size // runtime.world_size
    return Rates(
        memory=_embedding_rate(config, runtime, shards),
        flops=_dense_rate(config, runtime, local),
        all_to_all=_all_to_all_rate(config, runtime, work),
        all_reduce=_all_reduce_rate(runtime, work),
        host_input=_input_rate(config, runtime, local, work),
        overlapped=False,
        count_activations=False,
    )


def _seconds(operation: Callable[[], object]) -> float:
    """Return the mean seconds of one call, over about a second of calls (collective).

    A barrier follows each call, because a step waits for its slowest process too. Other load on the machine therefore
    slows down this measurement and a step alike.
    """
    for _ in range(_WARMUP_CALLS):
        operation()
    dist.barrier()
    began = time.perf_counter()
    operation()
    count = torch.tensor(_SECONDS / max(time.perf_counter() - began, 1e-6))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)  # so that all processes make the same number of calls
    calls = min(_MAX_CALLS, max(_MIN_CALLS, int(count)))
    began = time.perf_counter()
    for _ in range(calls):
        operation()
        dist.barrier()
    slowest = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _dense_rate(config: TrainConfig, runtime: Runtime, samples: int) -> float:
    """Return the FLOP/s of both towers and the interaction: forward, backward and update."""
    model = build_model(config, runtime.precision)
    towers = [*model.dense_tower.parameters(), *model.top_tower.parameters()]
    optimizer = dense_factory(config.optim.dense)(towers)
    features, dim = config.data.sparse_features, config.model.embedding_dim
    dense = torch.rand(samples, len(config.data.dense_features))
    values = torch.rand(samples, len(features) * dim, requires_grad=True)
    labels = torch.randint(0, 2, (samples,)).float()

    def step() -> None:
        pooled = KeyedTensor(list(features), [dim] * len(features), values)
        logits = model.top_tower(model.dense_tower(dense), pooled)
        torch.autograd.backward(F.binary_cross_entropy_with_logits(logits, labels))
        optimizer.step()
        optimizer.zero_grad()
        values.grad = None

    return flops_per_sample(config) * samples / _seconds(step)


def _embedding_rate(config: TrainConfig, runtime: Runtime, shards: Sequence[Shard]) -> float:
    """Return the bytes/s of fbgemm's kernel on tables like this process's, counted as `embedding_bytes` counts."""
    own = _within_limit([shard for shard in shards if shard.rank == runtime.rank]) or _within_limit(shards)
    # Table-wise, because this process looks up every sample in each of them.
    tables = [Shard("table_wise", runtime.rank, shard.rows, shard.columns) for shard in own]
    samples, pooling = config.train.batch_size, config.data.ids_per_feature
    rowwise = config.optim.sparse.optimizer == "rowwise_adagrad"
    kernel: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.rows, t.columns, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in tables],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD if rowwise else EmbOptimType.EXACT_SGD,
    )
    if rowwise:
        use_coalesced_update([kernel], config.optim.sparse, runtime.device)
    draw = torch.Generator().manual_seed(runtime.rank)
    ids = torch.cat([torch.randint(0, t.rows, (samples * pooling,), generator=draw) for t in tables])
    offsets = torch.arange(0, ids.numel() + 1, pooling)
    gradient = torch.rand(samples, sum(t.columns for t in tables))

    def step() -> None:
        kernel(ids, offsets).backward(gradient)

    return embedding_bytes(config, tables, runtime.world_size) / _seconds(step)


def _within_limit(shards: Sequence[Shard]) -> list[Shard]:
    """Return the first shards that fit into a GiB; if none fits, the first one cut to a GiB."""
    found: list[Shard] = []
    left = _TABLE_BYTES
    for shard in shards:
        size = shard.rows * shard.columns * 4
        if size <= left:
            found.append(shard)
            left -= size
    if shards and not found:
        first = shards[0]
        found = [Shard(first.sharding, first.rank, _TABLE_BYTES // (first.columns * 4), first.columns)]
    return found


def _all_to_all_rate(config: TrainConfig, runtime: Runtime, work: Work) -> float:
    """Return the bytes/s that one process sends to the others, by messages as large as a step's.

    This includes the work around a transfer: allocating the received tensor, and joining the parts of all processes
    sample by sample. Through shared memory, forward and backward are measured together because they differ: only
    backward divides by the number of processes.
    """
    world = runtime.world_size
    if world == 1 or not work.all_to_all_bytes:
        return float("inf")
    local = config.train.batch_size // world
    # One half of the traffic is forward, the other backward.
    columns = max(1, int(work.all_to_all_bytes / 2 / (world - 1) / local / 4))
    group, _ = create_shared_memory_group(config, runtime)
    if group is None:
        source = torch.rand(world * local * columns)

        def all_to_all() -> Tensor:
            received = torch.empty_like(source)
            dist.all_to_all_single(received, source)
            return torch.cat([part.view(local, columns) for part in received.chunk(world)], dim=1)

        return source.numel() * 4 * (world - 1) / world / _seconds(all_to_all)
    shared = SharedMemoryAllToAll(group, [columns] * world, ())
    sums, gradient = torch.rand(world * local, columns, requires_grad=True), torch.rand(local, world * columns)

    def forward_and_backward() -> None:
        shared(sums).wait().backward(gradient)
        sums.grad = None

    return 2 * sums.numel() * 4 * (world - 1) / world / _seconds(forward_and_backward)


def _all_reduce_rate(runtime: Runtime, work: Work) -> float:
    if runtime.world_size == 1:
        return float("inf")
    payload = torch.rand(max(1, int(min(work.all_reduce_bytes, _MESSAGE_BYTES)) // 4))
    return payload.numel() * 4 / _seconds(lambda: dist.all_reduce(payload))


def _input_rate(config: TrainConfig, runtime: Runtime, samples: int, work: Work) -> float:
    """Return the bytes/s of the configured source in one thread, counted as `input_bytes_per_sample` counts."""
    source = open_source(SourceContext(config, "train", runtime.device))
    position = 0

    def read() -> None:
        nonlocal position
        source.read(position, samples)
        position += samples

    return work.input_bytes / _seconds(read)
