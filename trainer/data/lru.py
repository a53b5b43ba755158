"""A cache of the most recently used results of a function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """The `size` last used results of `compute`. Unlike functools.lru_cache it is freed with its owner."""

    def __init__(self, compute: Callable[[K], V], size: int) -> None:
        self._compute, self._size = compute, size
        self._values: OrderedDict[K, V] = OrderedDict()

    def __getitem__(self, key: K) -> V:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        while len(self._values) >= self._size:  # evict first, so that memory never holds one value more
            self._values.popitem(last=False)
        value = self._values[key] = self._compute(key)
        return value
