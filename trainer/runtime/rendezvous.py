"""A private part of a store for the processes of one start of a job.

torchrun's agent hosts one store for all starts of its processes, and gloo publishes addresses there under names that
every start shares. After a restart, a process may read the address of a dead one and wait for it until the job's time
limit, half an hour by default. Keys under a prefix that only one start knows cannot be read too early.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.02


def open_private_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the part of `store` that only the `world_size` processes of this start use. Collective.

    Each process but rank 0 sends a request with a unique id. Rank 0 answers every request, also those of earlier
    starts, with the name of its part, until every rank has acknowledged that name. Raises DistStoreError after
    `timeout`.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        _answer_requests(store, name, set(range(1, world_size)), time.monotonic() + timeout.total_seconds())
    else:
        request = uuid.uuid4().hex
        store.set(f"trainer-call-{rank}", request)
        store.wait([f"trainer-answer-{request}"], timeout)
        name = store.get(f"trainer-answer-{request}").decode()
        store.set(f"trainer-{name}-knows-{rank}", "1")
    return dist.PrefixStore(f"trainer-{name}", store)


def _answer_requests(store: dist.Store, name: str, missing: set[int], deadline: float) -> None:
    answered: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            if store.check([f"trainer-{name}-knows-{rank}"]):
                missing.remove(rank)
            elif store.check([f"trainer-call-{rank}"]):
                request = store.get(f"trainer-call-{rank}").decode()
                if answered.get(rank) != request:
                    answered[rank] = request
                    store.set(f"trainer-answer-{request}", name)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not connect to rank 0 in time")
        time.sleep(_POLL_SECONDS if missing else 0)
