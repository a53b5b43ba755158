"""Write local files that appear complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` if the block succeeds."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):  # the error of the block counts
            part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically and durably."""
    with atomic_replace(path) as part, part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())  # after a power loss the file system may otherwise keep the name and not the text


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically and durably."""
    write_text(path, json.dumps(value, indent=2) + "\n")
