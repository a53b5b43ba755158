"""How much work one step is, and how fast hardware can do it: formulas on paper, without torch.

Letters: n samples of a step over all W processes, F sparse features, D columns of a table, P ids per sample and
feature, c columns of a shard. A parameter and its gradient have 4 bytes; an id has 8.
Sources: [1] NVIDIA/nccl-tests, doc/PERFORMANCE.md (all-reduce moves 2(W-1)/W, all-to-all (W-1)/W of the payload);
[2] Naumov et al. 2019, arXiv:1906.00091 (DLRM); [3] Wang et al. 2021, arXiv:2008.13535 (DCNv2); [4] NVIDIA's data
sheets of A100, H100, H200, L4, A10 and T4 (dense rates, without sparsity); [5] Williams et al. 2009, roofline model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.config import TrainConfig

GIB, GB, GIGABIT = 1024**3, 1e9, 1e9 / 8
_PARAMETER, _ID, _LENGTH = 4, 8, 4
_WIRE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
#: Passes over each activation, forward and backward, in unfused eager mode: written, read by the next layer, ReLU in
#: place of both, and their gradients. Fits the 190 KB per sample that reference models move in fp32.
_ACTIVATION_PASSES = 10
#: What kernels reach of the data sheet: embeddings of HBM, matrix products of the peak, NCCL of the wire. Estimates; a
#: measurement on the device replaces them.
_OF_HBM, _OF_PEAK, _OF_WIRE = 0.7, 0.5, 0.8
#: Single rows over the link: a tenth of it, as TorchRec's planner counts (planner/constants.py, kernel_bw_lookup).
_OF_LINK_BY_ROWS = 0.1
#: Kernel launches of an eager step take the host 5 to 8 ms. An estimate, `--step-floor-ms` replaces it.
STEP_FLOOR_MS = 6.5


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak TFLOP/s by precision, and its link to the host in GB/s, from its data sheet [4]."""

    tflops: Mapping[str, float]
    pcie_gb_per_second: float


#: By the first word of the model's name.
GPUS: Mapping[str, Gpu] = {
    "A100": Gpu({"fp32": 19.5, "tf32": 156, "bf16": 312}, 25),
    "H100": Gpu({"fp32": 67, "tf32": 494, "bf16": 989}, 50),
    "H200": Gpu({"fp32": 67, "tf32": 494, "bf16": 989}, 50),
    "L4": Gpu({"fp32": 30.3, "tf32": 60, "bf16": 121}, 25),
    "A10G": Gpu({"fp32": 31.2, "tf32": 62.5, "bf16": 125}, 25),
    "T4": Gpu({"fp32": 8.1}, 12),
}


@dataclass(frozen=True)
class Shard:
    """A piece of a table on one process; a data-parallel table has one on each.

    `in_host`: kept in the host's memory and reached over the link (fbgemm's UVM kernels), because HBM had no room.
    """

    sharding: str
    rank: int
    rows: int
    columns: int
    in_host: bool = False


