"""The names that an EKS cluster of a stack can have, which its leftovers carry as well."""

from __future__ import annotations

import re

#: How many digits of its key's id end a cluster's name.
_NUM_DIGITS = 7
#: EKS allows 100 characters.
_MAX_BASE_NAME = 100 - len("-") - _NUM_DIGITS


def base_name(project: str, stack: str) -> str:
    """Return the part of the cluster's name that all clusters of the stack share."""
    return re.sub(r"[^A-Za-z0-9-]", "-", f"{project}-{stack}")[:_MAX_BASE_NAME]


def with_key(base: str, key_id: str) -> str:
    """Return the name of the cluster that this key encrypts."""
    return f"{base}-{key_id[:_NUM_DIGITS]}"


def is_cluster(base: str, name: str) -> bool:
    """Return whether the stack's cluster can have this name; another stack's name may begin with this one's.

    Clusters of earlier versions of this program have no suffix.
    """
    return re.fullmatch(rf"{re.escape(base)}(-[0-9a-f]{{{_NUM_DIGITS}}})?", name) is not None


def filter_values(base: str) -> list[str]:
    """Return the possible names as EC2's filters match them, which is less exact than `is_cluster`."""
    return [base, f"{base}-{'?' * _NUM_DIGITS}"]
