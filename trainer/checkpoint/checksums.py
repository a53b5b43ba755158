"""Checksums of a checkpoint's files: computed while a file is written, verified while it is read."""

from __future__ import annotations

import io
import logging
import os
from dataclasses import dataclass
from typing import Any, cast

import google_crc32c
from fsspec.implementations.local import LocalFileSystem

from trainer.checkpoint.direct import DirectFile
from trainer.checkpoint.requests import DamagedFileError, retry_request
from trainer.storage.retry import RetryPolicy

BLOCK_BYTES = 16 * 1024**2  # bytes per checksum, which a reader must fetch to verify a single value
_PARALLEL_BLOCKS = 4  # blocks fetched together from an object store, which serves ranges in parallel
_PIECE_BYTES = 256 * 1024  # stays in the CPU cache between its copy and its checksum
_log = logging.getLogger("trainer.checkpoint")
# File systems of fsspec are typed as Any: fsspec has no types.


@dataclass(frozen=True)
class FileChecksums:
    """Size of a file and the CRC-32C of each block of 16 MiB."""

    size: int
    crcs: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a marker stores."""
        return {"bytes": self.size, "crc32c": "".join(f"{crc:08x}" for crc in self.crcs)}

    @classmethod
    def from_json(cls, fields: Any) -> FileChecksums:
        """Parse the fields of a marker; raise ValueError, KeyError or TypeError if `to_json` did not write them."""
        text = fields["crc32c"]
        crcs = tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
        size = int(fields["bytes"])
        if len(crcs) != -(-size // BLOCK_BYTES):
            raise ValueError(f"{len(crcs)} checksums for {size} bytes")
        return cls(size, crcs)


class ChecksumWriter(io.RawIOBase):
    """A stream that writes to `inner` and computes the checksums of what passes through."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # Data goes to a DirectFile in small pieces, but to an upload in one call, which makes its parts from that.
        self._in_pieces = isinstance(inner, DirectFile)
        self._size, self._crc = 0, 0
        self._crcs: list[int] = []

    def write(self, data: Any) -> int:
        """Write all of `data` and return its size in bytes."""
        view = memoryview(data).cast("B")
        if not self._in_pieces:
            self._inner.write(view)
        done = 0
        while done < len(view):
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            piece = bytes(view[done : done + min(room, _PIECE_BYTES)])  # crc32c accepts only bytes
            if self._in_pieces:
                self._inner.write(piece)
            self._crc = google_crc32c.extend(self._crc, piece)
            self._size += len(piece)
            done += len(piece)
            if self._size % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0
        return len(view)

    def checksums(self) -> FileChecksums:
        """Return the checksums of everything written so far."""
        rest = (self._crc,) if self._size % BLOCK_BYTES else ()
        return FileChecksums(self._size, (*self._crcs, *rest))

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Flush a local file; the flush of a multipart upload would end a part too early."""
        if not self.closed and isinstance(self._inner, io.IOBase) and _is_on_disk(self._inner):
            self._inner.flush()

    def fileno(self) -> int:
        """Return the descriptor for fsync; raise io.UnsupportedOperation if there is none."""
        return int(self._inner.fileno())

    def close(self) -> None:
        """Complete the file or upload; raise the error if that fails."""
        if not self.closed:
            super().close()
            self._inner.close()

    def discard(self) -> None:
        """Abort after an error, so that an upload is never completed and no open part of it is billed."""
        if self.closed:
            return
        super().close()
        try:
            if isinstance(self._inner, DirectFile):
                self._inner.discard()
            elif hasattr(self._inner, "discard") and not _is_on_disk(self._inner):
                self._inner.discard()
                self._inner.closed = True  # otherwise its finalizer would complete the upload
            else:
                self._inner.close()
        except Exception as error:  # the caller reports the error that led to this call
            _log.warning("a failed upload could not be aborted (%s)", type(error).__name__)


def _is_on_disk(stream: Any) -> bool:
    # DirectFile, the result of open(), or fsspec's LocalFileOpener.
    return isinstance(stream, (DirectFile, io.BufferedWriter)) or hasattr(stream, "f")


class VerifiedReader(io.RawIOBase):
    """A file that is fetched in whole blocks and verified; raises DamagedFileError for a wrong checksum."""

    def __init__(self, fs: Any, path: str, expected: FileChecksums, retry: RetryPolicy) -> None:
        self._fs, self._path, self._expected, self._retry = fs, path, expected, retry
        self._position = 0
        self._blocks: dict[int, bytes] = {}
        self._parallel_blocks = 1 if isinstance(fs, LocalFileSystem) else _PARALLEL_BLOCKS

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position; see io.IOBase."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._expected.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the file has bytes; see io.RawIOBase."""
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
            self._blocks = {}  # keeps at most `_parallel_blocks` blocks in memory
            last = min(number + self._parallel_blocks, len(self._expected.crcs))
            spans = [(n * BLOCK_BYTES, min((n + 1) * BLOCK_BYTES, self._expected.size)) for n in range(number, last)]
            fetched = retry_request(f"reading {self._path}", lambda: self._fetch(spans), self._retry)
            for n, data in zip(range(number, last), fetched, strict=True):
                self._verify(n, data)
                self._blocks[n] = data
        return self._blocks[number]

    def _fetch(self, spans: list[tuple[int, int]]) -> list[bytes]:
        if len(spans) == 1:
            return [self._fs.cat_file(self._path, start=spans[0][0], end=spans[0][1])]
        starts, ends = zip(*spans, strict=True)
        found = self._fs.cat_ranges([self._path] * len(spans), list(starts), list(ends), on_error="raise")
        return cast("list[bytes]", found)

    def _verify(self, number: int, data: bytes) -> None:
        found = google_crc32c.extend(0, data)
        if found != self._expected.crcs[number]:
            first = number * BLOCK_BYTES
            raise DamagedFileError(
                f"{file_name(self._path)} is damaged between bytes {first:,} and "
                f"{min(first + BLOCK_BYTES, self._expected.size):,}: got CRC-32C {found:08x}; "
                f"expected: {self._expected.crcs[number]:08x}"
            )


def file_name(path: str) -> str:
    """Return the last part of a path or URI."""
    return path.rstrip("/").rsplit("/", 1)[-1]
