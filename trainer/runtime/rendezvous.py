"""How the processes of one start find each other in a store that has seen other starts.

torchrun's agent hosts one store for all starts of its processes, and gloo publishes addresses there under names that
are the same in each. After a restart a process may so read the address of one that is dead, and wait for it until the
time limit of the job (half an hour by default). Keys of this start alone cannot be read too early.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_LOOK_SECONDS = 0.02


def open_private_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Collective: the part of `store` that only the `world_size` processes of this start use.

    Each process but rank 0 calls under a name that nobody else had; rank 0 answers all callers, those of earlier starts
    too, with the name of its part, until every rank has said that it knows that name. Raises DistStoreError where that
    takes longer than `timeout`.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        _answer(store, name, set(range(1, world_size)), time.monotonic() + timeout.total_seconds())
    else:
        caller = uuid.uuid4().hex
        store.set(f"trainer-call-{rank}", caller)
        store.wait([f"trainer-answer-{caller}"], timeout)
        name = store.get(f"trainer-answer-{caller}").decode()
        store.set(f"trainer-{name}-knows-{rank}", "1")
    return dist.PrefixStore(f"trainer-{name}", store)


def _answer(store: dist.Store, name: str, missing: set[int], until: float) -> None:
    answered: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            if store.check([f"trainer-{name}-knows-{rank}"]):
                missing.remove(rank)
            elif store.check([f"trainer-call-{rank}"]):
                caller = store.get(f"trainer-call-{rank}").decode()
                if answered.get(rank) != caller:
                    answered[rank] = caller
                    store.set(f"trainer-answer-{caller}", name)
        if time.monotonic() > until:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not come to rank 0 in time")
        time.sleep(_LOOK_SECONDS if missing else 0)
