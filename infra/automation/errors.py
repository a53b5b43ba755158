"""Errors of an operation; each message is a few lines and ends with the command to run next."""

from __future__ import annotations

from infra.exit_codes import INTERRUPTED, USER_ERROR


class OperationError(Exception):
    """An operation that did not start (`exit_code` 2: fix the input) or did not finish (1: run it again)."""

    def __init__(self, message: str, exit_code: int = USER_ERROR) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class CancelledError(OperationError):
    """An operation that the user stopped; the state holds what it had done until then."""

    def __init__(self, message: str) -> None:
        super().__init__(message, INTERRUPTED)
