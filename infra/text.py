"""Text for a terminal."""

from __future__ import annotations


def one_line(text: object, max_length: int = 300) -> str:
    """Return a text on one line, cut to `max_length` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= max_length else line[: max_length - 3] + "..."
