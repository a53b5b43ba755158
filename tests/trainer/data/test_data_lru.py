"""The cache of the most recently used values."""

from __future__ import annotations

from trainer.data.lru import LruCache


def computed_keys(size: int, keys: str) -> str:
    """Look up `keys` and return those whose values were computed, in order."""
    computed: list[str] = []
    cache: LruCache[str, None] = LruCache(computed.append, size)
    for key in keys:
        cache[key]
    return "".join(computed)


def test_a_cached_value_is_computed_once() -> None:
    assert computed_keys(2, "aabab") == "ab"


def test_the_least_recently_used_value_is_evicted_first() -> None:
    assert computed_keys(2, "abacab") == "abcb"


def test_an_evicted_value_is_computed_again() -> None:
    assert computed_keys(1, "aba") == "aba"
