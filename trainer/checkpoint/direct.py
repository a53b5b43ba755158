"""Write local files past the page cache.

A checkpoint is read only after a failure, and caching its pages would slow down training more than the disk does.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from typing import Any

_BUFFER_BYTES = 4 * 1024**2  # per open file; larger than a disk's requests, small enough for a core's cache
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux; elsewhere files are written as usual


class DirectFile(io.RawIOBase):
    """A new file, written with O_DIRECT in aligned buffers of 4 MiB; its end is written through the page cache.

    File systems without O_DIRECT (tmpfs, some network and FUSE ones) are written through the page cache entirely. The
    buffer is written when it is full, by `fileno` and by `close`, but not by `flush`, which torch.save calls after
    every tensor. Raises OSError as open and write do.
    """

    def __init__(self, path: str) -> None:
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # starts at a page boundary, which O_DIRECT requires
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._used = 0
        self._direct = bool(_O_DIRECT) and self._set_direct(on=True)

    def write(self, data: Any) -> int:
        """Write all of `data` and return its size in bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = min(_BUFFER_BYTES - self._used, len(view) - done)
            self._buffer[self._used : self._used + count] = view[done : done + count]
            self._used += count
            done += count
            if self._used == _BUFFER_BYTES:
                self._drain()
        return len(view)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Pass all written bytes to the kernel and return the descriptor, for fsync."""
        self._drain()
        return self._fd

    def close(self) -> None:
        """Pass the remaining bytes to the kernel and close the file, also if that raises an error."""
        if self.closed:
            return
        try:
            self._drain()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file without writing the bytes that are still in the buffer."""
        if not self.closed:
            super().close()
            os.close(self._fd)

    def _drain(self) -> None:
        if self._direct and 0 < self._used < _BUFFER_BYTES:
            self._direct = not self._set_direct(on=False)  # the end of a file is not aligned
        with memoryview(self._buffer)[: self._used] as rest:
            done = 0
            while done < len(rest):
                done += self._write(rest[done:])
        self._used = 0

    def _write(self, piece: memoryview) -> int:
        try:
            return os.write(self._fd, piece)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        # The file system accepts the flag but refuses the write, or an earlier short write lost the alignment.
        self._direct = not self._set_direct(on=False)
        return os.write(self._fd, piece)

    def _set_direct(self, *, on: bool) -> bool:
        """Switch O_DIRECT and return whether the file system accepted that."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True
