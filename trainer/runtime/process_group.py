"""The processes of a job: process group setup, device selection and error propagation."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.config import TrainLoopConfig
from trainer.errors import UserError
from trainer.exit_codes import EXIT_RESTART, EXIT_USER_ERROR
from trainer.runtime.locked_memory import require_locked_memory
from trainer.runtime.malloc import apply_malloc
from trainer.runtime.precision import Precision, apply_precision, choose_precision
from trainer.runtime.rendezvous import open_private_store

_POLL_SECONDS = 0.5


@dataclass
class Runtime:
    """One process of the job. `rank` of `world_size`; `local_rank` of `local_world_size` on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    precision: Precision
    precision_reason: str
    errors: ErrorChannel = field(repr=False)
    store: dist.Store | None = field(repr=False, default=None)  # of this start of the job; None for one process
    malloc: str = "system"  # the allocator in use
    siblings: tuple[int, ...] = ()  # process ids of the other processes on this machine

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which prints and reports."""
        return self.rank == 0


class ErrorChannel:
    """Sends a UserError of any process, such as a bad row in its share of the data, to rank 0 and ends all processes.

    The other processes may be blocked in a collective, so a thread in each polls a key of the job's store. When the key
    appears, rank 0 prints the error once, and every process exits with code 2.
    """

    def __init__(self, rank: int, store: dist.Store | None) -> None:
        self._rank = rank
        self._closed = threading.Event()
        self._printing = threading.Lock()
        self._printed = False
        self._store = store
        if store is not None:
            threading.Thread(target=self._watch, name="error-channel", daemon=True).start()

    def close(self) -> None:
        """Stop watching for errors."""
        self._closed.set()

    def report(self, error: UserError) -> None:
        """Send `error` to rank 0 and wait up to 10 s until it is printed."""
        if self._store is None or self._closed.is_set():
            print_error(error)
            return
        self._store.set("message", str(error))
        if self._rank == 0:
            self._print(str(error))
            time.sleep(2 * _POLL_SECONDS)  # the store may be in this process: let the others read it
        else:
            try:
                self._store.wait(["printed"], timedelta(seconds=10))
            except dist.DistError:  # rank 0 exited for another reason, and printed that
                return
        self._closed.set()

    def _watch(self) -> None:
        assert self._store is not None
        while not self._closed.wait(_POLL_SECONDS):
            try:
                raised = self._store.check(["message"])
            except dist.DistError:  # the store's host has exited: the job is ending
                return
            if raised:
                if self._rank == 0:
                    self._print(self._store.get("message").decode())
                sys.stdout.flush()
                os._exit(EXIT_USER_ERROR)  # the main thread may hang in a collective that will never finish

    def _print(self, message: str) -> None:
        assert self._store is not None
        with self._printing:  # the thread must not end the process while the main thread is about to print
            if not self._printed:
                self._printed = True
                print_error(message)
                self._store.set("printed", "1")


def print_error(error: object) -> None:
    """Print an error as one line on standard error."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def init_runtime(config: TrainLoopConfig, environ: dict[str, str]) -> Iterator[Runtime]:
    """Start the process group (NCCL on GPUs, gloo on CPUs) and always end it; without a launcher it has one process."""
    rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank, local_world = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    try:
        device = _choose_device(config.device, local_rank, local_world)
        precision, reason = choose_precision(config.precision, device)
        malloc = apply_malloc(config.malloc, device)
    except UserError as error:
        error.reported = rank != 0  # every process of the job finds the same error
        raise
    if device.type == "cuda" and world_size > local_world:
        require_locked_memory(environ)  # before NCCL starts, which would fall back to TCP in silence
    apply_precision(precision)
    torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // local_world))
    _init_process_group(device, rank, world_size, timedelta(seconds=config.timeout_seconds), environ)
    channel = ErrorChannel(rank, _connect_store("errors", rank, world_size, environ))
    store, siblings = _connect_store("watchdog", rank, world_size, environ), _find_siblings(world_size, environ)
    try:
        ranks = (rank, world_size, local_rank, local_world)
        yield Runtime(*ranks, device, precision, reason, channel, store, malloc, siblings)
    except UserError as error:
        channel.report(error)
        error.reported = True
        raise  # without destroy_process_group: it could wait for processes that hang in a collective
    except RuntimeError as error:
        if world_size > 1 and _is_lost_process(error):
            _exit_after_loss(rank, error)
        raise
    channel.close()
    dist.destroy_process_group()


def _connect_store(purpose: str, rank: int, world_size: int, environ: dict[str, str]) -> dist.Store | None:
    """Return a separate connection to the job's store, because a wait blocks its connection. Collective."""
    if world_size == 1:
        return None
    names: list[str | None] = [uuid.uuid4().hex if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)  # a restarted job must not read the keys of earlier starts
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"trainer-{purpose}-{names[0]}", store)


def _find_siblings(world_size: int, environ: dict[str, str]) -> tuple[int, ...]:
    """Return the process ids of the other processes that this machine's launcher started. Collective."""
    mine = (environ.get("GROUP_RANK", "0"), os.getpid())
    everyone: list[tuple[str, int]] = [mine] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, mine)
    return tuple(pid for group, pid in everyone if group == mine[0] and pid != mine[1])


def _is_lost_process(error: RuntimeError) -> bool:
    """Return whether a collective failed because the process at its other end exited, by gloo's messages."""
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    return any(message in str(error) for message in messages)


def _exit_after_loss(rank: int, error: RuntimeError) -> None:
    """Print one line about a lost process, which printed its own reason if it could, and exit for a restart."""
    time.sleep(2 * _POLL_SECONDS)  # after a user error, the error channel ends this process with that exit code
    line = " ".join(str(error).split())[-160:]
    print(f"rank {rank}: another process has exited (...{line}); exiting for a restart", file=sys.stderr, flush=True)  # noqa: T201
    sys.stdout.flush()
    os._exit(EXIT_RESTART)  # an orderly exit would abort in the threads of the process group


def _choose_device(requested: str, local_rank: int, local_world: int) -> torch.device:
    count = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cuda" and count < local_world:
        raise UserError(
            f"train.device is cuda, but this machine has {count} usable GPUs for {local_world} processes. "
            f"Fix: start at most one process per GPU, or use --train.device cpu"
        )
    if requested == "cpu" or count < local_world:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _init_process_group(
    device: torch.device, rank: int, world_size: int, timeout: timedelta, environ: dict[str, str]
) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in environ:
        bound = device if device.type == "cuda" else None
        if world_size > 1 and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            agents = dist.TCPStore(
                environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timeout
            )
            store = open_private_store(agents, rank, world_size, timeout)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
            )
        else:
            dist.init_process_group(backend, timeout=timeout, device_id=bound)
    elif world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=1, timeout=timeout)
    else:
        raise UserError(
            f"WORLD_SIZE is {world_size} but MASTER_ADDR is not set. Fix: start the processes with "
            f"`torchrun --nproc_per_node {world_size} -m trainer`"
        )
