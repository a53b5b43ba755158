"""Ours and stock in turn, each in processes of its own: what one sets for its whole process (the allocator, threads)
cannot help or hinder the other.

This process holds a store. The processes of both sides build their models and wait at it; one block after another is
asked for, so that at any time only one side works, and a drift of the machine's speed hits both.
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
_PATIENCE = timedelta(hours=12)  # of a side for its turn; the end of this process ends it at once
_TO_CONNECT = timedelta(seconds=30)
_END_SECONDS = 30
AGAINST_STOCK: dict[str, list[str]] = {"ours": [], "stock": ["--train.malloc", "system"]}
READING = "reading-"  # begins the names of sides that read; the others have their batches in memory


def bench_sides(options: BenchOptions, nproc: str, rest: list[str], sides: dict[str, list[str]]) -> dict[str, Any]:
    """Samples/s of the `sides` (names, and what each adds to the options) over `nproc` processes each, and for all but
    the last one the median of their ratios to it, block by block; `ratio` is the first one's.

    Raises UserError, already told, where a side ends early.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    jobs: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with _uninterrupted():
            for name, more in sides.items():
                jobs[name] = _start(name, store.port, options, nproc, [*rest, *more])
        facts = {name: json.loads(_answer(store, jobs, f"{name}-facts")) for name in sides}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        with progress("measuring", options.blocks, "blocks") as advance:
            for block in range(options.blocks):
                for name in sides if block % 2 else reversed(sides):
                    store.set(f"{name}-{block}", str(options.steps))
                    seconds[name].append(float(_answer(store, jobs, f"{name}-{block}-took")))
                advance()
        for name in sides:
            store.set(f"{name}-{options.blocks}", "0")
        for job in jobs.values():
            job.wait(_END_SECONDS)
    finally:
        _end(jobs)
    return _result(options, facts, seconds)


def _result(options: BenchOptions, facts: dict[str, dict[str, Any]], seconds: dict[str, list[float]]) -> dict[str, Any]:
    *others, last = seconds
    of_first = facts[others[0]]
    blocks = {name: [options.steps * of_first["batch_size"] / taken for taken in seconds[name]] for name in seconds}
    found: dict[str, Any] = {name: statistics.median(rates) for name, rates in blocks.items()}
    found["ratios"] = {
        name: statistics.median(a / b for a, b in zip(blocks[name], blocks[last], strict=True)) for name in others
    }
    found["ratio"] = found["ratios"][others[0]]
    for name in seconds:
        found |= {f"{name}_blocks": blocks[name], f"{name}_precision": facts[name]["precision"]}
    return found | {
        f"{others[0]}_fast": of_first["fast"],
        "processes": of_first["processes"],
        "batch_per_process": of_first["batch_size"] // of_first["processes"],
        "device": of_first["device"],
        "blocks": options.blocks,
        "steps": options.steps,
    }


def _start(name: str, port: int, options: BenchOptions, nproc: str, rest: list[str]) -> subprocess.Popen[bytes]:
    """A side's job, in a session of its own: this process alone hears Ctrl-C, and ends it. Its own end is told by the
    pipe (`trainer.bench.orphans`)."""
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", nproc, "bench", *options.arguments()]
    command += [f"--side={name}", f"--store={port}", *rest]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts at the end: in the middle of starting a process it would leave one that nobody knows of."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def _answer(store: dist.Store, jobs: dict[str, subprocess.Popen[bytes]], key: str) -> str:
    """What a side says under `key`, once it does."""
    while not store.check([key]):
        for name, job in jobs.items():
            if job.poll() is not None:  # it has said why
                error = UserError(f"the processes of {name} ended with exit code {job.returncode}")
                error.reported = job.returncode == 2
                raise error
        time.sleep(_POLL_SECONDS)
    return store.get(key).decode()


def _end(jobs: dict[str, subprocess.Popen[bytes]]) -> None:
    """Leave no process behind."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        left = [job for job in jobs.values() if job.poll() is None]
        for job in left:
            os.killpg(job.pid, how)
        for job in left:
            try:
                job.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                continue  # the next signal is for it


def serve_side(config: TrainConfig, runtime: Runtime, options: BenchOptions) -> None:
    """Collective: build the model of `options.side`, then run each block that is asked for."""
    address = ("127.0.0.1", int(options.store))
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_TO_CONNECT)
    store.set_timeout(_PATIENCE)
    build = stock if options.side == "stock" else ours
    batches = read_batches(config, runtime) if options.side.startswith(READING) else cached_batches(config, runtime)
    measure, facts = build(config, runtime, batches)
    measure(options.warmup)
    if runtime.is_main:
        common = {"processes": runtime.world_size, "batch_size": config.train.batch_size, "device": runtime.device.type}
        store.set(f"{options.side}-facts", json.dumps(facts | common))
    block = 0
    while steps := int(store.get(f"{options.side}-{block}")):  # waits for the key
        seconds = measure(steps)
        if runtime.is_main:
            store.set(f"{options.side}-{block}-took", str(seconds))
        block += 1
    dist.barrier()
