"""Optional Python packages: the clients of training services, which Pulumi's own providers do not need."""

from __future__ import annotations

from importlib.util import find_spec

INSTALL = "make install-managed"


def installed(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
