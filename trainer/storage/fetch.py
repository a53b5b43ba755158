"""The fetch command: a folder of an object store to shared storage, file by file; what has arrived is not copied
again."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.cli.arguments import Flags, whole
from trainer.cli.progress import KINDS, JobProgress, Task
from trainer.errors import UserError
from trainer.storage.remote_errors import disk_error, explained, is_transient, open_store

MARKER, MANIFEST = "_FETCHED.json", "_MANIFEST.jsonl"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
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


def parser() -> Flags:
    """The command's parser, which its help is made of."""
    flags = Flags("fetch", "Copies a folder from an object store to shared storage, and goes on where it was stopped.")
    add = flags.add_argument
    add("--from", dest="source", required=True, metavar="URI", help="folder or file: s3://, gs://, abfs://, or a path")
    add("--to", dest="target", required=True, metavar="DIR", help="folder of the copy")
    add("--workers", type=whole(1), default=16, metavar="N", help="files copied at the same time")
    add("--retries", type=whole(0), default=5, metavar="N", help="more tries for a file after a fault of the network")
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
    return 0


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
        self._source, self._target, self._workers, self._retries = source, target, workers, retries
        self._progress = progress
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
            _write_whole(self._target / MARKER, json.dumps(marker, indent=2) + "\n")
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
        """One file, with more tries after passing faults."""
        if self._stop.is_set():
            raise _StoppedError
        for attempt in range(self._retries + 1):
            moved = _Moved(task, self._stop)
            try:
                self._copy_once(item, moved)
                break
            except _StoppedError:
                raise
            except Exception as error:
                task.advance(-moved.bytes)
                if isinstance(error, OSError) and (told := disk_error(error, self._target, "--to")):
                    raise told from error
                if not is_transient(error):
                    raise explained(error, item.path, "--from") from error
                if attempt == self._retries:
                    raise UserError(
                        f"{item.path} could not be copied in {attempt + 1} tries: {type(error).__name__}: {error}; the "
                        f"same command goes on with it"
                    ) from error
                self._wait(attempt)

    def _wait(self, attempt: int) -> None:
        pause = min(_FIRST_PAUSE_SECONDS * 2**attempt, _LONGEST_PAUSE_SECONDS)
        # At random, so that many copiers do not come back at once.
        if self._stop.wait(pause * random.uniform(0.5, 1.5)):  # noqa: S311  # no secret
            raise _StoppedError

    def _copy_once(self, item: Item, moved: _Moved) -> None:
        path = self._target / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".part")
        try:
            self._filesystem.get_file(item.path, str(aside), callback=moved.callback())
            arrived = aside.stat().st_size
            if arrived != item.size:
                raise EOFError(f"{arrived} of {item.size} bytes arrived")
            moved.finish(arrived)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        line = json.dumps({"name": item.name, "size": item.size, "version": item.version})
        with self._writing, (self._target / MANIFEST).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


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


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)
