"""What a person can mend, told in one line."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


class CliError(ValueError):
    """What is wrong, the value seen, what is legal, and the command that mends it; ends with exit code 2."""
