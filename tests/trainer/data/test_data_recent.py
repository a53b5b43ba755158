"""The few values that are kept in memory."""

from __future__ import annotations

from trainer.data.lru import Recent


def made_for(size: int, keys: str) -> str:
    """The keys whose values had to be made, in order, when `keys` are asked for."""
    made: list[str] = []
    recent: Recent[str, None] = Recent(made.append, size)
    for key in keys:
        recent[key]
    return "".join(made)


def test_a_value_is_made_once_while_it_is_kept() -> None:
    assert made_for(2, "aabab") == "ab"


def test_the_value_that_was_used_longest_ago_goes_first() -> None:
    assert made_for(2, "abacab") == "abcb"


def test_a_value_that_went_is_made_again() -> None:
    assert made_for(1, "aba") == "aba"
