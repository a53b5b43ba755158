"""The sharding plan: TorchRec's planner with the topology of this job, and a description of the plan."""

from __future__ import annotations

import os
from collections import defaultdict
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
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan

from trainer.config import ShardingConfig, TrainConfig
from trainer.errors import UserError
from trainer.runtime.process_group import Runtime

GIB = 1024**3


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which also offers row-wise sharding on CPU; its kernels support that."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that the planner may use on a device."""
        return sorted({*super().sharding_types(compute_device_type), TorchRecShardingType.ROW_WISE.value})


def make_sharder(config: ShardingConfig, fused_params: dict[str, Any], device: torch.device) -> Sharder:
    """Return the sharder with the fused optimizer's settings and the precision of the all-to-all.

    Raises UserError for bf16 between CPUs: gloo does not support it, and TorchRec would send fp16 instead.
    """
    for option in ("forward_precision", "backward_precision"):
        if device.type == "cpu" and getattr(config, option) == "bf16":
            raise UserError(f"sharding.{option} is bf16, which gloo does not support; allowed on CPU: fp32, fp16, int8")
    comms = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16, "int8": CommType.INT8}
    registry = None
    if (config.forward_precision, config.backward_precision) != ("fp32", "fp32"):
        registry = get_qcomm_codecs_registry(
            QCommsConfig(
                forward_precision=comms[config.forward_precision], backward_precision=comms[config.backward_precision]
            ),
            device=device,
        )
    return Sharder(fused_params=fused_params, qcomm_codecs_registry=registry)


def memory_per_device(device: torch.device, local_world_size: int) -> int:
    """Return the bytes that one process may use: the GPU's memory, or its share of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size


def make_plan(model: nn.Module, sharder: Sharder, config: TrainConfig, runtime: Runtime) -> ShardingPlan:
    """Return rank 0's plan on every process; raise UserError if no plan fits. Collective."""
    device = runtime.device
    cap = (
        int(config.sharding.hbm_cap_gib * GIB)
        if config.sharding.hbm_cap_gib
        else memory_per_device(device, runtime.local_world_size)
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=runtime.world_size,
            local_world_size=runtime.local_world_size,
            compute_device=device.type,
            hbm_cap=cap if device.type == "cuda" else None,
            # TorchRec itself reserves a share of HBM only.
            ddr_cap=int(cap * (1 - config.sharding.reserve_fraction)) if device.type == "cpu" else None,
        ),
        batch_size=config.train.batch_size // runtime.world_size,
        constraints=constraints(config),
        storage_reservation=FixedPercentageStorageReservation(config.sharding.reserve_fraction),
        debug=False,
    )
    sharders = [cast("ModuleSharder[nn.Module]", sharder)]
    try:
        group = dist.group.WORLD
        assert group is not None
        return planner.collective_plan(model, sharders, group)
    except PlannerError as error:
        raise UserError(
            f"no sharding plan fits {runtime.world_size} processes with {cap / GIB:.1f} GiB each "
            f"(sharding.hbm_cap_gib, less {config.sharding.reserve_fraction:.0%} reserved): {_first_line(error)}. "
            f"Fix: allow more sharding.types or sharding.kernels, use more processes, or cap the tables with "
            f"--model.num-embeddings-cap"
        ) from None
    except RuntimeError as error:
        if not str(error).startswith("No available sharding type"):
            raise
        kernels = ", ".join(config.sharding.kernels or ("any",))
        raise UserError(
            f"{device.type} has no embedding kernel for a table's sharding.types or sharding.tables with "
            f"sharding.kernels {kernels}; allowed on CPU: fused for table_wise, row_wise and column_wise, dense for "
            f"data_parallel"
        ) from None


def constraints(config: TrainConfig) -> dict[str, ParameterConstraints]:
    """Return per table the allowed sharding types and kernels, and the number of ids per sample."""
    kernels: list[str] | None = list(config.sharding.kernels) if config.sharding.kernels else None
    pooling = float(config.data.ids_per_feature)
    return {
        table: ParameterConstraints(
            sharding_types=_usable_types(config.sharding.tables.get(table, config.sharding.types), config),
            compute_kernels=kernels,
            pooling_factors=[pooling],
            min_partition=config.sharding.min_columns,
        )
        for table in config.table_names
    }


def _usable_types(types: tuple[str, ...], config: TrainConfig) -> list[str]:
    """Return the sharding types that work with this configuration; raise UserError if none does.

    Tables too narrow to split cannot be column-wise, because a single column shard is table-wise sharding. TorchRec's
    reduce-scatter does not support int8, so tables cannot be row-wise with it.
    """
    sharding = config.sharding
    narrowest = sharding.min_columns or MIN_CW_DIM
    usable = [t for t in types if t != "column_wise" or config.model.embedding_dim > narrowest]
    if not usable:
        raise UserError(
            f"a table may only be split column_wise, but model.embedding_dim is {config.model.embedding_dim} and a "
            f"shard has at least {narrowest} columns. Fix: set a smaller --sharding.min-columns, or allow another of "
            f"sharding.types"
        )
    int8 = [option for option in ("forward_precision", "backward_precision") if getattr(sharding, option) == "int8"]
    if int8 and usable == ["row_wise"]:
        raise UserError(
            f"a table may only be split row_wise, but sharding.{int8[0]} is int8, which row-wise tables cannot use. "
            f"Fix: use --sharding.{int8[0].replace('_', '-')} fp16, or allow another of sharding.types"
        )
    return [t for t in usable if t != "row_wise"] if int8 else usable


@dataclass(frozen=True)
class PlannedTable:
    """One table of a plan. `ranks` has one entry per shard; `bytes_per_rank` counts fp32 weights."""

    table: str
    rows: int
    dim: int
    sharding: str
    kernel: str
    ranks: tuple[int, ...]
    bytes_per_rank: dict[int, int]


def describe_plan(plan: ShardingPlan, config: TrainConfig) -> list[PlannedTable]:
    """Return the tables of a plan in canonical order."""
    (module_plan,) = (cast("EmbeddingModuleShardingPlan", p) for p in plan.plan.values())
    described = []
    for table, rows in zip(config.table_names, config.rows_per_table, strict=True):
        sharding = module_plan[table]
        bytes_per_rank: dict[int, int] = defaultdict(int)
        ranks = tuple(sharding.ranks or ())
        shards = getattr(sharding.sharding_spec, "shards", None)
        if shards is None:  # data-parallel: a copy on every rank
            bytes_per_rank.update(dict.fromkeys(ranks, rows * config.model.embedding_dim * 4))
        else:
            for shard in shards:
                bytes_per_rank[shard.placement.rank()] += shard.shard_sizes[0] * shard.shard_sizes[1] * 4
        described.append(
            PlannedTable(
                table,
                rows,
                config.model.embedding_dim,
                sharding.sharding_type,
                sharding.compute_kernel,
                ranks,
                dict(bytes_per_rank),
            )
        )
    return described


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
