"""Restarted processes find each other, and none of an earlier start, in a store that outlives them."""

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
    """Return the port of a store that runs during the test, like the one of torchrun's agent."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield int(server.port)
    del server


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)


def connect(port: int, delays: dict[int, float], start: str) -> list[str]:
    """Return rank 0's address as each rank reads it, when rank r starts `delays[r]` seconds late."""
    addresses = [""] * len(delays)

    def process(rank: int) -> None:
        time.sleep(delays[rank])
        store = open_private_store(client(port), rank, len(delays), LIMIT)
        if rank == 0:
            store.set("address", start)
        store.wait(["address"], LIMIT)
        addresses[rank] = store.get("address").decode()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return addresses


@pytest.mark.parametrize("late", [0, 1, 2], ids=lambda rank: f"rank-{rank}-late")
def test_each_start_sees_its_own_addresses_whichever_rank_is_late(late: int, port: int) -> None:
    for start in ("first", "second", "third"):
        assert connect(port, {rank: 0.3 * (rank == late) for rank in range(3)}, start) == [start] * 3


def test_an_unanswered_request_of_a_killed_start_is_ignored(port: int) -> None:
    client(port).set("trainer-call-1", "a dead process")
    assert connect(port, {0: 0.0, 1: 0.5}, "alive") == ["alive", "alive"]


def test_the_timeout_error_names_the_missing_ranks(port: int) -> None:
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1, 2\]"):
        open_private_store(client(port), 0, 3, timedelta(seconds=0.2))
