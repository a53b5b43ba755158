"""`python -m trainer plan`: does a model fit, how many bytes move in a step, how fast can it be, what limits it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK
from trainer.planning.roofline import (
    GIB,
    GPUS,
    STEP_FLOOR_MS,
    Pool,
    Rates,
    Shard,
    bytes_per_rank,
    host_bytes_per_rank,
    peak_rates,
    reached_rates,
    seconds_of,
    step_seconds,
    step_work,
)

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

_HELP = "see `python -m trainer plan --help`"


@dataclass(frozen=True)
class Options:
    """What is planned for; without `gpus_per_node` this machine's CPU cores, measured."""

    nodes: int = 1
    nproc: int = 2
    gpus_per_node: int = 0
    gpu: str | None = None
    hbm_gib: float | None = None
    hbm_gb_per_second: float | None = None
    nvlink_gb_per_second: float = 0.0
    network_gbps: float | None = None
    tflops: float | None = None
    pcie_gb_per_second: float | None = None
    step_floor_ms: float = STEP_FLOOR_MS
    host_memory_gib: float | None = None


def plan_main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """`plan`: on paper for GPUs; for CPUs in as many processes of this machine as a node would have."""
    options, rest = _parse(arguments)
    from trainer.config.options import load_config
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    if options.gpus_per_node:
        _show(plan_on_paper(load_config(rest, environ), options))
        return EXIT_OK
    if "WORLD_SIZE" not in environ and options.nproc > 1:
        from trainer.launch.launcher import launch

        # Without --nproc: the launcher would take it for a beginning of its own options.
        own = [f"--{key.replace('_', '-')}={value}" for key, value in _given(options).items() if key != "nproc"]
        return launch(["--nproc", str(options.nproc), "plan", *own, *rest])
    config = load_config(rest, environ)
    from trainer.runtime.process_group import init_runtime

    with init_runtime(config.train, dict(os.environ)) as runtime:
        found = plan_here(config, options, runtime)
        if runtime.is_main:
            _show(found)
    return EXIT_OK


def plan_on_paper(config: TrainConfig, options: Options) -> dict[str, Any]:
    """The plan and the speed on GPUs that need not be there. Raises UserError where nothing fits."""
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    precision = gpu_precision(config, options.gpu)
    pool = _pool(options, precision)
    _check_world(config, pool.world_size)
    shards = offline_shards(config, pool)
    work = step_work(config, shards, pool.world_size, precision)
    peak = peak_rates(pool)
    found = _result(config, shards, pool.world_size, work, peak, reached_rates(peak))
    hardware = options.gpu or "GPU"
    return found | {"hardware": f"{pool.nodes} x {pool.gpus_per_node} {hardware}", "precision": precision}


def plan_here(config: TrainConfig, options: Options, runtime: Any) -> dict[str, Any]:
    """Collective: the plan for CPU nodes like this one, with rates measured here."""
    from trainer.planning.calibration import measured_rates

    world = options.nodes * runtime.world_size
    _check_world(config, world)
    shards = offline_shards(config, None, world, runtime.world_size)
    work = step_work(config, shards, world, runtime.precision)
    rates = measured_rates(config, runtime, work, shards)
    if options.nodes > 1:
        rates = _over_network(rates, options)
    found = _result(config, shards, world, work, rates, rates)
    hardware = f"{options.nodes} x {runtime.world_size} CPU processes like those of this machine"
    return found | {"hardware": hardware, "precision": runtime.precision}


def _over_network(rates: Rates, options: Options) -> Rates:
    """Between nodes the network carries what loopback carried in the measurement."""
    if options.network_gbps is None:
        raise UserError("--nodes is more than 1, and nothing says how fast they talk; give --network-gbps")
    wire = options.network_gbps / 8 * 1e9
    return dataclasses.replace(rates, exchange=min(rates.exchange, wire), reduce=min(rates.reduce, wire / 2))


# --- the plan --------------------------------------------------------------------------------------------------------


