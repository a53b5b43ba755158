"""The sharding plan: which process holds which part of each table, found by TorchRec's planner.

Training, `plan` and calibration describe the processes as `Hardware` and get their plan from `find_plan`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import ShardingType as TorchRecShardingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import MIN_CW_DIM
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ParameterSharding, ShardingPlan

from trainer.config import ShardingConfig, TrainConfig
from trainer.errors import UserError
from trainer.runtime.process_group import Runtime
from trainer.sharding.optimizers import fused_params

GIB = 1024**3
_COMM_TYPES = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16, "int8": CommType.INT8}


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second of one GPU: its memory, the links inside a node, its share of the network between nodes."""

    hbm: float
    intra_node: float
    inter_node: float


@dataclass(frozen=True)
class Hardware:
    """The processes that a plan is for, and the memory of each."""

    device_type: str
    world_size: int
    local_world_size: int
    memory_bytes: int  # of a process: its GPU's memory, or on CPU its share of the machine's
    host_memory_bytes: int | None = None  # of a process, in addition to its GPU's; None: TorchRec's default
    bandwidths: Bandwidths | None = None  # None: TorchRec's defaults

    @classmethod
    def of_processes(cls, device: torch.device, world_size: int, local_world_size: int) -> Hardware:
        """Return the description of processes on machines like this one."""
        if device.type == "cuda":
            memory = int(torch.cuda.get_device_properties(device).total_memory)
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size
        return cls(device.type, world_size, local_world_size, memory)

    @classmethod
    def of_job(cls, runtime: Runtime) -> Hardware:
        """Return the description of this job's processes."""
        return cls.of_processes(runtime.device, runtime.world_size, runtime.local_world_size)


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder plus row-wise sharding on CPU, which works although TorchRec does not list it."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that the planner may use on a device."""
        return sorted({*super().sharding_types(compute_device_type), TorchRecShardingType.ROW_WISE.value})


def make_sharder(config: TrainConfig, device: torch.device) -> Sharder:
    """Return the sharder with the fused optimizer's settings and the precision of the all-to-all.

    Raise UserError for bf16 between CPUs: gloo does not support it, and TorchRec would send fp16 instead.
    """
    sharding = config.sharding
    for option in ("forward_precision", "backward_precision"):
        if device.type == "cpu" and getattr(sharding, option) == "bf16":
            raise UserError(
                f"sharding.{option} is not supported by gloo between CPUs: got bf16; allowed: fp32, fp16, int8"
            )
    return Sharder(
        fused_params=fused_params(config.optim.sparse, device),
        qcomm_codecs_registry=_all_to_all_codecs(sharding, device),
    )


def _all_to_all_codecs(config: ShardingConfig, device: torch.device) -> dict[str, Any] | None:
    if (config.forward_precision, config.backward_precision) == ("fp32", "fp32"):
        return None
    precision = QCommsConfig(
        forward_precision=_COMM_TYPES[config.forward_precision],
        backward_precision=_COMM_TYPES[config.backward_precision],
    )
    return get_qcomm_codecs_registry(precision, device=device)


def find_plan(
    model: nn.Module,
    sharder: Sharder,
    config: TrainConfig,
    hardware: Hardware,
    group: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    """Return the plan of TorchRec's planner; raise UserError if no plan fits.

    With a group this is collective: rank 0 plans for all processes. Without one nothing of the hardware has to exist.
    """
    planner = _build_planner(config, hardware)
    sharders = [cast("ModuleSharder[nn.Module]", sharder)]
    try:
        return planner.plan(model, sharders) if group is None else planner.collective_plan(model, sharders, group)
    except PlannerError as error:
        raise _does_not_fit(config, hardware, error) from None
    except RuntimeError as error:
        if not str(error).startswith("No available sharding type"):
            raise
        kernels = ", ".join(config.sharding.kernels or ("any",))
        raise UserError(
            f"{hardware.device_type} has no embedding kernel for a table's sharding.types or sharding.tables: got "
            f"sharding.kernels {kernels}; allowed on CPU: fused for table_wise, row_wise and column_wise, dense for "
            f"data_parallel"
        ) from None


def _build_planner(config: TrainConfig, hardware: Hardware) -> EmbeddingShardingPlanner:
    on_gpu = hardware.device_type == "cuda"
    memory, reserved = _memory_bytes(config, hardware), config.sharding.reserve_fraction
    # TorchRec reserves a share of the HBM only, so the host's share is subtracted here.
    host_memory = hardware.host_memory_bytes if on_gpu else memory
    bandwidths = hardware.bandwidths
    per_millisecond: dict[str, Any] = (
        {
            "hbm_mem_bw": bandwidths.hbm / 1e3,
            "intra_host_bw": bandwidths.intra_node / 1e3,
            "inter_host_bw": bandwidths.inter_node / 1e3,
        }
        if bandwidths
        else {}
    )
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=hardware.world_size,
            local_world_size=hardware.local_world_size,
            compute_device=hardware.device_type,
            hbm_cap=memory if on_gpu else None,
            ddr_cap=None if host_memory is None else int(host_memory * (1 - reserved)),
            **per_millisecond,
        ),
        batch_size=config.train.batch_size // hardware.world_size,
        constraints=constraints(config),
        storage_reservation=FixedPercentageStorageReservation(reserved),
        debug=False,
    )


