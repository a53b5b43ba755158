"""The netcheck command: measure the network between the job's processes and check which fabric NCCL uses.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). S is the bytes of one
process's buffer, n the number of processes, t the seconds of one operation, 1 GB = 10^9 bytes:

    all_to_all   algorithm S / t    bus S / t * (n - 1) / n
    all_reduce   algorithm S / t    bus S / t * 2 (n - 1) / n

The bus bandwidth does not depend on n, so it can be compared with the hardware's. --min-gb-per-s refers to it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.arguments import CommandParser, integer_from, integers_from, number_above
from trainer.cli.progress import KINDS, JobProgress
from trainer.errors import UserError
from trainer.exit_codes import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    import argparse

    from trainer.runtime.process_group import Runtime

#: Wide enough for the numbers and the longest host name, 63 characters.
_LOG_COLUMNS = 160
_DEFAULT_SIZES = {"cuda": (1, 16, 128, 512), "cpu": (1, 4, 16)}  # MiB; at the largest a fabric is near its peak
_GRACE_SECONDS = 60  # torch's timeout is longer than ours, because ours ends with a one-line error


def parser() -> CommandParser:
    """Return the parser of the command's options."""
    flags = CommandParser(
        "netcheck",
        "Time all_to_all and all_reduce between the processes of a job (torchrun, or trainer launch netcheck). Check "
        "their results. Exit with 1 if the network is too slow or not the expected one, and with 2 if RDMA cannot lock "
        "memory.",
    )
    add = flags.add_argument
    add("--min-gb-per-s", type=number_above(0), default=None, metavar="X", help="least bus bandwidth per process "
        "(10^9 bytes/s) at the largest size, for both operations")  # fmt: skip
    add("--expect-log", default=None, metavar="TEXT", help="text that NCCL's log must contain in every "
        "process, such as 'NET/OFI Selected provider is efa' or 'NET/IB'")  # fmt: skip
    add("--sizes-mib", type=integers_from(1), default=None, metavar="N,N", help="MiB of a process's buffer; default "
        f"{_join(_DEFAULT_SIZES['cuda'])} on GPUs, {_join(_DEFAULT_SIZES['cpu'])} on CPUs")  # fmt: skip
    add("--iterations", type=integer_from(1), default=20, metavar="N", help="timed operations per size")
    add(
        "--timeout-s",
        type=integer_from(1),
        default=300,
        metavar="N",
        help="longest time of the check; a slower one fails",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: one GPU per process if there are enough, else CPU",
    )
    add("--progress", choices=KINDS, default="auto", help="auto: a bar and a table on a terminal, else JSON lines")
    return flags


