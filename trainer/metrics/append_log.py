"""A log file whose write errors never end the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

#: Bytes kept in memory while the disk rejects them: days of a run's events.
_BUFFER_BYTES = 16 * 1024**2

_log = logging.getLogger("trainer.metrics")


class AppendLog:
    """A file that is only appended to, and that keeps in memory what a full disk or a lost server rejects.

    Kept bytes are written before later records, so that no record has a hole. The first failure is logged, and so is
    the write that succeeds after it. Opening the file may raise OSError; later calls never do.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._unwritten = bytearray()
        self._failed = False  # the last attempt
        self._dropped = 0

    def write(self, record: bytes) -> None:
        """Append one record after those kept; drop it if more than 16 MiB would be kept."""
        if len(self._unwritten) + len(record) > _BUFFER_BYTES:
            self._dropped += 1
        else:
            self._unwritten += record
        self._flush()

    def close(self) -> None:
        """Try to write the rest, log what is lost, and close the file."""
        self._flush()
        try:
            os.close(self._fd)  # a network file system may report only now that its server is full
        except OSError as error:
            _log.warning("%s may lack its last lines: %s", self._path, error.strerror)
        if self._unwritten:
            _log.warning(
                "%s lacks the last %d bytes, which could not be written%s",
                self._path,
                len(self._unwritten),
                self._describe_dropped(),
            )

    def _flush(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._fd, self._unwritten)]
        except OSError as error:
            if not self._failed:
                _log.warning(
                    "%s cannot be written: %s; training continues, and the lines are kept in memory for later",
                    self._path,
                    error.strerror,
                )
            self._failed = True
            return
        if self._failed:
            _log.warning("%s is written again, with the lines kept%s", self._path, self._describe_dropped())
        self._failed, self._dropped = False, 0

    def _describe_dropped(self) -> str:
        return f", and {self._dropped} records beyond {_BUFFER_BYTES} bytes are lost" if self._dropped else ""
