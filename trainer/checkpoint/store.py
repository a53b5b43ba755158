"""Checkpoint stores: one folder per step, complete once its marker exists, on a local path or any fsspec URI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.storage import StorageReader

from trainer.checkpoint.checksums import FileChecksums
from trainer.checkpoint.files import CheckedFiles
from trainer.checkpoint.requests import retry_request
from trainer.checkpoint.step_io import StepReader, StepWriter
from trainer.config import CheckpointConfig
from trainer.config.run_paths import checkpoints_uri
from trainer.errors import UserError
from trainer.storage import retry
from trainer.storage.atomic_write import write_text

T = TypeVar("T")
MARKER = "COMPLETE.json"
_STEP = re.compile(r"step_(\d{10})$")


class DamagedCheckpointError(UserError):
    """A checkpoint is marked complete but cannot be read; an older one may be undamaged."""


class CheckpointStore(Protocol):
    """A place for the checkpoints of one run. Only rank 0 calls it, except for `reader` and `writer`."""

    def complete_steps(self) -> list[int]:
        """Return the steps whose marker exists, ascending."""

    def location(self, step: int) -> str:
        """Return the path or URI of a step's folder, for messages."""

    def begin(self, step: int) -> None:
        """Remove the step's old files before it is written, so that no old marker covers new files."""

    def writer(self, step: int) -> StepWriter:
        """Return DCP's writer for a step's folder."""

    def reader(self, step: int, marker: Mapping[str, Any] | None = None) -> StorageReader:
        """Return DCP's reader of a step's folder.

        It verifies the checksums of the marker, which is read from the store if it is not given.
        """

    def commit(self, step: int, marker: Mapping[str, Any]) -> None:
        """Mark a step complete with the last write of a save."""

    def read_marker(self, step: int) -> dict[str, Any]:
        """Return the marker that `commit` wrote."""

    def delete(self, step: int) -> None:
        """Remove a step, marker first, so that an interrupted removal leaves an incomplete step."""

    def incomplete_steps(self) -> list[int]:
        """Return the steps without a marker, ascending: the rest of interrupted saves and removals."""


