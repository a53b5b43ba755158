"""The fetch command: copy a folder of an object store to shared storage; a rerun skips the copied files."""

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
from trainer.storage.remote_errors import disk_error, is_transient, open_store, store_error
from trainer.storage.retry import RetriesExhaustedError

MARKER, MANIFEST = "_FETCHED.json", "_MANIFEST.jsonl"
# Names of the field that changes with a file's contents, the most reliable first.
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
    """Return the parser of the command's options."""
    flags = CommandParser(
        "fetch", "Copy a folder from an object store to shared storage; a rerun copies only what is missing."
    )
    add = flags.add_argument
    add("--from", dest="source", required=True, metavar="URI", help="folder or file: s3://, gs://, abfs://, or a path")
    add("--to", dest="target", required=True, metavar="DIR", help="folder of the copy")
    add("--workers", type=integer_from(1), default=16, metavar="N", help="files copied in parallel")
    add(
        "--retries",
        type=integer_from(0),
        default=5,
        metavar="N",
        help="retries of a file after a network error",
    )
    add("--progress", choices=KINDS, default="auto", help="auto: a bar on a terminal, else JSON lines")
    return flags


def fetch_main(arguments: Sequence[str]) -> int:
    """Run `fetch --from URI --to DIR [...]`; return EXIT_OK when all files are copied."""
    found = parser().read(arguments)
    job = Fetch(found.source, Path(found.target), found.workers, found.retries, JobProgress(found.progress))
    try:
        job.run()
    except OSError as error:
        explained = disk_error(error, found.target, "--to")
        if explained is None:
            raise
        raise explained from error
    return EXIT_OK


@dataclass(frozen=True)
class Item:
    """One file of the source."""

    path: str  # in the source's file system
    name: str  # relative to --from and to --to
    size: int
    version: str


