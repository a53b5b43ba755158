"""Where checkpoints live: one folder per step, complete once its marker exists, on a local path or any fsspec URI."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, Protocol, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _write_files_from_queue
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from trainer.checkpoint.files import CheckedFiles, FileSum, retried
from trainer.config import CheckpointConfig
from trainer.errors import UserError

T = TypeVar("T")


class DamagedCheckpointError(UserError):
    """A checkpoint that says it is complete and cannot be read; the one before it may be whole."""


MARKER = "COMPLETE.json"
_STEP = re.compile(r"step_(\d{10})$")
_UPLOADS = 4  # files per process that go to an object store side by side, each by a multipart upload of its own


class CheckpointStore(Protocol):
    """What the checkpointer asks of a place. All but reader and writer are called by rank 0 only."""

    def complete_steps(self) -> list[int]:
        """Steps whose marker exists, ascending."""

    def location(self, step: int) -> str:
        """Path or URI of a step's folder, for people."""

    def begin(self, step: int) -> None:
        """Before a step is written: remove what is there, so that no old marker vouches for new files."""

    def writer(self, step: int) -> StepWriter:
        """DCP's writer into a step's folder."""

    def reader(self, step: int, marker: Mapping[str, Any] | None = None) -> StorageReader:
        """DCP's reader of a step's folder, verifying against the checksums of its marker (read here where not
        given)."""

    def commit(self, step: int, marker: Mapping[str, Any]) -> None:
        """Make a step complete: the last write of a save."""

    def read_marker(self, step: int) -> dict[str, Any]:
        """What commit wrote."""

    def delete(self, step: int) -> None:
        """Remove a step, marker first, so that what is left of an interrupted removal is incomplete."""

    def incomplete_steps(self) -> list[int]:
        """Steps without a marker: what interrupted saves or removals left, ascending."""


