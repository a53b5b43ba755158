"""Makes the packages under test importable however pytest is started, and keeps reports of failures readable."""

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(autouse=True)
def no_telemetry() -> None:
    """torch and TorchRec log every call with its arguments for collectors that we do not have: screens of text."""
    for name in list(logging.root.manager.loggerDict):
        if "NullHandler" in name:
            logging.getLogger(name).disabled = True
