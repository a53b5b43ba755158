"""The embedding tables as the sharded model holds them: which rows and columns are here, their weights and optimizer
state.

The one place that knows how TorchRec lays out shards. Initial weights, checkpoints and exports all go through
`TableShard`, so none of them depends on the sharding plan.
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
    TorchRec's word; a data_parallel shard is the whole table, the same on every process.
    """

    table: str
    sharding: str
    row: int
    col: int
    weight: Tensor
    states: dict[str, Tensor]


def sharded_embeddings(dmp: DistributedModelParallel) -> ShardedEmbeddingBagCollection:
    """The one sharded module of the model."""
    (module,) = (m for m in dmp.module.modules() if isinstance(m, ShardedEmbeddingBagCollection))
    return module


def sharding_of(dmp: DistributedModelParallel) -> dict[str, str]:
    """Table -> TorchRec sharding type."""
    return {table: p.sharding_type for table, p in sharded_embeddings(dmp).module_sharding_plan.items()}


def replicated_parameters(dmp: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Weights of the data-parallel tables, which ordinary gradients train."""
    bags = sharded_embeddings(dmp).embedding_bags
    return {t: cast(nn.Parameter, bags[t].weight) for t, kind in sharding_of(dmp).items() if kind == "data_parallel"}


def fused_kernels(dmp: DistributedModelParallel) -> list[Any]:
    """fbgemm's kernels that hold this process's tables, in no module's list of children."""
    lookups = sharded_embeddings(dmp)._lookups  # there is no public way to them
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


def pooled_dists(dmp: DistributedModelParallel) -> list[TwPooledEmbeddingDist]:
    """What sends the sums of whole tables or of column shards to the processes whose samples they are of."""
    return [d for d in sharded_embeddings(dmp)._output_dists if isinstance(d, TwPooledEmbeddingDist)]


def local_shards(
    dmp: DistributedModelParallel, optimizers: Optimizers | None, optimizer_kind: str
) -> Iterator[TableShard]:
    """Every shard of this process, in a fixed order; without `optimizers` the states are left out."""
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
    """Uniform in +-1/sqrt(rows) (Naumov et al. 2019), a pure function of (seed, table, row, column, device type).

    A table is drawn in blocks of 65,536 whole rows, each from a generator of its own, so a shard draws just the blocks
    that it overlaps and no sharding plan or number of processes changes a weight.
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
