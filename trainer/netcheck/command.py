"""The netcheck command: does the fabric between the job's processes carry what was paid for, and is it the fabric.

Bandwidths as nccl-tests defines them (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), S being the bytes of one
process's buffer, n the processes, t the seconds of one operation, 1 GB = 10^9 bytes:

    all_to_all   algorithm S / t    bus S / t * (n - 1) / n
    all_reduce   algorithm S / t    bus S / t * 2 (n - 1) / n

The bus bandwidth does not depend on n, so it can be held against the hardware's; it is what --min-gb-per-s means.
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

#: Room for the longest name of a host, 63 letters, beside the numbers.
_LOG_COLUMNS = 160
_DEFAULT_SIZES = {"cuda": (1, 16, 128, 512), "cpu": (1, 4, 16)}  # the largest is where a fabric is near its peak
_GRACE_SECONDS = 60  # by which torch's own time limit is longer than ours, which ends with one line


def parser() -> CommandParser:
    """The command's parser, which its help is made of."""
    flags = CommandParser(
        "netcheck",
        "Times all_to_all and all_reduce between the processes of a job (torchrun, or trainer launch netcheck), checks "
        "their numbers, and exits with 1 where the network is too slow or not the expected one.",
    )
    add = flags.add_argument
    add("--min-gb-per-s", type=number_above(0), default=None, metavar="X", help="least bus bandwidth per process (10^9 "
        "bytes/s) at the largest size, for both operations")  # fmt: skip
    add("--expect-log", default=None, metavar="TEXT", help="text that NCCL's log must hold in every process, for "
        "example 'NET/OFI Selected provider is efa' or 'NET/IB'")  # fmt: skip
    add("--sizes-mib", type=integers_from(1), default=None, metavar="N,N", help="MiB of a process's buffer; default "
        f"{_words(_DEFAULT_SIZES['cuda'])} on GPUs, {_words(_DEFAULT_SIZES['cpu'])} on CPUs")  # fmt: skip
    add("--iterations", type=integer_from(1), default=20, metavar="N", help="timed operations per size")
    add("--timeout-s", type=integer_from(1), default=300, metavar="N", help="a check that takes longer has failed")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: one GPU per process where there are")
    add("--progress", choices=KINDS, default="auto", help="auto: a bar and a table on a terminal, else JSON lines")
    return flags


def netcheck_main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """`netcheck [...]` in every process of a job; 0 where the network passes, 1 where it does not."""
    is_main = environ.get("RANK", "0") == "0"
    try:
        options = parser().read(arguments)
    except UserError as error:
        error.reported = not is_main  # every process sees the same mistake; one says it
        raise
    with tempfile.TemporaryDirectory(prefix="netcheck-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "nccl.log"
        if options.expect_log:
            # Read by NCCL when its first communicator is made; a file of each process, so that logs do not mix.
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
        return _in_time(options, is_main, log)


def _in_time(options: argparse.Namespace, is_main: bool, log: Path) -> int:
    """Check, and end this process where that takes too long: a hanging collective cannot be interrupted."""
    doing = ["starting the process group"]

    def too_late() -> None:
        if is_main:
            _say(
                f"netcheck did not finish within --timeout-s {options.timeout_s}, while {doing[-1]}: a process is "
                f"missing, or the network between the hosts is blocked (security group, firewall) or far too slow"
            )
        os._exit(EXIT_FAILED)

    timer = threading.Timer(options.timeout_s, too_late)
    timer.daemon = True
    timer.start()
    try:
        return _check(options, doing, log)
    finally:
        timer.cancel()


def _check(options: argparse.Namespace, doing: list[str], log: Path) -> int:
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    import torch.distributed as dist

    from trainer.config import TrainLoopConfig
    from trainer.runtime.process_group import init_runtime

    config = TrainLoopConfig(device=options.device, timeout_seconds=options.timeout_s + _GRACE_SECONDS)
    try:
        with init_runtime(config, dict(os.environ)) as runtime:
            failures, result = _judge(options, runtime, doing, log)
            if runtime.is_main:
                _show(result, failures)
    except (dist.DistError, RuntimeError) as error:
        if os.environ.get("RANK", "0") == "0":
            _say(f"netcheck lost the other processes while {doing[-1]}: {' '.join(str(error).split())[:300]}")
        sys.stdout.flush()
        os._exit(EXIT_FAILED)  # an orderly exit would wait for processes that have gone
    return EXIT_FAILED if failures else EXIT_OK


def _judge(
    options: argparse.Namespace, runtime: Runtime, doing: list[str], log: Path
) -> tuple[list[str], dict[str, Any]]:
    """Collective: what is wrong, the same in every process, and the measurements."""
    backend = "nccl" if runtime.device.type == "cuda" else "gloo"
    result: dict[str, Any] = {"backend": backend, "processes": runtime.world_size, "measured": []}
    if options.expect_log and backend == "gloo":
        return [f"backend is gloo, the fabric that --expect-log {options.expect_log!r} means was not used"], result
    if runtime.world_size == 1:
        result["note"] = "one process: there is no peer to measure; start several with torchrun or trainer launch"
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
                f"{item.operation} of {item.size_mib} MiB reached {item.bus_gb_per_s:.3g} GB/s per process, below "
                f"--min-gb-per-s {options.min_gb_per_s:g}; slowest: rank {item.slowest_rank} on {item.slowest_host}"
            )
    return failures + _missing_log(options.expect_log, runtime, log), result


def _missing_log(expected: str | None, runtime: Runtime, log: Path) -> list[str]:
    """Collective: where NCCL's log lacks the expected text, and which network it speaks of instead."""
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
    instead = f"it says {seen[0]!r}" if seen else "it names no network"
    return [
        f"NCCL's log lacks --expect-log {expected!r} in {len(lacking)} of {runtime.world_size} processes, first rank "
        f"{rank} on {host}: {instead}"
    ]


def _show(result: dict[str, Any], failures: list[str]) -> None:
    """Rank 0: the table, one JSON line, and one line per failure on standard error."""
    if result["measured"]:
        from rich.console import Console

        # A log has no width: at the 80 columns that are assumed otherwise, the names of pods are cut off.
        Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS).print(_table(result))
    if "note" in result:
        sys.stdout.write(result["note"] + "\n")
    sys.stdout.write(json.dumps({"event": "result", "ok": not failures} | result | {"failures": failures}) + "\n")
    sys.stdout.flush()
    if failures:
        _say("; ".join(failures))


def _table(result: dict[str, Any]) -> Any:
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


def _words(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _say(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