class Fetch:
    """The copy of one folder."""

    def __init__(self, source: str, target: Path, workers: int, retries: int, progress: JobProgress) -> None:
        self._source, self._target, self._workers, self._progress = source, target, workers, progress
        self._retry = replace(retry.STORE_RETRY, attempts=retries + 1)
        self._filesystem, self._root = open_store(source, "--from")
        self._stop = threading.Event()
        self._writing = threading.Lock()

    def run(self) -> dict[str, Any]:
        """Copy files that are missing or have changed; return the contents of the marker."""
        began = time.monotonic()
        items = self._list()
        self._make_target()
        known = read_manifest(self._target / MANIFEST)
        missing = [item for item in items if not self._has(item, known)]
        size = sum(item.size for item in missing)
        self._check_free_space(size)
        if missing:
            (self._target / MARKER).unlink(missing_ok=True)  # readers that wait for it must not see the old one
            self._copy_all(missing, size)
        seconds = time.monotonic() - began
        marker = {"from": self._source, "files": len(items), "bytes": sum(item.size for item in items)}
        if missing or not (self._target / MARKER).exists():
            write_json(self._target / MARKER, marker)
        self._report(marker, missing, size, seconds)
        return marker

    def _report(self, marker: dict[str, Any], missing: list[Item], size: int, seconds: float) -> None:
        text = (
            f"{len(missing):,} files ({size / 1e9:,.2f} GB) copied to {self._target} in {seconds:,.1f} s "
            f"({size / seconds / 1e6:,.0f} MB/s), {marker['files'] - len(missing):,} were already there"
        )
        done = {"copied_files": len(missing), "copied_bytes": size, "seconds": round(seconds, 3)}
        self._progress.result(text, **marker, **done, to=str(self._target), bytes_per_second=round(size / seconds))

    def _list(self) -> list[Item]:
        """Return the files of --from, sorted by path; raise UserError if there are none."""
        try:
            entries = self._filesystem.find(self._root, detail=True)
        except Exception as error:  # each store has its own exceptions
            raise store_error(error, self._source, "--from") from error
        items = [self._item(path, entry) for path, entry in sorted(entries.items()) if not path.endswith("/")]
        if not items:
            raise UserError(f"--from {self._source}: no such bucket or folder, or it is empty. Fix: check the name")
        return items

    def _item(self, path: str, entry: dict[str, Any]) -> Item:
        name = path.removeprefix(self._root.rstrip("/")).lstrip("/") or PurePosixPath(path).name
        if ".." in PurePosixPath(name).parts:
            raise UserError(f"--from {self._source} contains {name!r}, which leads out of --to. Fix: rename that file")
        version = next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")
        return Item(path, name, int(entry.get("size") or 0), version)

    def _make_target(self) -> None:
        if self._target.exists() and not self._target.is_dir():
            raise UserError(f"--to {self._target} is a file; allowed: a folder")
        self._target.mkdir(parents=True, exist_ok=True)

    def _has(self, item: Item, known: dict[str, tuple[int, str]]) -> bool:
        path = self._target / item.name
        is_known = known.get(item.name) == (item.size, item.version)
        return is_known and path.is_file() and path.stat().st_size == item.size

    def _check_free_space(self, size: int) -> None:
        free = shutil.disk_usage(self._target).free
        if size > free:
            raise UserError(
                f"--to {self._target} is too small: got {free / 1e9:,.1f} GB free; needed: {size / 1e9:,.1f} GB. "
                f"Fix: free some space, or choose a larger storage"
            )

    def _copy_all(self, missing: list[Item], size: int) -> None:
        with self._progress.task("copying", size, "bytes") as task, ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._copy_or_stop, item, task) for item in missing]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # after an error or Ctrl-C: start no new file, and stop the others at their next piece
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
            for error in [future.exception() for future in futures if not future.cancelled()]:
                if error is not None and not isinstance(error, _StoppedError):
                    raise error

    def _copy_or_stop(self, item: Item, task: Task) -> None:
        """Copy one file; stop all others if it fails."""
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
            raise self._disk_error(error) or store_error(error, item.path, "--from") from error

    def _is_permanent(self, error: Exception) -> bool:
        return isinstance(error, _StoppedError) or self._disk_error(error) is not None or not is_transient(error)

    def _disk_error(self, error: Exception) -> UserError | None:
        return disk_error(error, self._target, "--to") if isinstance(error, OSError) else None

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _StoppedError

    def _copy_once(self, item: Item, task: Task) -> None:
        copied = _CopiedBytes(task, self._stop)
        path = self._target / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_replace(path) as part:
                self._filesystem.get_file(item.path, str(part), callback=copied.callback())
                _check_size(part, item.size)
                copied.finish(item.size)
        except Exception:
            task.advance(-copied.bytes)
            raise
        line = json.dumps({"name": item.name, "size": item.size, "version": item.version})
        with self._writing, (self._target / MANIFEST).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise EOFError(f"{size} of {expected} bytes arrived")


class _StoppedError(Exception):
    """The copy ends because another file failed or the user pressed Ctrl-C."""


class _CopiedBytes:
    """The bytes that one attempt has copied."""

    def __init__(self, task: Task, stop: threading.Event) -> None:
        self._task, self._stop = task, stop
        self.bytes = 0

    def callback(self) -> Any:
        """Return the callback that fsspec calls with every piece."""
        from fsspec.callbacks import Callback

        copied = self

        class Pieces(Callback):
            def relative_update(self, inc: int = 1) -> None:
                copied.add(inc)

            def absolute_update(self, value: int) -> None:
                copied.add(value - copied.bytes)

        return Pieces()  # type: ignore[no-untyped-call]

    def add(self, count: int) -> None:
        """Add `count` bytes; raise if the copy must stop."""
        if self._stop.is_set():
            raise _StoppedError
        self.bytes += count
        self._task.advance(count)

    def finish(self, size: int) -> None:
        """Set the bytes to the size of the file, because not every file system reports every piece."""
        self._task.advance(size - self.bytes)
        self.bytes = size


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return (size, version) of the copied files by name, without lines that were cut off."""
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
