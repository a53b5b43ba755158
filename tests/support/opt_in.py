"""Select folders of slow tests, which run only if the command line names them."""

from __future__ import annotations

from pathlib import Path

import pytest


def is_requested(config: pytest.Config, folder: Path) -> bool:
    """Return whether the command line names `folder` or something in it."""
    named = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return any(path == folder or folder in path.parents for path in named)
