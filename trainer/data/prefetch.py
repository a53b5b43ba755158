"""Prefetch the items of an iterator in a thread, which ends with the iterator in every case."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
JOIN_SECONDS = 10.0  # a read that hangs longer (a dead file server) must not delay the end of the process


@dataclass
class _Shared(Generic[T]):
    """State of both threads. The thread has no reference to the iterator, so dropping that ends the thread."""

    items: Iterator[T]
    slots: threading.Semaphore
    stop: threading.Event = field(default_factory=threading.Event)
    ready: SimpleQueue[tuple[T] | BaseException | None] = field(default_factory=SimpleQueue)


def prefetch(items: Iterator[T], depth: int, on_start: Callable[[], None]) -> Iterator[T]:
    """Yield the same items; a thread, which first calls `on_start`, prepares up to `depth` of them ahead.

    An error of `items` is raised after the items before it. The thread starts with the first `next`. It ends with the
    items, after an error, or when this iterator is closed or dropped.
    """
    shared = _Shared(items, threading.Semaphore(depth))
    thread = threading.Thread(target=_fill, args=(shared, on_start), name="trainer-data", daemon=True)
    thread.start()
    try:
        while (item := shared.ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            shared.slots.release()
            yield item[0]
    finally:
        shared.stop.set()
        shared.slots.release()
        if thread is not threading.current_thread():  # the garbage collector may run this in that thread
            thread.join(JOIN_SECONDS)


def _fill(shared: _Shared[T], on_start: Callable[[], None]) -> None:
    """Put items into the queue, then None or the error that ended them."""
    end: BaseException | None = None
    try:
        on_start()
        while shared.slots.acquire() and not shared.stop.is_set():
            shared.ready.put((next(shared.items),))
    except StopIteration:
        pass
    except BaseException as error:  # the consumer raises it
        end = error
    shared.ready.put(end)
