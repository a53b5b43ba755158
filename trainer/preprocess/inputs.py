"""Find the files of click logs, and read their text in chunks of complete lines."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.preprocess.options import Options
from trainer.preprocess.parse import Text
from trainer.storage.remote_errors import open_store, store_error

CHUNK_BYTES = 4 << 20
_TAIL_BYTES = 4_096  # usually contains the last newline: a line of Criteo has at most 400 characters
_DAY = re.compile(r"day_(\d+)(\.tsv|\.txt)?(\.gz)?")
_SINGLE = re.compile(r"train\.(txt|tsv)(\.gz)?")


@dataclass(frozen=True)
class Input:
    """One file and its days: the day of its name, or the parts that it is split into."""

    uri: str
    path: str  # as the file system names it
    filesystem: Any
    days: tuple[int, ...]
    size: int
    version: str  # changes when the file does

    @property
    def name(self) -> str:
        """Return the name of the file without its folder."""
        return self.path.rpartition("/")[2]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the facts that must be equal when a run resumes."""
        return {"uri": self.uri, "size": self.size, "version": self.version, "days": list(self.days)}


def find_inputs(options: Options) -> list[Input]:
    """Return the files of --input in the order of their days; raise UserError if there is none."""
    filesystem, path = open_store(options.input, "--input")
    try:
        folder = filesystem.isdir(path)
        entries = filesystem.ls(path, detail=True) if folder else [filesystem.info(path)]
    except Exception as error:  # each store has its own exceptions
        raise store_error(error, options.input, "--input") from error
    files = {e["name"].rstrip("/").rpartition("/")[2]: e for e in entries if e["type"] != "directory"}
    days = {int(m[1]): name for name in sorted(files) if (m := _DAY.fullmatch(name))}
    single = [name for name in sorted(files) if _SINGLE.fullmatch(name) or (not folder and not days)]
    if not days and not single:
        names = ", ".join(sorted(files)[:5]) or "no files"
        raise UserError(
            f"--input has no click logs: got {options.input} with {names}; allowed: day_N, day_N.gz, or train.txt"
        )
    if not days:
        if options.days:
            raise UserError(
                f"--days does not apply to a single file: got {options.input}; allowed: a folder of day_N. "
                f"Fix: remove --days"
            )
        chosen = {single[0]: tuple(range(options.cut_days))}
    else:
        absent = sorted(set(options.days or ()) - set(days))
        if absent:
            raise UserError(f"--days are not in --input {options.input}: got {absent}; allowed: {sorted(days)}")
        chosen = {days[day]: (day,) for day in sorted(options.days or days)}
    return [_input(filesystem, files[name], numbers) for name, numbers in chosen.items()]


def _input(filesystem: Any, entry: dict[str, Any], days: tuple[int, ...]) -> Input:
    path = entry["name"]
    return Input(
        filesystem.unstrip_protocol(path).removeprefix("file://"),
        path,
        filesystem,
        days,
        int(entry.get("size") or 0),
        str(entry.get("ETag") or entry.get("etag") or entry.get("mtime") or ""),
    )


def read_texts(source: Input, advance: Callable[[int], None]) -> Iterator[Text]:
    """Yield the text in complete lines, about 4 MiB at a time; `advance` gets the number of stored bytes read."""
    with _open(source) as (stored, stream):
        rest, before, reported = b"", 0, 0
        while True:
            text, rest, ended = _next_text(stream, rest)
            advance(stored.tell() - reported)
            reported = stored.tell()
            if text.size:
                yield text
            before += text.size
            if ended:
                return
            if len(rest) > CHUNK_BYTES:
                raise UserError(
                    f"{source.uri} is not Criteo text: got a line of more than 4 MiB at byte {before}. "
                    f"Fix: check the file"
                )


def _next_text(stream: Any, rest: bytes) -> tuple[Text, bytes, bool]:
    """Read on and return the complete lines, the incomplete line after them, and whether the stream has ended.

    `rest` is the incomplete line of the previous call; the last line of a stream needs no newline.
    """
    text = Text.allocate(len(rest) + CHUNK_BYTES + 1)
    characters = text.characters.data
    characters[: len(rest)] = rest
    read: int = stream.readinto(characters[len(rest) : -1])
    size = len(rest) + read
    if not read:
        characters[size : size + 1] = b"\n"
        return Text(text.words, size + 1 if size else 0), b"", True
    for searched in (min(size, _TAIL_BYTES), size):
        newline = characters[size - searched : size].tobytes().rfind(b"\n")
        if newline >= 0:
            end = size - searched + newline + 1
            return Text(text.words, end), characters[end:size].tobytes(), False
    return Text(text.words, 0), characters[:size].tobytes(), False


@contextmanager
def _open(source: Input) -> Iterator[tuple[Any, Any]]:
    """Open a file; yield the stored bytes and the decompressed text."""
    try:
        with source.filesystem.open(source.path, "rb") as stored:
            yield stored, gzip.GzipFile(fileobj=stored) if source.path.endswith(".gz") else stored
    except UserError:
        raise
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{source.uri} is not a complete gzip file ({error}). Fix: copy it again") from error
    except Exception as error:  # each store has its own exceptions
        raise store_error(error, source.uri, "--input") from error
