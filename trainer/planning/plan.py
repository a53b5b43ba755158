"""Predict memory, traffic and speed of a configuration on given hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.planning.options import HELP_HINT, PlanOptions
from trainer.planning.roofline import (
    GB,
    GIB,
    GIGABIT,
    GPUS,
    GpuNodes,
    Rates,
    achieved_rates,
    peak_rates,
    seconds_per_resource,
    step_seconds,
)
from trainer.planning.work import Shard, Work, bytes_per_rank, host_bytes_per_rank, step_work

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

    from trainer.runtime.process_group import Runtime
    from trainer.sharding.planner import Hardware


def predict_on_gpus(config: TrainConfig, options: PlanOptions) -> dict[str, Any]:
    """Predict a step on GPUs, which do not have to exist; raise UserError if the model does not fit."""
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    precision = gpu_precision(config, options.gpu)
    nodes = _gpu_nodes(options, precision)
    _check_world_size(config, nodes.world_size)
    shards = plan_shards(config, _gpu_hardware(nodes))
    work = step_work(config, shards, nodes.world_size, precision)
    peak = peak_rates(nodes)
    prediction = _prediction(config, shards, nodes.world_size, work, peak, achieved_rates(peak))
    hardware = f"{nodes.nodes} x {nodes.gpus_per_node} {options.gpu or 'GPU'}"
    return prediction | {"hardware": hardware, "precision": precision}


def predict_on_this_machine(config: TrainConfig, options: PlanOptions, runtime: Runtime) -> dict[str, Any]:
    """Predict a step on CPU nodes like this machine, with rates measured by all its processes (collective)."""
    import torch

    from trainer.planning.calibration import measure_rates
    from trainer.sharding.planner import Hardware

    world = options.nodes * runtime.world_size
    _check_world_size(config, world)
    shards = plan_shards(config, Hardware.of_processes(torch.device("cpu"), world, runtime.world_size))
    work = step_work(config, shards, world, runtime.precision)
    rates = measure_rates(config, runtime, work, shards)
    if options.nodes > 1:
        rates = _limit_by_network(rates, options)
    prediction = _prediction(config, shards, world, work, rates, rates)
    hardware = f"{options.nodes} x {runtime.world_size} CPU processes like those of this machine"
    return prediction | {"hardware": hardware, "precision": runtime.precision}


def _limit_by_network(rates: Rates, options: PlanOptions) -> Rates:
    """Return rates for several nodes: the measurement used loopback, which the network replaces."""
    if options.network_gbps is None:
        raise UserError(
            f"plan: the bandwidth between nodes is unknown: got --nodes {options.nodes} without --network-gbps. "
            f"Fix: add --network-gbps GBPS"
        )
    network = options.network_gbps * GIGABIT
    return dataclasses.replace(
        rates, all_to_all=min(rates.all_to_all, network), all_reduce=min(rates.all_reduce, network / 2)
    )


def plan_shards(config: TrainConfig, hardware: Hardware) -> list[Shard]:
    """Return the shards of TorchRec's plan for hardware that does not have to exist."""
    import torch

    from trainer.model.dlrm import TrainTask, build_model
    from trainer.sharding.planner import find_plan, make_sharder

    sharder = make_sharder(config, torch.device(hardware.device_type))
    plan = find_plan(TrainTask(build_model(config, "fp32")), sharder, config, hardware)
    return shards_of(plan, config, hardware.world_size)


def shards_of(plan: ShardingPlan, config: TrainConfig, world: int) -> list[Shard]:
    """Return the shards of a plan, table by table."""
    from trainer.sharding.planner import planned_tables

    found = []
    for _, rows, sharding in planned_tables(plan, config):
        shards = getattr(sharding.sharding_spec, "shards", None)
        if shards is None:
            found += [Shard("data_parallel", rank, rows, config.model.embedding_dim) for rank in range(world)]
            continue
        kind = "row_wise" if "row_wise" in sharding.sharding_type else sharding.sharding_type
        in_host = "uvm" in sharding.compute_kernel
        for shard in shards:
            found.append(Shard(kind, shard.placement.rank(), shard.shard_sizes[0], shard.shard_sizes[1], in_host))
    return found


