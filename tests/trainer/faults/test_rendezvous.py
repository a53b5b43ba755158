"""Processes that start again meet each other, and nobody of an earlier start, in a store that outlives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer.runtime.rendezvous import open_private_store

LIMIT = timedelta(seconds=20)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store that is there as long as the test, as torchrun's agent has one."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield int(server.port)
    del server


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)


def meet(port: int, delays: dict[int, float], start: str) -> list[str]:
    """What each rank reads of rank 0's address, when rank r comes `delays[r]` seconds late."""
    found = [""] * len(delays)

    def process(rank: int) -> None:
        time.sleep(delays[rank])
        mine = open_private_store(client(port), rank, len(delays), LIMIT)
        if rank == 0:
            mine.set("address", start)
        mine.wait(["address"], LIMIT)
        found[rank] = mine.get("address").decode()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("late", [0, 1, 2], ids=lambda rank: f"rank-{rank}-late")
def test_each_start_sees_its_own_addresses_whoever_is_late(late: int, port: int) -> None:
    for start in ("first", "second", "third"):
        assert meet(port, {rank: 0.3 * (rank == late) for rank in range(3)}, start) == [start] * 3


def test_what_a_killed_start_left_half_said_is_heard_by_nobody(port: int) -> None:
    client(port).set("trainer-call-1", "somebody who is dead")
    assert meet(port, {0: 0.0, 1: 0.5}, "alive") == ["alive", "alive"]


def test_a_process_that_never_comes_is_named_in_time(port: int) -> None:
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1, 2\]"):
        open_private_store(client(port), 0, 3, timedelta(seconds=0.2))
