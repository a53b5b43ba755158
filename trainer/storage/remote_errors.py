"""What the file systems behind fsspec raise, told as one line that a person can act on."""

from __future__ import annotations

import errno
from typing import Any

from trainer.errors import UserError

_NO_CREDENTIALS = (
    "NoCredentialsError",  # botocore
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",  # google.auth
    "RefreshError",
    "ClientAuthenticationError",  # azure.core
    "CredentialUnavailableError",
)
_TRANSIENT_CODES = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "503", "500"}
_NETWORK_LIBRARIES = {"aiohttp", "botocore", "aiobotocore", "gcsfs", "azure", "requests"}
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}


def open_store(uri: str, option: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URI and the path in it; raises UserError for a scheme that is none."""
    import fsspec.core

    try:
        filesystem, path = fsspec.core.url_to_fs(uri)  # type: ignore[no-untyped-call]
    except Exception as error:  # each store has its own exceptions for an address it cannot read
        raise explained(error, uri, option) from error
    return filesystem, path


def explained(error: BaseException, uri: str, option: str) -> UserError:
    """A UserError for what a store raised about `uri`, which the option gave."""
    if isinstance(error, UserError):
        return error
    kinds = {kind.__name__ for item in _chain(error) for kind in type(item).__mro__}
    words = " ".join(str(error).split())[:300]
    if kinds & set(_NO_CREDENTIALS) or "anonymous caller" in words.lower():
        return UserError(
            f"{option} is {uri}: no credentials for this store were found ({words}); on a cluster the pod's service "
            f"account must have access, elsewhere log in with the cloud's command line"
        )
    if isinstance(error, PermissionError) or "Forbidden" in kinds:
        return UserError(f"{option} is {uri}: access is denied ({words}); give this identity the right to read it")
    if isinstance(error, FileNotFoundError):
        return UserError(f"{option} is {uri}: there is no such bucket, folder or file ({words})")
    if isinstance(error, ImportError | ValueError):
        return UserError(f"{option} is {uri}, which cannot be opened: {words}")
    return UserError(f"{option} is {uri}, which cannot be read: {type(error).__name__}: {words}")


def disk_error(error: OSError, where: object, option: str) -> UserError | None:
    """A UserError for a target that cannot be written (full, read-only, not ours), else None."""
    if error.errno in _FULL:
        return UserError(
            f"{option} is {where}: {_FULL[error.errno]}; free some space or name another folder, and run the same "
            f"command again: what is finished stays"
        )
    path, asked = str(error.filename or ""), str(where)
    there = path and (path.startswith(asked) or asked.startswith(path))  # and not in the source
    if there and error.errno in _NOT_WRITABLE:
        return UserError(f"{option} is {where}: it cannot be written ({error.strerror}); name a folder that can")
    return None


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed: the network's and the store's passing faults."""
    for item in _chain(error):
        if isinstance(item, FileNotFoundError | PermissionError | UserError | ImportError):
            return False
        if isinstance(item, OSError) and (item.errno in _FULL or item.errno == errno.EROFS):
            return False
        if {kind.__name__ for kind in type(item).__mro__} & set(_NO_CREDENTIALS):
            return False
    return any(
        isinstance(item, OSError | TimeoutError | EOFError)
        or type(item).__module__.partition(".")[0] in _NETWORK_LIBRARIES
        or str(getattr(item, "code", "")) in _TRANSIENT_CODES
        for item in _chain(error)
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what it was raised from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