def gpu_precision(config: TrainConfig, gpu: str | None) -> str:
    """Return the arithmetic that `train.precision` selects on a GPU."""
    precision, known = config.train.precision, GPUS.get((gpu or "").split(" ")[0])
    if precision == "auto":
        return "bf16" if known is None or "bf16" in known.tflops else "fp32"
    if known and precision not in known.tflops:
        raise UserError(
            f"train.precision is not supported by {gpu}: got {precision}; allowed: auto, {', '.join(known.tflops)}"
        )
    return precision


def _check_world_size(config: TrainConfig, world: int) -> None:
    try:
        config.check_world_size(world)
    except ValueError as error:
        raise UserError(str(error)) from None


def _gpu_nodes(options: PlanOptions, precision: str) -> GpuNodes:
    known = GPUS.get((options.gpu or "").split(" ")[0])
    tflops = options.tflops or (known.tflops[precision] if known else None)
    pcie = options.pcie_gb_per_second or (known.pcie_gb_per_second if known else None)
    required = {
        "--hbm-gib": options.hbm_gib,
        "--hbm-gb-per-second": options.hbm_gb_per_second,
        "--tflops": tflops,
        "--pcie-gb-per-second": pcie,
        "--network-gbps": options.network_gbps if options.nodes > 1 else options.network_gbps or 1.0,
    }
    missing = [name for name, value in required.items() if value is None]
    if missing:
        raise UserError(
            f"plan: {', '.join(missing)} missing (--gpu NAME sets peak and PCIe of {', '.join(GPUS)}). {HELP_HINT}"
        )
    return GpuNodes(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        hbm_gib=cast(float, options.hbm_gib),
        hbm_gb_per_second=cast(float, options.hbm_gb_per_second),
        nvlink_gb_per_second=options.nvlink_gb_per_second,
        network_gbps=cast(float, required["--network-gbps"]),
        tflops=cast(float, tflops),
        pcie_gb_per_second=cast(float, pcie),
        step_floor_ms=options.step_floor_ms,
        host_memory_gib=options.host_memory_gib,
    )


def _gpu_hardware(nodes: GpuNodes) -> Hardware:
    """Describe the nodes for the planner."""
    from trainer.sharding.planner import Bandwidths, Hardware

    per_node, host_gib = nodes.gpus_per_node, nodes.host_memory_gib
    return Hardware(
        device_type="cuda",
        world_size=nodes.world_size,
        local_world_size=per_node,
        memory_bytes=int(nodes.hbm_gib * GIB),
        host_memory_bytes=int(host_gib * GIB / per_node) if host_gib else None,
        bandwidths=Bandwidths(
            hbm=nodes.hbm_gb_per_second * GB,
            intra_node=(nodes.nvlink_gb_per_second or nodes.pcie_gb_per_second) * GB,
            inter_node=nodes.network_gbps * GIGABIT / per_node,
        ),
    )


def _prediction(
    config: TrainConfig, shards: Sequence[Shard], world: int, work: Work, peak: Rates, achieved: Rates
) -> dict[str, Any]:
    bounds = seconds_per_resource(work, peak)
    limits = seconds_per_resource(work, achieved)
    shards_of_rank_0: dict[str, int] = {}
    for kind in (shard.sharding for shard in shards if shard.rank == 0):
        shards_of_rank_0[kind] = shards_of_rank_0.get(kind, 0) + 1
    return {
        "processes": world,
        "batch_size": work.samples,
        "bytes_per_rank": bytes_per_rank(config, shards, world),
        "host_bytes_per_rank": host_bytes_per_rank(config, shards, world),
        "shards_of_rank_0": shards_of_rank_0,
        "all_to_all_bytes_per_step": round(work.all_to_all_bytes),
        "all_reduce_bytes_per_step": round(work.all_reduce_bytes),
        "bounds": {_resource_name(name, peak): work.samples / seconds for name, seconds in bounds.items() if seconds},
        "limiting": _resource_name(max(limits, key=lambda name: limits[name]), peak),
        "samples_per_second": work.samples / step_seconds(work, achieved),
        "step_ms": 1e3 * step_seconds(work, achieved),
    }


def _resource_name(resource: str, rates: Rates) -> str:
    """Return the name of a resource; the memory of a GPU is HBM."""
    return "HBM" if resource == "memory" and rates.overlapped else resource
