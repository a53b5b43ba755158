"""What a person can mend, told in one line."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


class CliError(ValueError):
    """What is wrong, the value seen, what is legal, and the command that mends it; ends with exit code 2."""


class RefusedError(CliError):
    """What the API server answered instead of an object; `status` is the HTTP status, 0 where it did not answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def one_line(text: object, most: int = 300) -> str:
    """Any text on one line, cut off at `most` letters."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[: most - 3] + "..."
