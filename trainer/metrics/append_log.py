"""A log file that never ends the run that writes it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

#: Bytes kept in memory while the disk refuses them: days of a run's events.
_KEPT_BYTES = 16 * 1024**2

_log = logging.getLogger("trainer.metrics")


class AppendLog:
    """A file that is only appended to. What a full disk or a lost server refuses stays in memory and goes before what
    comes next, so that no record has a hole; it is told once, and again when all of it is written.

    Raises OSError where the file cannot be opened, and never after that.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._waiting = bytearray()
        self._refused = False  # the last attempt
        self._dropped = 0

    def write(self, record: bytes) -> None:
        """Append one record, with those that wait; whole ones are dropped beyond 16 MiB of them."""
        if len(self._waiting) + len(record) > _KEPT_BYTES:
            self._dropped += 1
        else:
            self._waiting += record
        self._write_waiting()

    def close(self) -> None:
        """Try a last time, and tell what is lost."""
        self._write_waiting()
        try:
            os.close(self._fd)  # a network file system may find only now that its server is full
        except OSError as error:
            _log.warning("%s may lack its last lines: %s", self._path, error.strerror)
        if self._waiting:
            _log.warning(
                "%s lacks the last %d bytes, which could not be written%s",
                self._path,
                len(self._waiting),
                self._beyond(),
            )

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting)]
        except OSError as error:
            if not self._refused:
                _log.warning(
                    "%s cannot be written: %s; training goes on, and the lines are kept until there is room",
                    self._path,
                    error.strerror,
                )
            self._refused = True
            return
        if self._refused:
            _log.warning("%s is written again, with all that was kept%s", self._path, self._beyond())
        self._refused, self._dropped = False, 0

    def _beyond(self) -> str:
        return f", and {self._dropped} records beyond {_KEPT_BYTES} bytes are lost" if self._dropped else ""
