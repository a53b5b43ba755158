"""One zygote for all tests of faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from machines import Machines, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    from machines import Zygote

    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def machines(zygote: Zygote, tmp_path: Path) -> Machines:
    from machines import Machines

    return Machines(zygote, tmp_path)
