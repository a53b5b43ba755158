"""The work of one training step, counted by formulas: bytes of memory traffic and communication, FLOP, memory held.

Letters: n samples of a step over all W processes, F sparse features, D columns of a table, P ids per sample and
feature, c columns of a shard, K = F + 1 vectors of the interaction, r the rank of a cross layer. A parameter and its
gradient have 4 bytes; an id has 8.
Sources: [1] NVIDIA/nccl-tests, doc/PERFORMANCE.md (all-reduce moves 2(W-1)/W, all-to-all (W-1)/W of the payload);
[2] Naumov et al. 2019, arXiv:1906.00091 (DLRM); [3] Wang et al. 2021, arXiv:2008.13535 (DCNv2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.config import TrainConfig

_PARAMETER, _ID, _LENGTH = 4, 8, 4
_WIRE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
#: Passes over each activation, forward and backward, in unfused eager mode: written, read by the next layer, ReLU in
#: place of both, and their gradients. Matches the 190 KB per sample that reference models move in fp32.
_ACTIVATION_PASSES = 10


@dataclass(frozen=True)
class Shard:
    """A part of a table on one process; of a data-parallel table each process has one.

    `in_host`: too large for HBM, so kept in host memory and read over the link (fbgemm's UVM kernels).
    """

    sharding: str
    rank: int
    rows: int
    columns: int
    in_host: bool = False


@dataclass(frozen=True)
class Work:
    """One step of the busiest process: FLOP, and bytes of memory traffic, of communication and of input."""

    samples: int
    embedding_bytes: float
    activation_bytes: float
    flops: float
    all_to_all_bytes: float
    all_reduce_bytes: float
    input_bytes: float
    host_table_bytes: float = 0.0


def step_work(config: TrainConfig, shards: Sequence[Shard], world: int, precision: str) -> Work:
    """Return the work of a step: per resource the largest share of any process."""
    samples = config.train.batch_size
    ranks = range(world)
    reduced = dense_parameters(config) + sum(
        s.rows * s.columns for s in shards if s.sharding == "data_parallel" and s.rank == 0
    )
    return Work(
        samples=samples,
        embedding_bytes=max(embedding_bytes(config, _select(shards, rank, in_host=False), world) for rank in ranks),
        activation_bytes=activation_bytes(config, precision) * samples / world,
        flops=flops_per_sample(config) * samples / world,
        all_to_all_bytes=max(all_to_all_bytes(config, shards, rank, world) for rank in ranks),
        all_reduce_bytes=float(reduced * _PARAMETER) if world > 1 else 0.0,
        input_bytes=input_bytes_per_sample(config) * samples / world,
        # Without cache hits in HBM, whose number depends on the data.
        host_table_bytes=max(embedding_bytes(config, _select(shards, rank, in_host=True), world) for rank in ranks),
    )


def _select(shards: Iterable[Shard], rank: int, *, in_host: bool) -> list[Shard]:
    return [shard for shard in shards if shard.rank == rank and shard.in_host == in_host]


def embedding_bytes(config: TrainConfig, shards: Iterable[Shard], world: int) -> float:
    """Return the memory traffic of one process's lookups and updates in a step.

    A lookup of c columns reads the row, then reads and writes it in the update: 3 x 4c bytes, plus optimizer state
    and the id. A pooled output is written forward and its gradient read backward: 2 x 4c bytes. A row-wise shard gets
    1/W of the lookups and writes partial sums for all samples. A data-parallel table also reads and writes all its
    weights, gradients and state.
    """
    samples, pooling = config.train.batch_size, _pooling(config)
    total = 0.0
    for shard in shards:
        local = samples / world if shard.sharding == "data_parallel" else samples
        lookups = (samples / world if shard.sharding in ("data_parallel", "row_wise") else samples) * pooling
        row = shard.columns * _PARAMETER
        total += lookups * (3 * row + _state_traffic(config, shard.columns) + _ID) + 2 * local * row
        if shard.sharding == "data_parallel":
            total += 5 * shard.rows * row
    return total


def _state_traffic(config: TrainConfig, columns: int) -> int:
    """Return the bytes of optimizer state that the update of one row reads and writes."""
    values = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": columns, "adam": 2 * columns}
    return 2 * _PARAMETER * values[config.optim.sparse.optimizer]


def all_to_all_bytes(config: TrainConfig, shards: Iterable[Shard], rank: int, world: int) -> float:
    """Return the bytes that a process sends in a step: ids to the tables, pooled vectors back, gradients to the tables.

    For every table or column shard the owner sends (W-1)/W of n x 4c forward, and each other process sends n/W x 4c
    backward. For a row-wise shard (W-1)/W x n x 4c of partial sums go both ways (reduce-scatter, all-gather) [1].
    """
    samples, pooling = config.train.batch_size, _pooling(config)
    forward, backward = _WIRE[config.sharding.forward_precision], _WIRE[config.sharding.backward_precision]
    local, remote = samples / world, (world - 1) / world
    total = 0.0
    for shard in shards:
        if shard.sharding == "data_parallel":
            continue
        if shard.sharding == "row_wise":
            if shard.rank == rank:
                total += remote * samples * shard.columns * (forward + backward)
                total += remote * local * pooling * _ID + (world - 1) * local * _LENGTH
        elif shard.rank == rank:
            total += remote * samples * shard.columns * forward
        else:
            total += local * (shard.columns * backward + pooling * _ID + _LENGTH)
    return total


def flops_per_sample(config: TrainConfig) -> float:
    """Return the FLOP of a sample: 2 forward and 4 backward per multiply-accumulate [2, section 4]."""
    return 6.0 * sum(_layer_macs(config))


def _layer_macs(config: TrainConfig) -> Iterable[int]:
    """Yield the multiply-accumulates of bottom MLP, interaction (dot: K^2 D; cross: 2 K D r per layer [3]), top MLP."""
    model, vectors = config.model, len(config.data.sparse_features) + 1
    yield from (a * b for a, b in pairwise((len(config.data.dense_features), *model.dense_arch)))
    if model.interaction == "dot":
        yield vectors**2 * model.embedding_dim
    else:
        yield model.dcn_num_layers * 2 * vectors * model.embedding_dim * model.dcn_low_rank_dim
    yield from (a * b for a, b in pairwise((top_width(config), *model.over_arch)))


def top_width(config: TrainConfig) -> int:
    """Return the width of the interaction's output, which the top MLP gets."""
    dim, vectors = config.model.embedding_dim, len(config.data.sparse_features) + 1
    return dim + vectors * (vectors - 1) // 2 if config.model.interaction == "dot" else vectors * dim


def dense_parameters(config: TrainConfig) -> int:
    """Return the number of weights and biases outside the tables, which every process holds and all-reduces."""
    model, vectors = config.model, len(config.data.sparse_features) + 1
    sizes = [(len(config.data.dense_features), *model.dense_arch), (top_width(config), *model.over_arch)]
    count = sum(a * b + b for layers in sizes for a, b in pairwise(layers))
    width = vectors * model.embedding_dim
    cross = model.dcn_num_layers * (2 * width * model.dcn_low_rank_dim + width) if model.interaction == "dcn" else 0
    return count + cross


def activation_bytes(config: TrainConfig, precision: str) -> float:
    """Return the memory traffic of a sample's activations outside the tables, forward and backward."""
    model, vectors = config.model, len(config.data.sparse_features) + 1
    inner = vectors**2 if model.interaction == "dot" else 2 * model.dcn_num_layers * vectors * model.embedding_dim
    elements = sum(model.dense_arch) + sum(model.over_arch) + vectors * model.embedding_dim + inner + top_width(config)
    return _ACTIVATION_PASSES * elements * (2.0 if precision == "bf16" else 4.0)


def input_bytes_per_sample(config: TrainConfig) -> float:
    """Return the bytes from host to device per sample: dense values, ids, their lengths, the label."""
    features = len(config.data.sparse_features)
    dense = len(config.data.dense_features) * _PARAMETER
    return dense + features * (_pooling(config) * _ID + _LENGTH) + _PARAMETER


def bytes_per_rank(config: TrainConfig, shards: Iterable[Shard], world: int) -> list[int]:
    """Return the device memory of each process: tables with their state, the dense part with gradient and state."""
    states = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}[config.optim.dense.optimizer]
    found = [dense_parameters(config) * _PARAMETER * (2 + states)] * world
    for shard in shards:
        found[shard.rank] += 0 if shard.in_host else table_bytes(config, shard)
    return found


def host_bytes_per_rank(config: TrainConfig, shards: Iterable[Shard], world: int) -> list[int]:
    """Return the host memory of each process for tables that do not fit into HBM."""
    found = [0] * world
    for shard in shards:
        found[shard.rank] += table_bytes(config, shard) if shard.in_host else 0
    return found


def table_bytes(config: TrainConfig, shard: Shard) -> int:
    """Return the bytes of a shard's weights and optimizer state."""
    per_weight = {"sgd": 1, "rowwise_adagrad": 1, "adagrad": 2, "adam": 3}[config.optim.sparse.optimizer]
    per_row = _PARAMETER if config.optim.sparse.optimizer == "rowwise_adagrad" else 0
    return shard.rows * (shard.columns * _PARAMETER * per_weight + per_row)


def _pooling(config: TrainConfig) -> int:
    return config.data.ids_per_feature
