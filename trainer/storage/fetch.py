"""The fetch command: a folder of an object store to shared storage, file by file; what has arrived is not copied
again."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.cli.arguments import CommandParser, integer_from
from trainer.cli.progress import KINDS, JobProgress, Task
from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK
from trainer.storage import retry
from trainer.storage.atomic_write import atomic_replace, write_json
from trainer.storage.remote_errors import disk_error, explained, is_transient, open_store
from trainer.storage.retry import RetriesExhaustedError

MARKER, MANIFEST = "_FETCHED.json", "_MANIFEST.jsonl"
# What stores call the thing that changes whenever a file's contents do, the best one first.
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)


def parser() -> CommandParser:
    """The command's parser, which its help is made of."""
    flags = CommandParser(
        "fetch", "Copies a folder from an object store to shared storage, and goes on where it was stopped."
    )
    add = flags.add_argument
    add("--from", dest="source", required=True, metavar="URI", help="folder or file: s3://, gs://, abfs://, or a path")
    add("--to", dest="target", required=True, metavar="DIR", help="folder of the copy")
    add("--workers", type=integer_from(1), default=16, metavar="N", help="files copied at the same time")
    add(
        "--retries",
        type=integer_from(0),
        default=5,
        metavar="N",
        help="more tries for a file after a fault of the network",
    )
    add("--progress", choices=KINDS, default="auto", help="auto: a bar on a terminal, else JSON lines")
    return flags


def fetch_main(arguments: Sequence[str]) -> int:
    """`fetch --from URI --to DIR [...]`; 0 when every file has arrived."""
    found = parser().read(arguments)
    job = Fetch(found.source, Path(found.target), found.workers, found.retries, JobProgress(found.progress))
    try:
        job.run()
    except OSError as error:
        told = disk_error(error, found.target, "--to")
        if told is None:
            raise
        raise told from error
    return EXIT_OK


@dataclass(frozen=True)
class Item:
    """One file of the source."""

    path: str  # as the file system names it
    name: str  # below --from, and so below --to
    size: int
    version: str


