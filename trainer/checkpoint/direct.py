"""Local files written past the page cache: a checkpoint is read again only after a failure, and its pages would cost
the step more than the disk does."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from typing import Any

_BUFFER_BYTES = 4 * 1024**2  # of each file that is open: a disk's requests are smaller, and it stays in a core's cache
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux; elsewhere files are written as usual


class DirectFile(io.RawIOBase):
    """A new file at `path`, written by O_DIRECT in whole, aligned buffers of 4 MiB, and the rest of it as usual.

    File systems that do not offer O_DIRECT (tmpfs, some network and FUSE ones) are written through the page cache.
    Bytes leave the buffer as it fills, by `fileno` and by `close`; not by `flush`, which torch.save calls after every
    tensor. Raises OSError as open and write do.
    """

    def __init__(self, path: str) -> None:
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page, as O_DIRECT demands
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._used = 0
        self._direct = bool(_O_DIRECT) and self._set_direct(on=True)

    def write(self, data: Any) -> int:
        """All of `data`."""
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
        """Always."""
        return True

    def fileno(self) -> int:
        """For fsync: everything that was written is the kernel's by then."""
        self._drain()
        return self._fd

    def close(self) -> None:
        """Hands the rest to the kernel; raises what goes wrong in that, and gives the file back all the same."""
        if self.closed:
            return
        try:
            self._drain()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file without the bytes that are still in the buffer."""
        if not self.closed:
            super().close()
            os.close(self._fd)

    def _drain(self) -> None:
        if self._direct and 0 < self._used < _BUFFER_BYTES:
            self._direct = not self._set_direct(on=False)  # the end of a file is not aligned
        with memoryview(self._buffer)[: self._used] as rest:
            done = 0
            while done < len(rest):
                done += self._put(rest[done:])
        self._used = 0

    def _put(self, piece: memoryview) -> int:
        try:
            return os.write(self._fd, piece)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        # A file system that takes the flag and refuses the write, or a write before this one that was cut short.
        self._direct = not self._set_direct(on=False)
        return os.write(self._fd, piece)

    def _set_direct(self, *, on: bool) -> bool:
        """Whether the file system took the change."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True