def netcheck_main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `netcheck [...]` in every process of a job; return EXIT_OK or EXIT_FAILED."""
    is_main = environ.get("RANK", "0") == "0"
    try:
        options = parser().read(arguments)
    except UserError as error:
        error.reported = not is_main  # every process finds the same mistake; only rank 0 prints it
        raise
    with tempfile.TemporaryDirectory(prefix="netcheck-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "nccl.log"
        if options.expect_log:
            # NCCL reads these when it creates its first communicator. Each process has its own file.
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        return _check_with_timeout(options, is_main, log)


def _check_with_timeout(options: argparse.Namespace, is_main: bool, log: Path) -> int:
    """Run the check, and exit after the timeout because a hanging collective cannot be interrupted."""
    doing = ["starting the process group"]

    def time_out() -> None:
        if is_main:
            _print_error(
                f"netcheck did not finish within --timeout-s {options.timeout_s}, while {doing[-1]}: a process is "
                f"missing, or the network between the hosts is blocked (security group, firewall) or far too slow"
            )
        os._exit(EXIT_FAILED)

    timer = threading.Timer(options.timeout_s, time_out)
    timer.daemon = True
    timer.start()
    try:
        return _check(options, doing, log)
    finally:
        timer.cancel()


def _check(options: argparse.Namespace, doing: list[str], log: Path) -> int:
    """Start the process group, measure, print the result and return the exit code. Collective."""
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    import torch.distributed as dist

    from trainer.config import TrainLoopConfig
    from trainer.runtime.process_group import init_runtime

    locked = _check_locked_memory() if options.device != "cpu" else None
    config = TrainLoopConfig(device=options.device, timeout_seconds=options.timeout_s + _GRACE_SECONDS)
    try:
        with init_runtime(config, dict(os.environ)) as runtime:
            failures, result = _measure_all(options, runtime, doing, log)
            result["machines"] = _gather_machines(locked, runtime)
            if runtime.is_main:
                _print_result(result, failures)
    except (dist.DistError, RuntimeError) as error:
        if os.environ.get("RANK", "0") == "0":
            _print_error(f"netcheck lost the other processes while {doing[-1]}: {' '.join(str(error).split())[:300]}")
        sys.stdout.flush()
        os._exit(EXIT_FAILED)  # an orderly exit would wait for processes that have exited
    return EXIT_FAILED if failures else EXIT_OK


def _check_locked_memory() -> dict[str, Any] | None:
    """Return what limits locked memory, None without RDMA devices; raise UserError if a GiB cannot be locked.

    One process of a machine locks memory.
    """
    from trainer.runtime.locked_memory import require_lock, require_locked_memory

    found = require_locked_memory(os.environ)
    if found is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return {"host": socket.gethostname(), **found.fields(), "locked_gib": require_lock(found, os.environ)}


def _gather_machines(locked: dict[str, Any] | None, runtime: Runtime) -> list[dict[str, Any]]:
    """Return the limits of locked memory of every machine with RDMA devices. Collective."""
    import torch.distributed as dist

    everyone: list[Any] = [locked]
    if runtime.world_size > 1:
        everyone = [None] * runtime.world_size
        dist.all_gather_object(everyone, locked)
    return [item for item in everyone if item]


def _measure_all(
    options: argparse.Namespace, runtime: Runtime, doing: list[str], log: Path
) -> tuple[list[str], dict[str, Any]]:
    """Return the failures, equal in every process, and the measurements. Collective."""
    backend = "nccl" if runtime.device.type == "cuda" else "gloo"
    result: dict[str, Any] = {"backend": backend, "processes": runtime.world_size, "measured": []}
    if options.expect_log and backend == "gloo":
        return [f"the fabric of --expect-log {options.expect_log!r} was not used: got backend gloo"], result
    if runtime.world_size == 1:
        result["note"] = "one process has no peer to measure. Fix: start several with torchrun or trainer launch"
        return [], result
    from trainer.netcheck.collective import Measurement, measure

    sizes = sorted(options.sizes_mib or _DEFAULT_SIZES[runtime.device.type])
    progress = JobProgress(options.progress if runtime.is_main else "none")
    found: list[Measurement] = []
    with progress.task("measuring", 2 * len(sizes), "operations") as task:
        for size in sizes:
            for operation in ("all_to_all", "all_reduce"):
                doing.append(f"measuring {operation} of {size} MiB")
                found.append(measure(operation, size, options.iterations, runtime))
                task.advance(1)
    result["measured"] = [item.fields() for item in found]
    failures = [item.wrong for item in found if item.wrong]
    for item in found:
        if options.min_gb_per_s and item.size_mib == sizes[-1] and item.bus_gb_per_s < options.min_gb_per_s:
            failures.append(
                f"{item.operation} of {item.size_mib} MiB is too slow: got {item.bus_gb_per_s:.3g} GB/s per process; "
                f"allowed: --min-gb-per-s {options.min_gb_per_s:g} or more; slowest: rank {item.slowest_rank} on "
                f"{item.slowest_host}"
            )
    return failures + _missing_log(options.expect_log, runtime, log), result


def _missing_log(expected: str | None, runtime: Runtime, log: Path) -> list[str]:
    """Return a failure if NCCL's log lacks the expected text, with the network that it names instead. Collective."""
    if not expected:
        return []
    import torch.distributed as dist

    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    networks = [line.partition("NCCL INFO ")[2].strip() for line in text.splitlines() if "NCCL INFO NET/" in line]
    mine = None if expected in text else (socket.gethostname(), networks[:1])
    everyone: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(everyone, mine)
    lacking = [(rank, *found) for rank, found in enumerate(everyone) if found]
    if not lacking:
        return []
    rank, host, seen = lacking[0]
    instead = f"got {seen[0]!r}" if seen else "got no network"
    return [
        f"NCCL's log does not contain --expect-log {expected!r} in {len(lacking)} of {runtime.world_size} processes, "
        f"first rank {rank} on {host}: {instead}"
    ]


def _print_result(result: dict[str, Any], failures: list[str]) -> None:
    """Print the table and one JSON line, and the failures on standard error."""
    if result["measured"] or result.get("machines"):
        from rich.console import Console

        # rich assumes 80 columns for a log, which would cut off the names of pods.
        console = Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS)
        if result.get("machines"):
            console.print(_machine_table(result["machines"]))
        if result["measured"]:
            console.print(_table(result))
    if "note" in result:
        sys.stdout.write(result["note"] + "\n")
    sys.stdout.write(json.dumps({"event": "result", "ok": not failures} | result | {"failures": failures}) + "\n")
    sys.stdout.flush()
    if failures:
        _print_error("; ".join(failures))


def _table(result: dict[str, Any]) -> Any:
    """Return the measurements as a rich table."""
    from rich.table import Table

    table = Table(title=f"{result['processes']} processes, {result['backend']}, numbers checked")
    for column in ("operation", "MiB", "ms", "GB/s (algorithm)", "GB/s per process (bus)", "slowest"):
        table.add_column(column, justify="left" if column in ("operation", "slowest") else "right")
    for item in result["measured"]:
        table.add_row(
            item["operation"],
            str(item["size_mib"]),
            f"{item['seconds'] * 1e3:.3f}",
            f"{item['algorithm_gb_per_s']:.3g}",
            f"{item['bus_gb_per_s']:.3g}",
            f"rank {item['slowest_rank']} on {item['slowest_host']}",
        )
    return table


def _machine_table(machines: Sequence[dict[str, Any]]) -> Any:
    """Return what each machine with RDMA devices may lock, as a rich table."""
    from rich.table import Table

    table = Table(title="memory that network cards with RDMA may use")
    columns = {
        "host": "host",
        "RDMA devices": "rdma_devices",
        "user": "uid",
        "RLIMIT_MEMLOCK": "memlock_hard",
        "CAP_IPC_LOCK": "ipc_lock",
        "locked GiB": "locked_gib",
    }
    for column in columns:
        table.add_column(column)
    for machine in machines:
        table.add_row(
            *(f"{machine[field]:g}" if field == "locked_gib" else str(machine[field]) for field in columns.values())
        )
    return table


def _join(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _print_error(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
