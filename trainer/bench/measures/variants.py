"""Compare variants of a step, each in its own processes.

So process-wide settings of one variant (allocator, threads) do not affect another. This process serves a key-value
store. The processes of all variants build their models and wait for requests in it. Blocks are requested in turn, so
that only one variant works at a time and changes of the machine's speed affect all.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.bench.measures.steps import cached_batches, ours, read_batches, stock
from trainer.bench.options import BenchOptions
from trainer.bench.progress import progress
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.runtime.process_group import Runtime

_POLL_SECONDS = 0.05
_TURN_TIMEOUT = timedelta(hours=12)  # of a variant waiting for its turn; it exits with this process anyway
_CONNECT_TIMEOUT = timedelta(seconds=30)
_EXIT_SECONDS = 30
OURS_AND_STOCK: dict[str, list[str]] = {"ours": [], "stock": ["--train.malloc", "system"]}
READING = "reading-"  # prefix of variants that read a source; the others have their batches in memory


def compare_variants(
    options: BenchOptions, nproc: str, rest: list[str], variants: dict[str, list[str]]
) -> dict[str, Any]:
    """Measure samples/s of the variants (names, and the options that each adds) with `nproc` processes each.

    For all but the last one, `ratios` has the median of the ratios to the last one, block by block; `ratio` is that of
    the first one. Raise UserError if the processes of a variant exit early, which they have already reported.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TURN_TIMEOUT)
    jobs: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with _delay_interrupt():
            for name, added in variants.items():
                jobs[name] = _start(name, store.port, options, nproc, [*rest, *added])
        facts = {name: json.loads(_wait_for(store, jobs, f"{name}-facts")) for name in variants}
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        with progress("measuring", options.blocks, "blocks") as advance:
            for block in range(options.blocks):
                for name in variants if block % 2 else reversed(variants):
                    store.set(f"{name}-{block}", str(options.steps))
                    seconds[name].append(float(_wait_for(store, jobs, f"{name}-{block}-took")))
                advance()
        for name in variants:
            store.set(f"{name}-{options.blocks}", "0")
        for job in jobs.values():
            job.wait(_EXIT_SECONDS)
    finally:
        _stop(jobs)
    return _result(options, facts, seconds)


def _result(options: BenchOptions, facts: dict[str, dict[str, Any]], seconds: dict[str, list[float]]) -> dict[str, Any]:
    *others, last = seconds
    first = facts[others[0]]
    blocks = {name: [options.steps * first["batch_size"] / taken for taken in seconds[name]] for name in seconds}
    found: dict[str, Any] = {name: statistics.median(rates) for name, rates in blocks.items()}
    found["ratios"] = {
        name: statistics.median(a / b for a, b in zip(blocks[name], blocks[last], strict=True)) for name in others
    }
    found["ratio"] = found["ratios"][others[0]]
    for name in seconds:
        found |= {f"{name}_blocks": blocks[name], f"{name}_precision": facts[name]["precision"]}
    return found | {
        f"{others[0]}_fast": first["fast"],
        "processes": first["processes"],
        "batch_per_process": first["batch_size"] // first["processes"],
        "device": first["device"],
        "blocks": options.blocks,
        "steps": options.steps,
    }


def _start(name: str, port: int, options: BenchOptions, nproc: str, rest: list[str]) -> subprocess.Popen[bytes]:
    """Start a variant's job in a new session, so that only this process gets Ctrl-C and stops it.

    The job notices the exit of this process by the pipe (`trainer.bench.parent_watch`).
    """
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", nproc, "bench", *options.arguments()]
    command += [f"--side={name}", f"--store={port}", *rest]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: during the start of a process it would leave that process behind."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _wait_for(store: dist.Store, jobs: dict[str, subprocess.Popen[bytes]], key: str) -> str:
    """Wait for the value that a variant stores under `key`; raise UserError if a job exits before."""
    while not store.check([key]):
        for name, job in jobs.items():
            if job.poll() is not None:
                error = UserError(f"the processes of {name} exited early: got exit code {job.returncode}; allowed: 0")
                error.reported = job.returncode == 2
                raise error
        time.sleep(_POLL_SECONDS)
    return store.get(key).decode()


def _stop(jobs: dict[str, subprocess.Popen[bytes]]) -> None:
    """Terminate the processes that are left; kill those that do not exit."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [job for job in jobs.values() if job.poll() is None]
        for job in left:
            os.killpg(job.pid, number)
        for job in left:
            try:
                job.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                continue  # it gets the next signal


def serve_variant(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> None:
    """Build the model of variant `options.side`, then run each requested block (collective)."""
    address = ("127.0.0.1", int(options.store))
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
    store.set_timeout(_TURN_TIMEOUT)
    build = stock if options.side == "stock" else ours
    batches = read_batches(config, runtime) if options.side.startswith(READING) else cached_batches(config, runtime)
    measure, facts = build(config, runtime, batches)
    measure(options.warmup)
    if runtime.is_main:
        common = {"processes": runtime.world_size, "batch_size": config.train.batch_size, "device": runtime.device.type}
        store.set(f"{options.side}-facts", json.dumps(facts | common))
    block = 0
    while steps := int(store.get(f"{options.side}-{block}")):  # waits until the key exists
        seconds = measure(steps)
        if runtime.is_main:
            store.set(f"{options.side}-{block}-took", str(seconds))
        block += 1
    dist.barrier()
