"""How an exception of a cloud's client becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def explained(explain: Callable[[Exception], Exception]) -> Iterator[None]:
    """Raise what `explain` returns for an exception, which may be the exception itself; also works as a decorator."""
    try:
        yield
    except Exception as error:
        raise explain(error) from None
