"""The files of one checkpoint as DCP sees them: summed up as they are written, verified as they are read, retried where
the store stumbles."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import google_crc32c
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.filesystem import FileSystemBase

from trainer.checkpoint.direct import DirectFile

T = TypeVar("T")
BLOCK_BYTES = 16 * 1024**2  # one checksum each: what a reader must fetch to trust a single value
_AT_ONCE = 4  # blocks fetched together from an object store, which serves ranges in parallel
_PIECE_BYTES = 256 * 1024  # stays in the cache between its copy and its checksum
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
# What another attempt cannot mend.
_PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)
_PERMANENT_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_PERMANENT_NAMES = {"NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError", "RefreshError"}
_log = logging.getLogger("trainer.checkpoint")
# A file system of fsspec is Any below: its methods have no types.


class DamagedFileError(OSError):
    """A file of a checkpoint is not what was written."""


class StoreUnavailableError(OSError):
    """A store did not answer properly in any attempt; the checkpoint itself may be whole."""


def retried(what: str, attempt: Callable[[], T], attempts: int, pause: Callable[[float], None] = time.sleep) -> T:
    """What `attempt` returns; up to `attempts` tries with pauses that double from 0.5 s to 30 s.

    Raises at once what another try cannot mend (a full disk, a missing file, a refused key), and StoreUnavailableError
    for the rest: clients of object stores have exceptions of their own, which do not survive being sent to rank 0.
    """
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except Exception as error:  # whatever a client of a store raises
            if _is_permanent(error):
                raise
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if number == attempts:
                raise StoreUnavailableError(f"{what} failed {attempts} times, lastly {text}") from None
            seconds = min(_FIRST_PAUSE_SECONDS * 2 ** (number - 1), _LONGEST_PAUSE_SECONDS)
            seconds *= random.uniform(0.75, 1.25)  # noqa: S311  # spreads out processes that were throttled together
            _log.warning("%s failed (%s); try %d of %d in %.1f s", what, text, number + 1, attempts, seconds)
            pause(seconds)
    raise AssertionError("attempts is at least 1")


def _is_permanent(error: Exception) -> bool:
    return (
        isinstance(error, (*_PERMANENT, DamagedFileError))
        or (isinstance(error, OSError) and error.errno in _PERMANENT_ERRNO)
        or type(error).__name__ in _PERMANENT_NAMES
    )


@dataclass(frozen=True)
class FileSum:
    """Bytes of a file and the CRC-32C of each block of 16 MiB."""

    size: int
    crcs: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """For a marker."""
        return {"bytes": self.size, "crc32c": "".join(f"{crc:08x}" for crc in self.crcs)}

    @classmethod
    def from_json(cls, fields: Any) -> FileSum:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` did not make."""
        text = fields["crc32c"]
        crcs = tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
        size = int(fields["bytes"])
        if len(crcs) != -(-size // BLOCK_BYTES):
            raise ValueError(f"{len(crcs)} checksums for {size} bytes")
        return cls(size, crcs)


class CheckedFiles(FileSystemBase):
    """DCP's file system for one step. `written` fills as files are closed; `expected` is what reads are held against,
    by name; `direct` writes local files past the page cache."""

    def __init__(
        self, fs: Any, attempts: int, expected: Mapping[str, FileSum] | None = None, *, direct: bool = False
    ) -> None:
        self._fs = fs
        self._attempts = attempts
        self._expected = expected
        self._direct = direct and isinstance(fs, LocalFileSystem)
        self.written: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """See FileSystemBase."""
        path = os.fspath(path)
        if mode == "rb":
            yield io.BufferedReader(self._reader(path), 1024**2)
            return
        stream = Summing(DirectFile(path) if self._direct else self._fs.open(path, mode))
        try:
            yield stream
        except BaseException:
            stream.discard()
            raise
        stream.close()
        self.written[_name(path)] = stream.sum()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """See FileSystemBase."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """See FileSystemBase."""
        self._fs.mv(os.fspath(path), os.fspath(new_path))
        self.written[_name(os.fspath(new_path))] = self.written.pop(_name(os.fspath(path)))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """See FileSystemBase."""
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """See FileSystemBase."""
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See FileSystemBase; DCP is given readers and writers, never a bare path."""
        return isinstance(checkpoint_id, str)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """See FileSystemBase."""
        return bool(self._fs.exists(os.fspath(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """See FileSystemBase."""
        self._fs.rm_file(os.fspath(path))

    def _reader(self, path: str) -> io.RawIOBase:
        assert self._expected is not None, "a store for writing is not read"
        expected = self._expected.get(_name(path))
        if expected is None:
            raise DamagedFileError(f"{_name(path)} is not in the list of the checkpoint's files")
        return Verified(self._fs, path, expected, self._attempts)


class Summing(io.RawIOBase):
    """Hands what is written on to `inner` and sums it up."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._in_pieces = isinstance(inner, DirectFile)  # an upload makes its parts of what it is given at once
        self._size, self._crc = 0, 0
        self._crcs: list[int] = []

    def write(self, data: Any) -> int:
        """All of `data`."""
        view = memoryview(data).cast("B")
        if not self._in_pieces:
            self._inner.write(view)
        done = 0
        while done < len(view):
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            piece = bytes(view[done : done + min(room, _PIECE_BYTES)])  # the checksum takes nothing but bytes
            if self._in_pieces:
                self._inner.write(piece)
            self._crc = google_crc32c.extend(self._crc, piece)
            self._size += len(piece)
            done += len(piece)
            if self._size % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0
        return len(view)

    def sum(self) -> FileSum:
        """Of all that was written."""
        rest = (self._crc,) if self._size % BLOCK_BYTES else ()
        return FileSum(self._size, (*self._crcs, *rest))

    def writable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def flush(self) -> None:
        """A local file's buffer; the flush of a multipart upload would end a part too early."""
        if not self.closed and isinstance(self._inner, io.IOBase) and _is_on_disk(self._inner):
            self._inner.flush()

    def fileno(self) -> int:
        """For fsync; raises io.UnsupportedOperation where there is no file."""
        return int(self._inner.fileno())

    def close(self) -> None:
        """Ends an upload, and raises what goes wrong in that."""
        if not self.closed:
            super().close()
            self._inner.close()

    def discard(self) -> None:
        """After an error: leave no upload open that bills for its parts, and never complete it."""
        if self.closed:
            return
        super().close()
        try:
            if isinstance(self._inner, DirectFile):
                self._inner.discard()
            elif hasattr(self._inner, "discard") and not _is_on_disk(self._inner):
                self._inner.discard()
                self._inner.closed = True  # or its finalizer would complete the upload
            else:
                self._inner.close()
        except Exception as error:  # the error that brought us here is the one to tell
            _log.warning("an upload that failed could not be discarded (%s)", type(error).__name__)


def _is_on_disk(stream: Any) -> bool:
    # Ours, open()'s, or fsspec's LocalFileOpener.
    return isinstance(stream, (DirectFile, io.BufferedWriter)) or hasattr(stream, "f")


class Verified(io.RawIOBase):
    """A file that fetches whole blocks and gives out only bytes whose checksum is right; raises DamagedFileError."""

    def __init__(self, fs: Any, path: str, expected: FileSum, attempts: int) -> None:
        self._fs, self._path, self._expected, self._attempts = fs, path, expected, attempts
        self._position = 0
        self._blocks: dict[int, bytes] = {}
        self._at_once = 1 if isinstance(fs, LocalFileSystem) else _AT_ONCE

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See io.IOBase."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._expected.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        view = memoryview(buffer).cast("B")
        count = min(len(view), self._expected.size - self._position)
        done = 0
        while done < count:
            number, start = divmod(self._position, BLOCK_BYTES)
            part = self._block(number)[start : start + count - done]
            view[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return max(done, 0)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            self._blocks = {}  # at most `_at_once` blocks in memory
            last = min(number + self._at_once, len(self._expected.crcs))
            spans = [(n * BLOCK_BYTES, min((n + 1) * BLOCK_BYTES, self._expected.size)) for n in range(number, last)]
            fetched = retried(f"reading {self._path}", lambda: self._fetch(spans), self._attempts)
            for n, data in zip(range(number, last), fetched, strict=True):
                self._check(n, data)
                self._blocks[n] = data
        return self._blocks[number]

    def _fetch(self, spans: list[tuple[int, int]]) -> list[bytes]:
        if len(spans) == 1:
            return [self._fs.cat_file(self._path, start=spans[0][0], end=spans[0][1])]
        starts, ends = zip(*spans, strict=True)
        found = self._fs.cat_ranges([self._path] * len(spans), list(starts), list(ends), on_error="raise")
        return cast("list[bytes]", found)

    def _check(self, number: int, data: bytes) -> None:
        found = google_crc32c.extend(0, data)
        if found != self._expected.crcs[number]:
            first = number * BLOCK_BYTES
            raise DamagedFileError(
                f"{_name(self._path)} is damaged between bytes {first:,} and "
                f"{min(first + BLOCK_BYTES, self._expected.size):,}: CRC-32C {found:08x}, "
                f"written as {self._expected.crcs[number]:08x}"
            )


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
