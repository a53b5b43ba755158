"""An iterator whose items another thread makes ahead of time, without leaks or deadlocks however it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
JOIN_SECONDS = 10.0  # a read that hangs longer (a dead file server) does not hold up the end of the process


@dataclass
class _Shared(Generic[T]):
    """All that the two threads share. The maker never refers to the iterator, so dropping the iterator ends both."""

    items: Iterator[T]
    slots: threading.Semaphore
    stop: threading.Event = field(default_factory=threading.Event)
    made: SimpleQueue[tuple[T] | BaseException | None] = field(default_factory=SimpleQueue)


def made_ahead(items: Iterator[T], depth: int, begin: Callable[[], None]) -> Iterator[T]:
    """The same items in the same order; a thread, which calls `begin` first, makes up to `depth` of them ahead.

    What `items` raises is raised here after the items before it. The thread starts with the first `next` and ends with
    the items, at an error, or when this iterator is closed or dropped.
    """
    shared = _Shared(items, threading.Semaphore(depth))
    thread = threading.Thread(target=_make, args=(shared, begin), name="trainer-data", daemon=True)
    thread.start()
    try:
        while (made := shared.made.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            shared.slots.release()
            yield made[0]
    finally:
        shared.stop.set()
        shared.slots.release()
        if thread is not threading.current_thread():  # the garbage collector may run this in the maker
            thread.join(JOIN_SECONDS)


def _make(shared: _Shared[T], begin: Callable[[], None]) -> None:
    end: BaseException | None = None
    try:
        begin()
        while shared.slots.acquire() and not shared.stop.is_set():
            shared.made.put((next(shared.items),))
    except StopIteration:
        pass
    except BaseException as error:  # whatever it is, it belongs to the consumer
        end = error
    shared.made.put(end)