def offline_shards(config: TrainConfig, pool: Pool | None, world: int = 0, local_world: int = 0) -> list[Shard]:
    """What TorchRec's planner would do on a pool of GPUs, or on CPUs, without any of them."""
    import torch
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError

    from trainer.model.dlrm import TrainTask, build_model
    from trainer.sharding.optimizers import fused_params
    from trainer.sharding.planner import constraints, make_sharder, memory_per_device

    device = torch.device("cuda" if pool else "cpu")
    world, local_world = (pool.world_size, pool.gpus_per_node) if pool else (world, local_world)
    found = int(pool.hbm_gib * GIB) if pool else memory_per_device(device, local_world)
    cap = int(config.sharding.hbm_cap_gib * GIB) if config.sharding.hbm_cap_gib else found
    reserve = config.sharding.reserve_fraction
    speeds: dict[str, Any] = {}
    if pool:  # TorchRec's units: bytes per millisecond, of one GPU
        link = pool.nvlink_gb_per_second or pool.pcie_gb_per_second
        network = pool.network_gbps / 8 / pool.gpus_per_node
        speeds = {
            "hbm_mem_bw": pool.hbm_gb_per_second * 1e6,
            "intra_host_bw": link * 1e6,
            "inter_host_bw": network * 1e6,
        }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world,
            local_world_size=local_world,
            compute_device=device.type,
            hbm_cap=cap if pool else None,
            ddr_cap=int((_host_share(pool) if pool else cap) * (1 - reserve)),
            **speeds,
        ),
        batch_size=config.train.batch_size // world,
        constraints=constraints(config),
        storage_reservation=FixedPercentageStorageReservation(reserve),
        debug=False,
    )
    model = TrainTask(build_model(config, "fp32"))
    sharder: Any = make_sharder(config.sharding, fused_params(config.optim.sparse, device), device)
    try:
        return shards_of(planner.plan(model, [sharder]), config, world)
    except PlannerError as error:
        needed = sum(rows * config.model.embedding_dim * 4 for rows in config.rows_per_table)
        raise UserError(
            f"the model does not fit: its tables have {needed / GIB:,.1f} GiB, and {world} processes with "
            f"{cap / GIB:,.1f} GiB each keep {reserve:.0%} of it free ({_first_line(error)}); use more nodes, GPUs "
            "with more memory, sharding.types row_wise, or cap the tables with model.num_embeddings_cap"
        ) from None


def _host_share(pool: Pool) -> float:
    """Bytes of the host's memory for each process; without a figure what TorchRec takes for granted."""
    from torchrec.distributed.planner.constants import DDR_CAP

    return pool.host_memory_gib * GIB / pool.gpus_per_node if pool.host_memory_gib else float(DDR_CAP)


def shards_of(plan: ShardingPlan, config: TrainConfig, world: int) -> list[Shard]:
    """The pieces of a plan, table by table."""
    (module_plan,) = (cast("Mapping[str, Any]", found) for found in plan.plan.values())
    found = []
    for table, rows in zip(config.table_names, config.rows_per_table, strict=True):
        sharding = module_plan[table]
        pieces = getattr(sharding.sharding_spec, "shards", None)
        if pieces is None:
            found += [Shard("data_parallel", rank, rows, config.model.embedding_dim) for rank in range(world)]
            continue
        kind = "row_wise" if "row_wise" in sharding.sharding_type else sharding.sharding_type
        in_host = "uvm" in sharding.compute_kernel
        for piece in pieces:
            found.append(Shard(kind, piece.placement.rank(), piece.shard_sizes[0], piece.shard_sizes[1], in_host))
    return found


def gpu_precision(config: TrainConfig, gpu: str | None) -> str:
    """The arithmetic that `train.precision` means on this GPU."""
    wanted, known = config.train.precision, GPUS.get((gpu or "").split(" ")[0])
    if wanted == "auto":
        return "bf16" if known is None or "bf16" in known.tflops else "fp32"
    if known and wanted not in known.tflops:
        raise UserError(
            f"train.precision is {wanted}, which {gpu} does not have; legal: auto, {', '.join(known.tflops)}"
        )
    return wanted


def _check_world(config: TrainConfig, world: int) -> None:
    try:
        config.check_world_size(world)
    except ValueError as error:
        raise UserError(str(error)) from None


