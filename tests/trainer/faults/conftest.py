"""Jobs of one to four processes for the tests of faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from machines import Machines


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    """Start jobs of a run in the test's folder."""
    from machines import Machines

    return Machines(tmp_path)
