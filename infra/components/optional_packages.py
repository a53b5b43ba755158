"""The optional packages: clients of training services, which the providers of Pulumi do not need."""

from __future__ import annotations

from importlib.util import find_spec

INSTALL = "`make install-managed` installs it"


def installed(module: str) -> bool:
    """Whether a module is there, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
