"""The file system that DCP (torch.distributed.checkpoint) uses for the files of one checkpoint."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.filesystem import FileSystemBase

from trainer.checkpoint.checksums import ChecksumWriter, FileChecksums, VerifiedReader, file_name
from trainer.checkpoint.direct import DirectFile
from trainer.checkpoint.requests import DamagedFileError
from trainer.storage.retry import RetryPolicy

_READ_BUFFER_BYTES = 1024**2


class CheckedFiles(FileSystemBase):
    """DCP's file system for one step, which checksums what is written and verifies what is read.

    `written` is filled as files are closed. Reads are compared with `expected`, by file name. `direct` writes local
    files past the page cache.
    """

    def __init__(
        self, fs: Any, retry: RetryPolicy, expected: Mapping[str, FileChecksums] | None = None, *, direct: bool = False
    ) -> None:
        self._fs = fs
        self._retry = retry
        self._expected = expected
        self._direct = direct and isinstance(fs, LocalFileSystem)
        self.written: dict[str, FileChecksums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file; see FileSystemBase."""
        path = os.fspath(path)
        if mode == "rb":
            yield io.BufferedReader(self._reader(path), _READ_BUFFER_BYTES)
            return
        stream = ChecksumWriter(DirectFile(path) if self._direct else self._fs.open(path, mode))
        try:
            yield stream
        except BaseException:
            stream.discard()
            raise
        stream.close()
        self.written[file_name(path)] = stream.checksums()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Join a folder and a name; see FileSystemBase."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file and its entry in `written`; see FileSystemBase."""
        self._fs.mv(os.fspath(path), os.fspath(new_path))
        self.written[file_name(os.fspath(new_path))] = self.written.pop(file_name(os.fspath(path)))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return the path as a string; see FileSystemBase."""
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create a folder with its parents; see FileSystemBase."""
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a string; DCP gets readers and writers from us, never a bare path."""
        return isinstance(checkpoint_id, str)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file exists; see FileSystemBase."""
        return bool(self._fs.exists(os.fspath(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file; see FileSystemBase."""
        self._fs.rm_file(os.fspath(path))

    def _reader(self, path: str) -> io.RawIOBase:
        assert self._expected is not None, "this file system is for writing: it has no expected checksums"
        expected = self._expected.get(file_name(path))
        if expected is None:
            raise DamagedFileError(f"{file_name(path)} is not in the list of the checkpoint's files")
        return VerifiedReader(self._fs, path, expected, self._retry)
