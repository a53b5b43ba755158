"""The shards of embedding tables on this process: their rows and columns, weights and optimizer state.

Only this module knows how TorchRec lays out shards. Initial weights, checkpoints and exports use `TableShard`, so that
none of them depends on the sharding plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-untyped]
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist

from trainer.sharding.optimizers import SPARSE_STATES, Optimizers

_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class TableShard:
    """A rectangle of a table on this process.

    `weight` (rows, cols) starts at (row, col) of the whole table. `states` maps an optimizer state to a tensor of shape
    (rows,) for row-wise states or (rows, cols). Both are views: writing to them changes the model. `sharding` is
    TorchRec's sharding type; a data_parallel shard is the whole table, the same on every process.
    """

    table: str
    sharding: str
    row: int
    col: int
    weight: Tensor
    states: dict[str, Tensor]


def sharded_embeddings(dmp: DistributedModelParallel) -> ShardedEmbeddingBagCollection:
    """Return the only sharded module of the model."""
    (module,) = (m for m in dmp.module.modules() if isinstance(m, ShardedEmbeddingBagCollection))
    return module


def sharding_of(dmp: DistributedModelParallel) -> dict[str, str]:
    """Return TorchRec's sharding type of each table."""
    return {table: p.sharding_type for table, p in sharded_embeddings(dmp).module_sharding_plan.items()}


def replicated_parameters(dmp: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Return the weights of the data-parallel tables, which are trained by ordinary gradients."""
    bags = sharded_embeddings(dmp).embedding_bags
    return {t: cast(nn.Parameter, bags[t].weight) for t, kind in sharding_of(dmp).items() if kind == "data_parallel"}


def fused_kernels(dmp: DistributedModelParallel) -> list[Any]:
    """Return fbgemm's kernels that hold this process's tables; no module lists them as children."""
    lookups = sharded_embeddings(dmp)._lookups  # there is no public access
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


def pooled_dists(dmp: DistributedModelParallel) -> list[TwPooledEmbeddingDist]:
    """Return the modules that send pooled sums of whole tables or column shards to the processes of their samples."""
    return [d for d in sharded_embeddings(dmp)._output_dists if isinstance(d, TwPooledEmbeddingDist)]


def local_shards(
    dmp: DistributedModelParallel, optimizers: Optimizers | None, optimizer_kind: str
) -> Iterator[TableShard]:
    """Yield every shard of this process in a fixed order, without states if `optimizers` is None."""
    kinds = sharding_of(dmp)
    names = SPARSE_STATES[optimizer_kind] if optimizers is not None else ()
    for key, weight in dmp.fused_optimizer.params.items():
        table = key.rsplit(".", 2)[-2]
        assert isinstance(weight, ShardedTensor)
        kernel_states = list(dmp.fused_optimizer.state[weight].values())
        for i, shard in enumerate(weight.local_shards()):
            states = {
                n: cast(ShardedTensor, s).local_shards()[i].tensor for n, s in zip(names, kernel_states, strict=False)
            }
            row, col = shard.metadata.shard_offsets
            yield TableShard(table, kinds[table], row, col, shard.tensor, states)
    for table, parameter in replicated_parameters(dmp).items():
        states = {}
        if optimizers is not None and optimizers.replicated is not None:
            held = optimizers.replicated.state[parameter]
            states = {n: held[n].squeeze(1) if held[n].shape[1:] == (1,) else held[n] for n in names if n in held}
        yield TableShard(table, "data_parallel", 0, 0, parameter.data, states)


def initialize_tables(dmp: DistributedModelParallel, seed: int, rows: dict[str, int], dim: int) -> None:
    """Fill tables uniformly in +-1/sqrt(rows) (Naumov et al. 2019), by (seed, table, row, column, device type) only.

    Each block of 65,536 whole rows has a separate generator. A shard draws only the blocks that it overlaps, so neither
    the sharding plan nor the number of processes changes a weight.
    """
    order = {table: i for i, table in enumerate(rows)}
    with torch.no_grad():
        for shard in local_shards(dmp, None, "sgd"):
            device, bound = shard.weight.device, rows[shard.table] ** -0.5
            generator = torch.Generator(device=device)
            last = shard.row + shard.weight.shape[0]
            for block in range(shard.row // _BLOCK_ROWS, -(-last // _BLOCK_ROWS)):
                generator.manual_seed((seed * 1_000_003 + order[shard.table]) * 1_000_003 + block)
                start = block * _BLOCK_ROWS
                height = min(_BLOCK_ROWS, rows[shard.table] - start)
                values = torch.empty(height, dim, device=device).uniform_(-bound, bound, generator=generator)
                first, end = max(start, shard.row), min(start + height, last)
                target = shard.weight[first - shard.row : end - shard.row]
                target.copy_(values[first - start : end - start, shard.col : shard.col + target.shape[1]])
