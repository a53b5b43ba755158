"""The few most recently used values of an expensive function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps the `size` last used results of `make`; unlike functools.lru_cache it lives and dies with its owner."""

    def __init__(self, make: Callable[[K], V], size: int) -> None:
        self._make, self._size = make, size
        self._values: OrderedDict[K, V] = OrderedDict()

    def __getitem__(self, key: K) -> V:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        while len(self._values) >= self._size:  # before making the new value: memory never holds one more
            self._values.popitem(last=False)
        value = self._values[key] = self._make(key)
        return value
