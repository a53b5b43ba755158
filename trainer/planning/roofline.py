"""A roofline model: how fast hardware can do the work of a step, and which resource limits it [2].

Sources: [1] NVIDIA's data sheets of A100, H100, H200, L4, A10 and T4 (dense rates, without sparsity);
[2] Williams et al. 2009, roofline model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.planning.work import Work

GIB, GB, GIGABIT = 1024**3, 1e9, 1e9 / 8
#: Shares of the data sheet's rates that embedding lookups, matrix products and NCCL reach. Estimates, not measured.
_HBM_EFFICIENCY, _FLOP_EFFICIENCY, _LINK_EFFICIENCY = 0.7, 0.5, 0.8
#: Reading single rows over the link reaches a tenth, as in TorchRec's planner (planner/constants.py, kernel_bw_lookup).
_ROW_READ_EFFICIENCY = 0.1
#: An eager step launches kernels for 5 to 8 ms on the host. An estimate; `--step-floor-ms` overrides it.
STEP_FLOOR_MS = 6.5


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak TFLOP/s by precision, and its link to the host in GB/s, from its data sheet [1]."""

    tflops: Mapping[str, float]
    pcie_gb_per_second: float


#: Keyed by the first word of the model's name.
GPUS: Mapping[str, Gpu] = {
    "A100": Gpu({"fp32": 19.5, "tf32": 156, "bf16": 312}, 25),
    "H100": Gpu({"fp32": 67, "tf32": 494, "bf16": 989}, 50),
    "H200": Gpu({"fp32": 67, "tf32": 494, "bf16": 989}, 50),
    "L4": Gpu({"fp32": 30.3, "tf32": 60, "bf16": 121}, 25),
    "A10G": Gpu({"fp32": 31.2, "tf32": 62.5, "bf16": 125}, 25),
    "T4": Gpu({"fp32": 8.1}, 12),
}


@dataclass(frozen=True)
class Rates:
    """What one process achieves per second.

    All but `flops` count bytes: of memory traffic, sent by all-to-all, of the payload of all-reduce, of input from the
    host, and of rows of tables in host memory.
    `overlapped`: the fabric reduces dense gradients while the device computes; on CPU the same cores do both.
    `count_activations`: activations cost memory traffic besides FLOP; measured FLOP rates include them already.
    """

    memory: float
    flops: float
    all_to_all: float
    all_reduce: float
    host_input: float
    host_tables: float = math.inf
    launch_seconds: float = 0.0
    overlapped: bool = True
    count_activations: bool = True


@dataclass(frozen=True)
class GpuNodes:
    """Nodes of one instance type. NVLink's bandwidth counts both directions together, as data sheets do."""

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
        """Return the number of processes: one per GPU."""
        return self.nodes * self.gpus_per_node


def peak_rates(hardware: GpuNodes) -> Rates:
    """Return the rates of the data sheets. A link counts in one direction, which is half of NVLink's figure."""
    world, per_node, nodes = hardware.world_size, hardware.gpus_per_node, hardware.nodes
    link = (hardware.nvlink_gb_per_second / 2 or hardware.pcie_gb_per_second) * GB
    network = hardware.network_gbps * GIGABIT
    local_share, remote_share = (per_node - 1) / max(1, world - 1), (world - per_node) / max(1, world - 1)
    # Both kinds of links carry their share at the same time; the GPUs of a node share its network.
    slowest = max(local_share / link, remote_share * per_node / network if remote_share else 0.0)
    ring = 2 * (per_node - 1) / per_node / link
    between_nodes = 2 * (nodes - 1) / nodes / network if nodes > 1 else 0.0
    return Rates(
        memory=hardware.hbm_gb_per_second * GB,
        flops=hardware.tflops * 1e12,
        all_to_all=1 / slowest if slowest else math.inf,
        all_reduce=1 / max(ring, between_nodes) if max(ring, between_nodes) else math.inf,
        host_input=hardware.pcie_gb_per_second * GB,
        host_tables=hardware.pcie_gb_per_second * GB,
        launch_seconds=hardware.step_floor_ms / 1e3,
    )


def achieved_rates(peak: Rates) -> Rates:
    """Return what kernels usually achieve of the peak rates."""
    return Rates(
        memory=peak.memory * _HBM_EFFICIENCY,
        flops=peak.flops * _FLOP_EFFICIENCY,
        all_to_all=peak.all_to_all * _LINK_EFFICIENCY,
        all_reduce=peak.all_reduce * _LINK_EFFICIENCY,
        host_input=peak.host_input * _LINK_EFFICIENCY,
        host_tables=peak.host_tables * _ROW_READ_EFFICIENCY,
        launch_seconds=peak.launch_seconds,
    )


def seconds_per_resource(work: Work, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step that each resource alone would need."""
    activations = work.activation_bytes if rates.count_activations else 0.0
    seconds = {
        "memory": (work.embedding_bytes + activations) / rates.memory,
        "compute": work.flops / rates.flops,
        "fabric": work.all_to_all_bytes / rates.all_to_all + work.all_reduce_bytes / rates.all_reduce,
        "host input": work.input_bytes / rates.host_input,
    }
    if work.host_table_bytes:
        seconds["host tables"] = work.host_table_bytes / rates.host_tables
    return seconds | ({"kernel launches": rates.launch_seconds} if rates.launch_seconds else {})


def step_seconds(work: Work, rates: Rates) -> float:
    """Return the seconds of a step: tables, all-to-all, then the dense part at the speed of its slower resource [2].

    On a device the all-reduce overlaps with the dense backward pass (two thirds of the dense time), and input and
    kernel launches overlap with everything. On CPU only the input overlaps, which has its own threads.
    """
    activations = work.activation_bytes / rates.memory if rates.count_activations else 0.0
    dense = max(work.flops / rates.flops, activations)
    reduce = work.all_reduce_bytes / rates.all_reduce
    hidden = min(reduce, dense * 2 / 3) if rates.overlapped else 0.0
    tables = work.embedding_bytes / rates.memory + work.host_table_bytes / rates.host_tables
    serial = tables + dense + work.all_to_all_bytes / rates.all_to_all + reduce - hidden
    return max(serial, work.input_bytes / rates.host_input, rates.launch_seconds)