def _pool(options: Options, precision: str) -> Pool:
    known = GPUS.get((options.gpu or "").split(" ")[0])
    tflops = options.tflops or (known.tflops[precision] if known else None)
    pcie = options.pcie_gb_per_second or (known.pcie_gb_per_second if known else None)
    needed = {
        "--hbm-gib": options.hbm_gib,
        "--hbm-gb-per-second": options.hbm_gb_per_second,
        "--tflops": tflops,
        "--pcie-gb-per-second": pcie,
        "--network-gbps": options.network_gbps if options.nodes > 1 else options.network_gbps or 1.0,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        known_names = ", ".join(GPUS)
        raise UserError(f"plan: {', '.join(missing)} missing; --gpu NAME knows peak and PCIe of {known_names}; {_HELP}")
    return Pool(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        hbm_gib=cast(float, options.hbm_gib),
        hbm_gb_per_second=cast(float, options.hbm_gb_per_second),
        nvlink_gb_per_second=options.nvlink_gb_per_second,
        network_gbps=cast(float, needed["--network-gbps"]),
        tflops=cast(float, tflops),
        pcie_gb_per_second=cast(float, pcie),
        step_floor_ms=options.step_floor_ms,
        host_memory_gib=options.host_memory_gib,
    )


def _result(
    config: TrainConfig, shards: Sequence[Shard], world: int, work: Any, peak: Rates, reached: Rates
) -> dict[str, Any]:
    alone = seconds_of(work, peak)
    limits = seconds_of(work, reached)
    kinds: dict[str, int] = {}
    for table_kind in (shard.sharding for shard in shards if shard.rank == 0):
        kinds[table_kind] = kinds.get(table_kind, 0) + 1
    return {
        "processes": world,
        "batch_size": work.samples,
        "bytes_per_rank": bytes_per_rank(config, shards, world),
        "host_bytes_per_rank": host_bytes_per_rank(config, shards, world),
        "shards_of_rank_0": kinds,
        "all_to_all_bytes_per_step": round(work.all_to_all_bytes),
        "all_reduce_bytes_per_step": round(work.all_reduce_bytes),
        "bounds": {_called(name, peak): work.samples / seconds for name, seconds in alone.items() if seconds},
        "limiting": _called(max(limits, key=lambda name: limits[name]), peak),
        "samples_per_second": work.samples / step_seconds(work, reached),
        "step_ms": 1e3 * step_seconds(work, reached),
    }


def _called(resource: str, rates: Rates) -> str:
    """A GPU's own memory by its name."""
    return "HBM" if resource == "memory" and rates.overlapped else resource


# --- the command -----------------------------------------------------------------------------------------------------


def options_parser() -> argparse.ArgumentParser:
    """The command's own options; all others are the trainer's."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer plan", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the pool [1]")
    parser.add_argument(
        "--nproc", type=int, default=2, help="without GPUs: processes of a node, run here to measure [2]"
    )
    parser.add_argument("--gpus-per-node", type=int, default=0, help="GPUs of a node; 0: CPUs like this machine's [0]")
    parser.add_argument("--gpu", default=None, help=f"model: its peak and PCIe are known for {', '.join(GPUS)}")
    parser.add_argument("--hbm-gib", type=float, default=None, help="memory of one GPU")
    parser.add_argument("--hbm-gb-per-second", type=float, default=None, help="its bandwidth")
    parser.add_argument("--nvlink-gb-per-second", type=float, default=0.0, help="both directions together; 0: none [0]")
    parser.add_argument("--network-gbps", type=float, default=None, help="of a node, needed for more than one")
    parser.add_argument("--tflops", type=float, default=None, help="peak in the precision used [as --gpu has]")
    parser.add_argument("--pcie-gb-per-second", type=float, default=None, help="host to one GPU [as --gpu has]")
    parser.add_argument(
        "--step-floor-ms", type=float, default=STEP_FLOOR_MS, help=f"launching kernels [{STEP_FLOOR_MS}]"
    )
    parser.add_argument(
        "--host-memory-gib", type=float, default=None, help="of a node, for tables that HBM cannot hold"
    )
    return parser


def _parse(arguments: list[str]) -> tuple[Options, list[str]]:
    try:
        found, rest = options_parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"plan: {error}; {_HELP}") from None
    if min(found.nodes, found.nproc) < 1 or found.gpus_per_node < 0:
        raise UserError(
            f"plan: --nodes is {found.nodes}, --nproc {found.nproc}, --gpus-per-node {found.gpus_per_node}; legal: "
            "1 or more, and 0 or more GPUs"
        )
    for name, value in vars(found).items():
        if isinstance(value, float) and value < 0:
            raise UserError(f"plan: --{name.replace('_', '-')} is {value:g}; legal: 0 or more")
    return Options(**vars(found)), rest


def _given(options: Options) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if value is not None}


def plan_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A plan as pairs for a table."""
    sizes, in_host = found["bytes_per_rank"], max(found["host_bytes_per_rank"])
    hosted = f"up to {in_host / GIB:,.1f} GiB: the device has no room, so their rows come over the link"
    limits = [(f"bound of {name}", f"{rate:,.0f} samples/s") for name, rate in found["bounds"].items()]
    return [
        ("hardware", found["hardware"]),
        ("precision", found["precision"]),
        ("samples of a step", f"{found['batch_size']:,} over {found['processes']} processes"),
        ("bytes per rank", f"{min(sizes) / GIB:,.3f} to {max(sizes) / GIB:,.3f} GiB (weights, optimizer state)"),
        *([("tables in host memory", hosted)] if in_host else []),
        ("all-to-all per rank and step", f"{found['all_to_all_bytes_per_step'] / 1e6:,.1f} MB sent"),
        ("all-reduce per step", f"{found['all_reduce_bytes_per_step'] / 1e6:,.1f} MB"),
        *limits,
        ("predicted", f"{found['samples_per_second']:,.0f} samples/s, {found['step_ms']:,.1f} ms a step"),
        ("limited by", found["limiting"]),
    ]


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Plan", show_header=False)
    for name, value in plan_rows(found):
        table.add_row(name, value, style="bold" if name in ("predicted", "limited by") else None)
    Console().print(table)
    sys.stdout.write(json.dumps(found) + "\n")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