@dataclass(frozen=True)
class Work:
    """One step of the busiest process: bytes of its memory, of the wire and from the host, and FLOP."""

    samples: int
    embedding_bytes: float
    activation_bytes: float
    flops: float
    all_to_all_bytes: float
    all_reduce_bytes: float
    input_bytes: float
    host_table_bytes: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What one process gets done in a second.

    `memory`, `host` and `host_tables` (rows of tables in the host's memory) in bytes, `exchange` in bytes sent by
    all-to-all, `reduce` in bytes of the reduced payload.
    `overlapped`: a device works while the fabric carries the dense gradients; on CPU the same cores do both.
    `activations`: whether they cost memory traffic beside the FLOP (measured dense rates hold them already).
    """

    memory: float
    flops: float
    exchange: float
    reduce: float
    host: float
    host_tables: float = math.inf
    floor_seconds: float = 0.0
    overlapped: bool = True
    activations: bool = True


@dataclass(frozen=True)
class Pool:
    """Nodes of one instance type; NVLink's bandwidth is that of both directions together, as data sheets say it."""

    nodes: int
    gpus_per_node: int
    hbm_gib: float
    hbm_gb_per_second: float
    nvlink_gb_per_second: float
    network_gbps: float
    tflops: float
    pcie_gb_per_second: float
    step_floor_ms: float = STEP_FLOOR_MS
    host_memory_gib: float | None = None

    @property
    def world_size(self) -> int:
        """One process per GPU."""
        return self.nodes * self.gpus_per_node


# --- work ------------------------------------------------------------------------------------------------------------


def step_work(config: TrainConfig, shards: Sequence[Shard], world: int, precision: str) -> Work:
    """The largest share that any process has, resource by resource."""
    samples = config.train.batch_size
    ranks = range(world)
    reduced = dense_parameters(config) + sum(
        s.rows * s.columns for s in shards if s.sharding == "data_parallel" and s.rank == 0
    )
    return Work(
        samples=samples,
        embedding_bytes=max(embedding_bytes(config, _of(shards, rank, False), world) for rank in ranks),
        activation_bytes=activation_bytes(config, precision) * samples / world,
        flops=flops_per_sample(config) * samples / world,
        all_to_all_bytes=max(all_to_all_bytes(config, shards, rank, world) for rank in ranks),
        all_reduce_bytes=float(reduced * _PARAMETER) if world > 1 else 0.0,
        input_bytes=input_bytes_per_sample(config) * samples / world,
        # As if no cache in HBM held a row: how often one does depends on the data.
        host_table_bytes=max(embedding_bytes(config, _of(shards, rank, True), world) for rank in ranks),
    )


def _of(shards: Iterable[Shard], rank: int, in_host: bool) -> list[Shard]:
    return [shard for shard in shards if shard.rank == rank and shard.in_host == in_host]


def embedding_bytes(config: TrainConfig, shards: Iterable[Shard], world: int) -> float:
    """Memory traffic of one process's lookups and updates in a step.

    Per lookup of c columns: the row read, then read and written by the update, 3 x 4c, the optimizer's state, the id.
    Per pooled output: written forward, its gradient read backward, 2 x 4c. A row-wise shard sees 1/W of the lookups and
    makes partial sums of all samples. A data-parallel table also reads and writes weights, gradient and state whole.
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
    """Bytes of optimizer state read and written by the update of one row."""
    values = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": columns, "adam": 2 * columns}
    return 2 * _PARAMETER * values[config.optim.sparse.optimizer]


def all_to_all_bytes(config: TrainConfig, shards: Iterable[Shard], rank: int, world: int) -> float:
    """What one process sends in a step: ids to the tables, pooled vectors back, gradients to the tables.

    Of every table or column shard, (W-1)/W of n x 4c leave its owner forward, and n/W x 4c leave each other process
    backward. Row-wise shards send partial sums of (W-1)/W x n x 4c both ways (reduce-scatter, all-gather) [1].
    """
    samples, pooling = config.train.batch_size, _pooling(config)
    forward, backward = _WIRE[config.sharding.forward_precision], _WIRE[config.sharding.backward_precision]
    local, away = samples / world, (world - 1) / world
    total = 0.0
    for shard in shards:
        if shard.sharding == "data_parallel":
            continue
        if shard.sharding == "row_wise":
            if shard.rank == rank:
                total += away * samples * shard.columns * (forward + backward)
                total += away * local * pooling * _ID + (world - 1) * local * _LENGTH
        elif shard.rank == rank:
            total += away * samples * shard.columns * forward
        else:
            total += local * (shard.columns * backward + pooling * _ID + _LENGTH)
    return total


def flops_per_sample(config: TrainConfig) -> float:
    """6 FLOP per multiply-accumulate: 2 forward, 4 backward (gradients of input and of weights) [2, section 4]."""
    return 6.0 * sum(_layer_macs(config))


def _layer_macs(config: TrainConfig) -> Iterable[int]:
    """Bottom MLP, interaction (dot: K^2 D; cross: 2 K D r per layer [3]), top MLP."""
    model, vectors = config.model, len(config.data.sparse_features) + 1
    yield from (a * b for a, b in pairwise((len(config.data.dense_features), *model.dense_arch)))
    if model.interaction == "dot":
        yield vectors**2 * model.embedding_dim
    else:
        yield model.dcn_num_layers * 2 * vectors * model.embedding_dim * model.dcn_low_rank_dim
    yield from (a * b for a, b in pairwise((top_width(config), *model.over_arch)))


def top_width(config: TrainConfig) -> int:
    """Columns that the interaction hands to the top MLP."""
    dim, vectors = config.model.embedding_dim, len(config.data.sparse_features) + 1
    return dim + vectors * (vectors - 1) // 2 if config.model.interaction == "dot" else vectors * dim


def dense_parameters(config: TrainConfig) -> int:
    """Weights and biases outside the tables: what all processes hold and reduce."""
    model, vectors = config.model, len(config.data.sparse_features) + 1
    sizes = [(len(config.data.dense_features), *model.dense_arch), (top_width(config), *model.over_arch)]
    count = sum(a * b + b for layers in sizes for a, b in pairwise(layers))
    width = vectors * model.embedding_dim
    cross = model.dcn_num_layers * (2 * width * model.dcn_low_rank_dim + width) if model.interaction == "dcn" else 0
    return count + cross


def activation_bytes(config: TrainConfig, precision: str) -> float:
    """Memory traffic of one sample's activations outside the tables, forward and backward."""
    model, vectors = config.model, len(config.data.sparse_features) + 1
    inner = vectors**2 if model.interaction == "dot" else 2 * model.dcn_num_layers * vectors * model.embedding_dim
    elements = sum(model.dense_arch) + sum(model.over_arch) + vectors * model.embedding_dim + inner + top_width(config)
    return _ACTIVATION_PASSES * elements * (2.0 if precision == "bf16" else 4.0)


def input_bytes_per_sample(config: TrainConfig) -> float:
    """From the host to the device: dense values, ids, their lengths, the label."""
    features = len(config.data.sparse_features)
    dense = len(config.data.dense_features) * _PARAMETER
    return dense + features * (_pooling(config) * _ID + _LENGTH) + _PARAMETER


def bytes_per_rank(config: TrainConfig, shards: Iterable[Shard], world: int) -> list[int]:
    """Device memory of each process: tables with their optimizer state, the dense part with gradient and state."""
    states = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}[config.optim.dense.optimizer]
    found = [dense_parameters(config) * _PARAMETER * (2 + states)] * world
    for shard in shards:
        found[shard.rank] += 0 if shard.in_host else table_bytes(config, shard)
    return found