class FsspecStore:
    """A folder on a local disk or in an object store."""

    def __init__(self, uri: str, attempts: int = 1, timeout_seconds: int = 60, *, direct: bool = True) -> None:
        limits = _CLIENT_OPTIONS.get(fsspec.utils.get_protocol(uri))
        self._fs: Any
        try:
            self._fs, self._root = url_to_fs(uri, **(limits(timeout_seconds) if limits else {}))  # type: ignore[no-untyped-call]
        except (ValueError, ImportError) as error:
            raise UserError(
                f"checkpoint.uri cannot be opened ({error}): got {uri}; allowed: a folder, file://, s3://, gs://, "
                f"abfs:// or another protocol of fsspec"
            ) from None
        self._local = isinstance(self._fs, LocalFileSystem)
        self._retry = replace(retry.STORE_RETRY, attempts=1 if self._local else attempts)
        self._direct = direct
        self._uri = self._root if self._local else uri.rstrip("/")

    def complete_steps(self) -> list[int]:
        """List the complete steps; see CheckpointStore."""
        return [step for step in self._steps() if self._exists(f"{self._folder(step)}/{MARKER}")]

    def incomplete_steps(self) -> list[int]:
        """List the incomplete steps; see CheckpointStore."""
        return sorted(set(self._steps()) - set(self.complete_steps()))

    def location(self, step: int) -> str:
        """Return the path or URI of a step; see CheckpointStore."""
        return f"{self._uri}/step_{step:010d}"

    def begin(self, step: int) -> None:
        """Remove the old files of a step; see CheckpointStore."""
        if step in self._steps():
            self.delete(step)

    def writer(self, step: int) -> StepWriter:
        """Return the writer of a step; see CheckpointStore."""
        files = CheckedFiles(self._fs, self._retry, direct=self._direct)
        return StepWriter(self._folder(step), files, self._local, self._retry)

    def reader(self, step: int, marker: Mapping[str, Any] | None = None) -> StorageReader:
        """Return the reader of a step; raise DamagedCheckpointError if the marker has no valid checksums."""
        marker = self.read_marker(step) if marker is None else marker
        try:
            expected = {name: FileChecksums.from_json(fields) for name, fields in marker["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"checkpoint {self.location(step)}: {MARKER} has no readable checksums "
                f"({type(error).__name__}: {error})"
            ) from None
        return StepReader(self._folder(step), CheckedFiles(self._fs, self._retry, expected))

    def commit(self, step: int, marker: Mapping[str, Any]) -> None:
        """Write the marker atomically, which an object store's put does by itself; see CheckpointStore."""
        path, text = f"{self._folder(step)}/{MARKER}", json.dumps(marker, indent=1)
        if self._local:
            write_text(Path(path), text)
        else:
            self._request(f"writing {path}", lambda: self._fs.pipe_file(path, text.encode()))

    def read_marker(self, step: int) -> dict[str, Any]:
        """Return the marker of a step; raise DamagedCheckpointError if `commit` did not write it."""
        path = f"{self._folder(step)}/{MARKER}"
        try:
            marker = json.loads(self._request(f"reading {path}", lambda: self._fs.cat_file(path)))
        except ValueError:
            problem = "is not valid JSON"
        else:
            if isinstance(marker, dict) and "format" in marker:
                return marker
            problem = "has no format" if isinstance(marker, dict) else f"is a {type(marker).__name__}, not an object"
        raise DamagedCheckpointError(f"checkpoint {self.location(step)}: {MARKER} {problem}")

    def delete(self, step: int) -> None:
        """Remove a step; see CheckpointStore."""
        marker = f"{self._folder(step)}/{MARKER}"
        if self._exists(marker):
            self._request(f"removing {marker}", lambda: self._fs.rm_file(marker))
        self._request(f"removing {self.location(step)}", lambda: self._remove(self._folder(step)))

    def _remove(self, folder: str) -> None:
        try:
            self._fs.rm(folder, recursive=True)
        except FileNotFoundError:  # an earlier attempt removed everything, and only its response was lost
            return

    def _exists(self, path: str) -> bool:
        return bool(self._request(f"looking for {path}", lambda: self._fs.exists(path)))

    def _folder(self, step: int) -> str:
        return f"{self._root}/step_{step:010d}"

    def _steps(self) -> list[int]:
        self._fs.invalidate_cache()
        names = self._request(f"listing {self._uri}", self._names)
        return sorted(int(match[1]) for match in map(_STEP.search, names) if match)

    def _names(self) -> list[str]:
        try:
            found = self._fs.ls(self._root, detail=False, refresh=True) if not self._local else self._fs.ls(self._root)
        except FileNotFoundError:
            return []
        return [(entry if isinstance(entry, str) else entry["name"]).rstrip("/") for entry in found]

    def _request(self, what: str, request: Callable[[], T]) -> T:
        return retry_request(what, request, self._retry)


def _s3_options(seconds: int) -> dict[str, Any]:
    # s3fs attempts each request five times; retries of botocore below it would multiply that to 25.
    limits = {"connect_timeout": min(seconds, 10), "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
    return {"config_kwargs": limits}


# Limits of one request, after which it is retried; without them an unresponsive server blocks a save for minutes.
_CLIENT_OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "s3": _s3_options,
    "gs": lambda seconds: {"requests_timeout": seconds},
    "abfs": lambda seconds: {"connection_timeout": min(seconds, 10), "read_timeout": seconds},
}
_CLIENT_OPTIONS |= {"s3a": _CLIENT_OPTIONS["s3"], "gcs": _CLIENT_OPTIONS["gs"]}
_CLIENT_OPTIONS |= {"az": _CLIENT_OPTIONS["abfs"], "abfss": _CLIENT_OPTIONS["abfs"]}


def is_local(uri: str) -> bool:
    """Return whether a path or URI is on this machine's disk."""
    return fsspec.utils.get_protocol(uri) in ("file", "local")


def open_store(root: str, run: str, config: CheckpointConfig | None = None) -> FsspecStore:
    """Return the store of a run under checkpoint.uri; raise UserError for a URI that fsspec cannot open."""
    config = config or CheckpointConfig()
    limits = (config.attempts, config.request_timeout_seconds)
    return FsspecStore(checkpoints_uri(root, run), *limits, direct=config.direct_io)
