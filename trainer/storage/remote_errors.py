"""Turn errors of object stores and disks into one line that the user can act on."""

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
    """Return the fsspec file system of a path or URI, and the path in it; raise UserError if it cannot be opened."""
    import fsspec.core

    try:
        filesystem, path = fsspec.core.url_to_fs(uri)  # type: ignore[no-untyped-call]
    except Exception as error:  # each store has its own exceptions for a bad address
        raise store_error(error, uri, option) from error
    return filesystem, path


def store_error(error: BaseException, uri: str, option: str) -> UserError:
    """Return a UserError for what a store raised about `uri`, the value of an option."""
    if isinstance(error, UserError):
        return error
    kinds = {kind.__name__ for item in _chain(error) for kind in type(item).__mro__}
    words = " ".join(str(error).split())[:300]
    if kinds & set(_NO_CREDENTIALS) or "anonymous caller" in words.lower():
        return UserError(
            f"{option} {uri}: found no credentials for this store ({words}). Fix: on a cluster give the pod's service "
            f"account access, elsewhere log in with the cloud's command line"
        )
    if isinstance(error, PermissionError) or "Forbidden" in kinds:
        return UserError(f"{option} {uri}: access is denied ({words}). Fix: give this identity permission to read it")
    if isinstance(error, FileNotFoundError):
        return UserError(f"{option} {uri}: no such bucket, folder or file ({words})")
    if isinstance(error, ImportError | ValueError):
        return UserError(f"{option} {uri} cannot be opened: {words}")
    return UserError(f"{option} {uri} cannot be read: {type(error).__name__}: {words}")


def disk_error(error: OSError, target: object, option: str) -> UserError | None:
    """Return a UserError if the target is full, read-only or not writable by this user, else None."""
    if error.errno in _FULL:
        return UserError(
            f"{option} {target}: {_FULL[error.errno]}. Fix: free some space or choose another folder, and run the same "
            f"command again; finished files are kept"
        )
    path, folder = str(error.filename or ""), str(target)
    is_target = path and (path.startswith(folder) or folder.startswith(path))  # not the source
    if is_target and error.errno in _NOT_WRITABLE:
        return UserError(f"{option} {target} is not writable ({error.strerror}). Fix: choose another folder")
    return None


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed, as after an error of the network."""
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
    """Return the error and its causes."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
