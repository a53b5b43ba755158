"""Makes the packages under test importable however pytest is started."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# TorchRec logs every call of its planner with all arguments at INFO: screens of text in the report of a failed test.
logging.getLogger("MethodLogger-NullHandler").setLevel(logging.WARNING)
