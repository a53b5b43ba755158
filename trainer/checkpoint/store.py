"""Where checkpoints live: one folder per step, complete once its marker exists, on a local path or any fsspec URI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from trainer.errors import UserError

MARKER = "COMPLETE.json"
_STEP = re.compile(r"step_(\d{10})$")


class CheckpointStore(Protocol):
    """What the checkpointer asks of a place. All but reader and writer are called by rank 0 only."""

    def complete_steps(self) -> list[int]:
        """Steps whose marker exists, ascending."""

    def location(self, step: int) -> str:
        """Path or URI of a step's folder, for people."""

    def writer(self, step: int) -> StorageWriter:
        """DCP's writer into a step's folder."""

    def reader(self, step: int) -> StorageReader:
        """DCP's reader of a step's folder."""

    def commit(self, step: int, marker: dict[str, Any]) -> None:
        """Make a step complete: the last write of a save."""

    def read_marker(self, step: int) -> dict[str, Any]:
        """What commit wrote."""

    def delete(self, step: int) -> None:
        """Remove a step, marker first, so that what is left of an interrupted removal is incomplete."""

    def incomplete_steps(self) -> list[int]:
        """Steps without a marker: what interrupted saves or removals left, ascending."""


class FsspecStore:
    """A folder of a local disk or an object store."""

    def __init__(self, uri: str) -> None:
        try:
            self._fs, self._root = url_to_fs(uri)  # type: ignore[no-untyped-call]
        except (ValueError, ImportError) as error:
            raise UserError(
                f"checkpoint.uri {uri}: {error}; legal: a folder, file://, s3://, gs://, abfs:// "
                f"or another protocol of fsspec"
            ) from None
        self._local = isinstance(self._fs, LocalFileSystem)
        self._uri = self._root if self._local else uri.rstrip("/")

    def complete_steps(self) -> list[int]:
        """See CheckpointStore."""
        return [step for step in self._steps() if self._fs.exists(f"{self._folder(step)}/{MARKER}")]

    def incomplete_steps(self) -> list[int]:
        """See CheckpointStore."""
        return sorted(set(self._steps()) - set(self.complete_steps()))

    def location(self, step: int) -> str:
        """See CheckpointStore."""
        return f"{self._uri}/step_{step:010d}"

    def writer(self, step: int) -> StorageWriter:
        """See CheckpointStore."""
        if self._local:
            return FileSystemWriter(self.location(step), overwrite=True)
        return FsspecWriter(self.location(step), overwrite=True)

    def reader(self, step: int) -> StorageReader:
        """See CheckpointStore."""
        if self._local:
            return FileSystemReader(self.location(step))
        return FsspecReader(self.location(step))

    def commit(self, step: int, marker: dict[str, Any]) -> None:
        """See CheckpointStore. A local marker is written aside and renamed, an object store's put is atomic."""
        path, text = f"{self._folder(step)}/{MARKER}", json.dumps(marker, indent=1)
        if self._local:
            aside = Path(path + ".part")
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
        else:
            self._fs.pipe_file(path, text.encode())

    def read_marker(self, step: int) -> dict[str, Any]:
        """See CheckpointStore."""
        path = f"{self._folder(step)}/{MARKER}"
        try:
            marker = json.loads(self._fs.cat_file(path))
        except ValueError:
            raise UserError(
                f"checkpoint {self.location(step)}: {MARKER} is not valid JSON; remove that folder to resume from "
                f"the checkpoint before it"
            ) from None
        if not isinstance(marker, dict):
            raise UserError(f"checkpoint {self.location(step)}: {MARKER} holds {type(marker).__name__}, not an object")
        return marker

    def delete(self, step: int) -> None:
        """See CheckpointStore."""
        marker = f"{self._folder(step)}/{MARKER}"
        if self._fs.exists(marker):
            self._fs.rm_file(marker)
        self._fs.rm(self._folder(step), recursive=True)

    def _folder(self, step: int) -> str:
        return f"{self._root}/step_{step:010d}"

    def _steps(self) -> list[int]:
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return []
        names = (entry.rstrip("/") for entry in self._fs.ls(self._root, detail=False))
        return sorted(int(match[1]) for match in map(_STEP.search, names) if match)


def join_uri(root: str, *parts: str) -> str:
    """`root/part/part` for paths and URIs."""
    return "/".join([root.rstrip("/") or "/", *parts])


def is_local(uri: str) -> bool:
    """Whether a path or URI names this machine's disk."""
    return fsspec.utils.get_protocol(uri) in ("file", "local")


def open_store(root: str, run: str) -> FsspecStore:
    """The store of a run under checkpoint.uri; raises UserError for a URI that fsspec cannot open."""
    return FsspecStore(join_uri(root, run, "checkpoints"))