def _memory_bytes(config: TrainConfig, hardware: Hardware) -> int:
    cap_gib = config.sharding.hbm_cap_gib
    return int(cap_gib * GIB) if cap_gib else hardware.memory_bytes


def _does_not_fit(config: TrainConfig, hardware: Hardware, error: PlannerError) -> UserError:
    tables = sum(config.rows_per_table) * config.model.embedding_dim * 4
    return UserError(
        f"no sharding plan fits {hardware.world_size} processes with {_memory_bytes(config, hardware) / GIB:,.1f} GiB "
        f"each (sharding.hbm_cap_gib or the device's memory, of which {config.sharding.reserve_fraction:.0%} is "
        f"reserved): the tables have {tables / GIB:,.1f} GiB ({_first_line(error)}). Fix: use more nodes or devices "
        f"with more memory, allow more sharding.types or sharding.kernels, or cap the tables with "
        f"--model.num-embeddings-cap"
    )


def constraints(config: TrainConfig) -> dict[str, ParameterConstraints]:
    """Return per table the sharding types and kernels that the configuration allows, and the ids per sample."""
    kernels: list[str] | None = list(config.sharding.kernels) if config.sharding.kernels else None
    pooling = float(config.data.ids_per_feature)
    return {
        table: ParameterConstraints(
            sharding_types=_supported_types(config.sharding.tables.get(table, config.sharding.types), config),
            compute_kernels=kernels,
            pooling_factors=[pooling],
            min_partition=config.sharding.min_columns,
        )
        for table in config.table_names
    }


def _supported_types(types: tuple[str, ...], config: TrainConfig) -> list[str]:
    """Return the types that work with this configuration; raise UserError if there is none.

    Column-wise needs a table wide enough to split: a single column shard is table-wise under a confusing name. Row-wise
    does not work with an int8 all-to-all, which TorchRec's reduce-scatter lacks.
    """
    sharding = config.sharding
    min_columns = sharding.min_columns or MIN_CW_DIM
    supported = [t for t in types if t != "column_wise" or config.model.embedding_dim > min_columns]
    if not supported:
        raise UserError(
            f"a table may only be split column_wise, but is too narrow: got model.embedding_dim "
            f"{config.model.embedding_dim}, and a shard has at least {min_columns} columns. Fix: set a smaller "
            f"--sharding.min-columns, or allow another of sharding.types"
        )
    int8 = [option for option in ("forward_precision", "backward_precision") if getattr(sharding, option) == "int8"]
    if int8 and supported == ["row_wise"]:
        raise UserError(
            f"a table may only be split row_wise, which does not support sharding.{int8[0]}: got int8. Fix: set "
            f"--sharding.{int8[0].replace('_', '-')} fp16, or allow another of sharding.types"
        )
    return [t for t in supported if t != "row_wise"] if int8 else supported


@dataclass(frozen=True)
class PlannedTable:
    """One table of a plan. `ranks` holds one entry per shard; `bytes_per_rank` counts fp32 weights."""

    table: str
    rows: int
    dim: int
    sharding: str
    kernel: str
    ranks: tuple[int, ...]
    bytes_per_rank: dict[int, int]


def planned_tables(plan: ShardingPlan, config: TrainConfig) -> Iterator[tuple[str, int, ParameterSharding]]:
    """Yield (table, rows, its part of the plan) in the order of the configuration."""
    (module_plan,) = (cast("EmbeddingModuleShardingPlan", p) for p in plan.plan.values())
    for table, rows in zip(config.table_names, config.rows_per_table, strict=True):
        yield table, rows, module_plan[table]


def describe_plan(plan: ShardingPlan, config: TrainConfig) -> list[PlannedTable]:
    """Return the plan, table by table in the order of the configuration."""
    dim = config.model.embedding_dim
    described = []
    for table, rows, sharding in planned_tables(plan, config):
        bytes_per_rank: dict[int, int] = defaultdict(int)
        ranks = tuple(sharding.ranks or ())
        shards = getattr(sharding.sharding_spec, "shards", None)
        if shards is None:  # data-parallel: each process has a copy
            bytes_per_rank.update(dict.fromkeys(ranks, rows * dim * 4))
        else:
            for shard in shards:
                bytes_per_rank[shard.placement.rank()] += shard.shard_sizes[0] * shard.shard_sizes[1] * 4
        kind, kernel = sharding.sharding_type, sharding.compute_kernel
        described.append(PlannedTable(table, rows, dim, kind, kernel, ranks, dict(bytes_per_rank)))
    return described


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
