"""The error for mistakes that the user can fix."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user, described in one line; commands exit with code 2."""