class StepWriter(FileSystemWriter):
    """DCP's writer of one step: every file summed up, every failed attempt of this process's share made again."""

    def __init__(self, folder: str, files: CheckedFiles, local: bool, attempts: int) -> None:
        super().__init__(folder, sync_files=local, thread_count=1 if local else _UPLOADS)
        self.fs = files  # type: ignore[assignment]  # the base class wants any FileSystemBase, and says FileSystem
        self.path = folder
        self._folder, self._files, self._attempts = folder, files, attempts

    @property
    def written(self) -> dict[str, FileSum]:
        """Checksums of the files that this process wrote."""
        return self._files.written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        prepare = super().prepare_local_plan
        return retried(f"making {self._folder}", lambda: prepare(plan), self._attempts)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter."""
        return retried(f"writing to {self._folder}", lambda: self._write_once(plan, planner), self._attempts)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See StorageWriter."""
        finish = super().finish
        retried(f"writing {self._folder}/.metadata", lambda: finish(metadata, results), self._attempts)

    def _write_once(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with_crc = get_crc32_options()
        set_crc32_options(False)  # of torch.save's archives: slower than ours, and no reader of torch looks at it
        try:
            written = super().write_data(plan, planner)
        finally:
            set_crc32_options(with_crc)
        assert len(written.wait()) == len(plan.items), "a tensor was not written, and nobody said why"
        return written

    def _write_data(self, planner: SavePlanner, file_queue: Queue[Any]) -> Future[list[WriteResult]]:
        """The base class's own, but for threads whose errors are raised here: it drops all but the first's."""
        results: Queue[list[WriteResult]] = Queue()
        settings = (self.transforms, self.per_thread_copy_ahead, self.sync_files, self.thread_count)
        order = (self.fs.create_stream, file_queue, results, planner, *settings, self.serialization_format)
        with ThreadPoolExecutor(self.thread_count, "checkpoint-upload") as pool:
            for thread in [pool.submit(_write_files_from_queue, *order) for _ in range(self.thread_count)]:
                thread.result()
        written: Future[list[WriteResult]] = Future()
        written.set_result([result for part in iter_queue(results) for result in part])
        return written


def iter_queue(queue: Queue[T]) -> Iterator[T]:
    """What is in a queue that nobody fills any more."""
    while not queue.empty():
        yield queue.get()


class StepReader(FileSystemReader):
    """DCP's reader of one step, through verifying files."""

    def __init__(self, folder: str, files: CheckedFiles) -> None:
        super().__init__(folder)
        self.fs = files  # type: ignore[assignment]  # see StepWriter
        self.path = folder


class FsspecStore:
    """A folder of a local disk or an object store."""

    def __init__(self, uri: str, attempts: int = 1, timeout_seconds: int = 60, *, direct: bool = True) -> None:
        limits = _CLIENT_OPTIONS.get(fsspec.utils.get_protocol(uri))
        self._fs: Any
        try:
            self._fs, self._root = url_to_fs(uri, **(limits(timeout_seconds) if limits else {}))  # type: ignore[no-untyped-call]
        except (ValueError, ImportError) as error:
            raise UserError(
                f"checkpoint.uri {uri}: {error}; legal: a folder, file://, s3://, gs://, abfs:// "
                f"or another protocol of fsspec"
            ) from None
        self._local = isinstance(self._fs, LocalFileSystem)
        self._attempts = 1 if self._local else attempts
        self._direct = direct
        self._uri = self._root if self._local else uri.rstrip("/")

    def complete_steps(self) -> list[int]:
        """See CheckpointStore."""
        return [step for step in self._steps() if self._exists(f"{self._folder(step)}/{MARKER}")]

    def incomplete_steps(self) -> list[int]:
        """See CheckpointStore."""
        return sorted(set(self._steps()) - set(self.complete_steps()))

    def location(self, step: int) -> str:
        """See CheckpointStore."""
        return f"{self._uri}/step_{step:010d}"

    def begin(self, step: int) -> None:
        """See CheckpointStore."""
        if step in self._steps():
            self.delete(step)

    def writer(self, step: int) -> StepWriter:
        """See CheckpointStore."""
        files = CheckedFiles(self._fs, self._attempts, direct=self._direct)
        return StepWriter(self._folder(step), files, self._local, self._attempts)

    def reader(self, step: int, marker: Mapping[str, Any] | None = None) -> StorageReader:
        """See CheckpointStore; raises DamagedCheckpointError for a marker without proper checksums."""
        marker = self.read_marker(step) if marker is None else marker
        try:
            expected = {name: FileSum.from_json(fields) for name, fields in marker["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"checkpoint {self.location(step)}: {MARKER} has no readable checksums "
                f"({type(error).__name__}: {error})"
            ) from None
        return StepReader(self._folder(step), CheckedFiles(self._fs, self._attempts, expected))

    def commit(self, step: int, marker: Mapping[str, Any]) -> None:
        """See CheckpointStore. A local marker is written aside and renamed, an object store's put is atomic."""
        path, text = f"{self._folder(step)}/{MARKER}", json.dumps(marker, indent=1)
        if self._local:
            aside = Path(path + ".part")
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())  # or a machine that loses power may keep the name and not the text
            aside.replace(path)
        else:
            self._retried(f"writing {path}", lambda: self._fs.pipe_file(path, text.encode()))

    def read_marker(self, step: int) -> dict[str, Any]:
        """See CheckpointStore; raises DamagedCheckpointError where it is not what commit writes."""
        path = f"{self._folder(step)}/{MARKER}"
        try:
            marker = json.loads(self._retried(f"reading {path}", lambda: self._fs.cat_file(path)))
        except ValueError:
            wrong = "is not valid JSON"
        else:
            if isinstance(marker, dict) and "format" in marker:
                return marker
            wrong = "lacks its format" if isinstance(marker, dict) else f"holds {type(marker).__name__}, not an object"
        raise DamagedCheckpointError(f"checkpoint {self.location(step)}: {MARKER} {wrong}")

    def delete(self, step: int) -> None:
        """See CheckpointStore."""
        marker = f"{self._folder(step)}/{MARKER}"
        if self._exists(marker):
            self._retried(f"removing {marker}", lambda: self._fs.rm_file(marker))
        self._retried(f"removing {self.location(step)}", lambda: self._remove(self._folder(step)))

    def _remove(self, folder: str) -> None:
        try:
            self._fs.rm(folder, recursive=True)
        except FileNotFoundError:  # an attempt before this one removed all, and only its answer was lost
            return

    def _exists(self, path: str) -> bool:
        return bool(self._retried(f"looking for {path}", lambda: self._fs.exists(path)))

    def _folder(self, step: int) -> str:
        return f"{self._root}/step_{step:010d}"

    def _steps(self) -> list[int]:
        self._fs.invalidate_cache()
        names = self._retried(f"listing {self._uri}", self._names)
        return sorted(int(match[1]) for match in map(_STEP.search, names) if match)

    def _names(self) -> list[str]:
        try:
            found = self._fs.ls(self._root, detail=False, refresh=True) if not self._local else self._fs.ls(self._root)
        except FileNotFoundError:
            return []
        return [(entry if isinstance(entry, str) else entry["name"]).rstrip("/") for entry in found]

    def _retried(self, what: str, attempt: Callable[[], T]) -> T:
        return retried(what, attempt, self._attempts)


def _s3_options(seconds: int) -> dict[str, Any]:
    # s3fs tries each request five times by itself; botocore beneath it would make that twenty-five.
    limits = {"connect_timeout": min(seconds, 10), "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
    return {"config_kwargs": limits}


# A request that takes longer is given up and made again; without these a dead server holds a save for minutes.
_CLIENT_OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "s3": _s3_options,
    "gs": lambda seconds: {"requests_timeout": seconds},
    "abfs": lambda seconds: {"connection_timeout": min(seconds, 10), "read_timeout": seconds},
}
_CLIENT_OPTIONS |= {"s3a": _CLIENT_OPTIONS["s3"], "gcs": _CLIENT_OPTIONS["gs"]}
_CLIENT_OPTIONS |= {"az": _CLIENT_OPTIONS["abfs"], "abfss": _CLIENT_OPTIONS["abfs"]}


def join_uri(root: str, *parts: str) -> str:
    """`root/part/part` for paths and URIs."""
    return "/".join([root.rstrip("/") or "/", *parts])


def is_local(uri: str) -> bool:
    """Whether a path or URI names this machine's disk."""
    return fsspec.utils.get_protocol(uri) in ("file", "local")


def open_store(root: str, run: str, config: CheckpointConfig | None = None) -> FsspecStore:
    """The store of a run under checkpoint.uri; raises UserError for a URI that fsspec cannot open."""
    config = config or CheckpointConfig()
    limits = (config.attempts, config.request_timeout_seconds)
    return FsspecStore(join_uri(root, run, "checkpoints"), *limits, direct=config.direct_io)
