"""Requests to the store of a checkpoint: retries, and the errors that they end with."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from trainer.storage.retry import RetriesExhaustedError, RetryPolicy

T = TypeVar("T")
# A retry cannot fix these.
_PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)
_PERMANENT_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_PERMANENT_NAMES = {"NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError", "RefreshError"}
_log = logging.getLogger("trainer.checkpoint")


class DamagedFileError(OSError):
    """A file of a checkpoint differs from what was written."""


class StoreUnavailableError(OSError):
    """All attempts of a request to a store failed; the checkpoint itself may be undamaged."""


def retry_request(what: str, request: Callable[[], T], policy: RetryPolicy) -> T:
    """Return the result of a request, retried as the policy says; `what` names it in the log.

    A permanent error (full disk, missing file, refused key) is raised unchanged. All others become a
    StoreUnavailableError: the exceptions of object store clients cannot be pickled, which sending them to rank 0 needs.
    """

    def log_retry(error: Exception, attempt: int, delay: float) -> None:
        _log.warning(
            "%s failed (%s); attempt %d of %d in %.1f s", what, _describe(error), attempt, policy.attempts, delay
        )

    try:
        return policy.run(request, _is_permanent, log_retry)
    except RetriesExhaustedError as exhausted:
        raise StoreUnavailableError(
            f"{what} failed {policy.attempts} times; last error: {_describe(exhausted.error)}"
        ) from None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _is_permanent(error: Exception) -> bool:
    return (
        isinstance(error, (*_PERMANENT, DamagedFileError))
        or (isinstance(error, OSError) and error.errno in _PERMANENT_ERRNO)
        or type(error).__name__ in _PERMANENT_NAMES
    )