def host_bytes_per_rank(config: TrainConfig, shards: Iterable[Shard], world: int) -> list[int]:
    """The host's memory that each process takes for tables that HBM has no room for."""
    found = [0] * world
    for shard in shards:
        found[shard.rank] += table_bytes(config, shard) if shard.in_host else 0
    return found


def table_bytes(config: TrainConfig, shard: Shard) -> int:
    """Weights and optimizer state of one piece of a table."""
    per_weight = {"sgd": 1, "rowwise_adagrad": 1, "adagrad": 2, "adam": 3}[config.optim.sparse.optimizer]
    per_row = _PARAMETER if config.optim.sparse.optimizer == "rowwise_adagrad" else 0
    return shard.rows * (shard.columns * _PARAMETER * per_weight + per_row)


def _pooling(config: TrainConfig) -> int:
    return config.data.ids_per_feature


# --- speed -----------------------------------------------------------------------------------------------------------


def peak_rates(pool: Pool) -> Rates:
    """What the data sheets allow. Links are counted in one direction: half of what NVLink's figure says."""
    world, per_node, nodes = pool.world_size, pool.gpus_per_node, pool.nodes
    link = (pool.nvlink_gb_per_second / 2 or pool.pcie_gb_per_second) * GB
    network = pool.network_gbps * GIGABIT
    near, far = (per_node - 1) / max(1, world - 1), (world - per_node) / max(1, world - 1)
    # Both kinds of links carry their share at the same time; the node's network is shared by its GPUs.
    slowest = max(near / link, far * per_node / network if far else 0.0)
    ring = 2 * (per_node - 1) / per_node / link
    across = 2 * (nodes - 1) / nodes / network if nodes > 1 else 0.0
    return Rates(
        memory=pool.hbm_gb_per_second * GB,
        flops=pool.tflops * 1e12,
        exchange=1 / slowest if slowest else math.inf,
        reduce=1 / max(ring, across) if max(ring, across) else math.inf,
        host=pool.pcie_gb_per_second * GB,
        host_tables=pool.pcie_gb_per_second * GB,
        floor_seconds=pool.step_floor_ms / 1e3,
    )


def reached_rates(peak: Rates) -> Rates:
    """What kernels usually reach of it."""
    return Rates(
        memory=peak.memory * _OF_HBM,
        flops=peak.flops * _OF_PEAK,
        exchange=peak.exchange * _OF_WIRE,
        reduce=peak.reduce * _OF_WIRE,
        host=peak.host * _OF_WIRE,
        host_tables=peak.host_tables * _OF_LINK_BY_ROWS,
        floor_seconds=peak.floor_seconds,
    )


def seconds_of(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of a step that each resource alone would take."""
    found = {
        "memory": (work.embedding_bytes + (work.activation_bytes if rates.activations else 0)) / rates.memory,
        "compute": work.flops / rates.flops,
        "fabric": work.all_to_all_bytes / rates.exchange + work.all_reduce_bytes / rates.reduce,
        "host input": work.input_bytes / rates.host,
    }
    if work.host_table_bytes:
        found["host tables"] = work.host_table_bytes / rates.host_tables
    return found | ({"kernel launches": rates.floor_seconds} if rates.floor_seconds else {})


def step_seconds(work: Work, rates: Rates) -> float:
    """A step: tables, then the dense part at the pace of its slower resource [5], and the all-to-all between them.

    On a device the dense gradients travel during the dense backward (two thirds of its time), input and kernel launches
    beside everything. On CPU nothing overlaps but the input, which has threads of its own.
    """
    activations = work.activation_bytes / rates.memory if rates.activations else 0.0
    dense = max(work.flops / rates.flops, activations)
    reduce = work.all_reduce_bytes / rates.reduce
    hidden = min(reduce, dense * 2 / 3) if rates.overlapped else 0.0
    tables = work.embedding_bytes / rates.memory + work.host_table_bytes / rates.host_tables
    serial = tables + dense + work.all_to_all_bytes / rates.exchange + reduce - hidden
    return max(serial, work.input_bytes / rates.host, rates.floor_seconds)