class Fetch:
    """A copy of one folder."""

    def __init__(self, source: str, target: Path, workers: int, retries: int, progress: JobProgress) -> None:
        self._source, self._target, self._workers, self._progress = source, target, workers, progress
        self._retry = replace(retry.STORE_RETRY, attempts=retries + 1)
        self._filesystem, self._root = open_store(source, "--from")
        self._stop = threading.Event()
        self._writing = threading.Lock()

    def run(self) -> dict[str, Any]:
        """Copy what is missing or has changed; returns the marker's contents."""
        began = time.monotonic()
        items = self._list()
        self._make_target()
        known = read_manifest(self._target / MANIFEST)
        missing = [item for item in items if not self._has(item, known)]
        size = sum(item.size for item in missing)
        self._check_room(size)
        if missing:
            (self._target / MARKER).unlink(missing_ok=True)  # whoever waits for it must not see the old one
            self._copy_all(missing, size)
        seconds = time.monotonic() - began
        marker = {"from": self._source, "files": len(items), "bytes": sum(item.size for item in items)}
        if missing or not (self._target / MARKER).exists():
            write_json(self._target / MARKER, marker)
        self._tell(marker, missing, size, seconds)
        return marker

    def _tell(self, marker: dict[str, Any], missing: list[Item], size: int, seconds: float) -> None:
        text = (
            f"{len(missing):,} files ({size / 1e9:,.2f} GB) copied to {self._target} in {seconds:,.1f} s "
            f"({size / seconds / 1e6:,.0f} MB/s), {marker['files'] - len(missing):,} were there already"
        )
        done = {"copied_files": len(missing), "copied_bytes": size, "seconds": round(seconds, 3)}
        self._progress.result(text, **marker, **done, to=str(self._target), bytes_per_second=round(size / seconds))

    def _list(self) -> list[Item]:
        """Every file of --from, by name; raises UserError where there is none."""
        try:
            entries = self._filesystem.find(self._root, detail=True)
        except Exception as error:  # each store has its own exceptions
            raise explained(error, self._source, "--from") from error
        items = [self._item(path, entry) for path, entry in sorted(entries.items()) if not path.endswith("/")]
        if not items:
            raise UserError(f"--from is {self._source}: no such bucket or folder, or it is empty; check its name")
        return items

    def _item(self, path: str, entry: dict[str, Any]) -> Item:
        name = path.removeprefix(self._root.rstrip("/")).lstrip("/") or PurePosixPath(path).name
        if ".." in PurePosixPath(name).parts:
            raise UserError(f"--from {self._source} holds {name!r}, a name that leads out of --to; rename it")
        version = next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")
        return Item(path, name, int(entry.get("size") or 0), version)

    def _make_target(self) -> None:
        if self._target.exists() and not self._target.is_dir():
            raise UserError(f"--to is {self._target}, which is a file; name a folder")
        self._target.mkdir(parents=True, exist_ok=True)

    def _has(self, item: Item, known: dict[str, tuple[int, str]]) -> bool:
        path = self._target / item.name
        here = known.get(item.name) == (item.size, item.version)
        return here and path.is_file() and path.stat().st_size == item.size

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self._target).free
        if size > free:
            raise UserError(
                f"--to is {self._target}, which has {free / 1e9:,.1f} GB free, but {size / 1e9:,.1f} GB are to come; "
                f"free some space, or name a larger storage"
            )

    def _copy_all(self, missing: list[Item], size: int) -> None:
        with self._progress.task("copying", size, "bytes") as task, ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._copy_or_stop, item, task) for item in missing]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # after an error or Ctrl-C: no new file, and those under way stop at their next piece
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
            for error in [future.exception() for future in futures if not future.cancelled()]:
                if error is not None and not isinstance(error, _StoppedError):
                    raise error

    def _copy_or_stop(self, item: Item, task: Task) -> None:
        """The first file that fails stops all others."""
        try:
            self._copy(item, task)
        except BaseException:
            self._stop.set()
            raise

    def _copy(self, item: Item, task: Task) -> None:
        """Copy one file, with retries after transient errors."""
        if self._stop.is_set():
            raise _StoppedError
        try:
            self._retry.run(partial(self._copy_once, item, task), self._is_permanent, sleep=self._sleep)
        except _StoppedError:
            raise
        except RetriesExhaustedError as exhausted:
            error = exhausted.error
            raise UserError(
                f"{item.path} could not be copied in {self._retry.attempts} attempts: {type(error).__name__}: {error}. "
                f"Fix: run the same command again; it resumes with this file"
            ) from error
        except Exception as error:  # each store has its own exceptions
            raise self._disk_error(error) or explained(error, item.path, "--from") from error

    def _is_permanent(self, error: Exception) -> bool:
        return isinstance(error, _StoppedError) or self._disk_error(error) is not None or not is_transient(error)

    def _disk_error(self, error: Exception) -> UserError | None:
        return disk_error(error, self._target, "--to") if isinstance(error, OSError) else None

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _StoppedError

    def _copy_once(self, item: Item, task: Task) -> None:
        moved = _Moved(task, self._stop)
        path = self._target / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_replace(path) as part:
                self._filesystem.get_file(item.path, str(part), callback=moved.callback())
                _check_size(part, item.size)
                moved.finish(item.size)
        except Exception:
            task.advance(-moved.bytes)
            raise
        line = json.dumps({"name": item.name, "size": item.size, "version": item.version})
        with self._writing, (self._target / MANIFEST).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise EOFError(f"{size} of {expected} bytes arrived")


class _StoppedError(Exception):
    """Another file has failed, or a person has pressed Ctrl-C."""


class _Moved:
    """Bytes of one try."""

    def __init__(self, task: Task, stop: threading.Event) -> None:
        self._task, self._stop = task, stop
        self.bytes = 0

    def callback(self) -> Any:
        """What fsspec calls with every piece."""
        from fsspec.callbacks import Callback

        moved = self

        class Pieces(Callback):
            def relative_update(self, inc: int = 1) -> None:
                moved.add(inc)

            def absolute_update(self, value: int) -> None:
                moved.add(value - moved.bytes)

        return Pieces()  # type: ignore[no-untyped-call]

    def add(self, count: int) -> None:
        """`count` more bytes; raises where the copy must end."""
        if self._stop.is_set():
            raise _StoppedError
        self.bytes += count
        self._task.advance(count)

    def finish(self, size: int) -> None:
        """The whole file is here: not every file system tells of every piece."""
        self._task.advance(size - self.bytes)
        self.bytes = size


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """(size, version) of the files that have arrived, by name; a line that was cut off counts as none."""
    found: dict[str, tuple[int, str]] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the copy ended in the middle of this line; its file is copied again
        found[entry["name"]] = (entry["size"], entry["version"])
    return found
