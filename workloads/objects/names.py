"""Names of objects: a run's own name, and where the specification cannot be changed a hash of it behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]


def digest(value: object) -> str:
    """Eight hexadecimal digits of any JSON value's SHA-256, the same for the same value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def hashed(base: str, content: Mapping[str, Any]) -> str:
    """`<base>-<hash of content>`: another content makes another object, which replaces the first."""
    return f"{base}-{digest(content)}"
