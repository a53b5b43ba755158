"""Which files hold the click logs, and their text in chunks of whole lines."""

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
from trainer.storage.remote_errors import explained, open_store

CHUNK_BYTES = 4 << 20
_USUAL_LINES = 4_096  # the last newline is in here; a line of Criteo has at most 400 characters
_DAY = re.compile(r"day_(\d+)(\.tsv|\.txt)?(\.gz)?")
_SINGLE = re.compile(r"train\.(txt|tsv)(\.gz)?")


@dataclass(frozen=True)
class Input:
    """One file and the days it holds: its own, or the parts that it is cut into."""

    uri: str
    path: str  # as the file system names it
    filesystem: Any
    days: tuple[int, ...]
    size: int
    version: str  # changes when the file does

    @property
    def name(self) -> str:
        """Without its folder."""
        return self.path.rpartition("/")[2]

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run compares."""
        return {"uri": self.uri, "size": self.size, "version": self.version, "days": list(self.days)}


def find_inputs(options: Options) -> list[Input]:
    """The files of --input in the order of their days; raises UserError where there are none."""
    filesystem, path = open_store(options.input, "--input")
    try:
        folder = filesystem.isdir(path)
        entries = filesystem.ls(path, detail=True) if folder else [filesystem.info(path)]
    except Exception as error:  # each store has its own exceptions
        raise explained(error, options.input, "--input") from error
    files = {e["name"].rstrip("/").rpartition("/")[2]: e for e in entries if e["type"] != "directory"}
    days = {int(m[1]): name for name in sorted(files) if (m := _DAY.fullmatch(name))}
    single = [name for name in sorted(files) if _SINGLE.fullmatch(name) or (not folder and not days)]
    if not days and not single:
        seen = ", ".join(sorted(files)[:5]) or "no files"
        raise UserError(f"--input is {options.input}, which holds {seen}; legal: day_N, day_N.gz, or train.txt")
    if not days:
        if options.days:
            raise UserError("--days is given, but --input is one file, which is cut into days; leave it out")
        chosen = {single[0]: tuple(range(options.cut_days))}
    else:
        absent = sorted(set(options.days or ()) - set(days))
        if absent:
            raise UserError(f"--days names {absent}, but --input {options.input} holds days {sorted(days)}")
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


def read_texts(source: Input, advanced: Callable[[int], None]) -> Iterator[Text]:
    """The text in whole lines, about 4 MiB at a time; `advanced` is told the bytes as stored."""
    with _opened(source) as (stored, stream):
        rest, before, told = b"", 0, 0
        while True:
            text, rest, ended = _next_text(stream, rest)
            advanced(stored.tell() - told)
            told = stored.tell()
            if text.size:
                yield text
            before += text.size
            if ended:
                return
            if len(rest) > CHUNK_BYTES:
                raise UserError(f"{source.uri} has a line of more than 4 MiB at byte {before}: this is no Criteo text")


def _next_text(stream: Any, rest: bytes) -> tuple[Text, bytes, bool]:
    """The lines that end in `rest` and what is read next, what is left behind them, and whether the stream has ended,
    with or without a newline."""
    text = Text.room_for(len(rest) + CHUNK_BYTES + 1)
    characters = text.characters.data
    characters[: len(rest)] = rest
    read: int = stream.readinto(characters[len(rest) : -1])
    size = len(rest) + read
    if not read:
        characters[size : size + 1] = b"\n"
        return Text(text.words, size + 1 if size else 0), b"", True
    for searched in (min(size, _USUAL_LINES), size):
        newline = characters[size - searched : size].tobytes().rfind(b"\n")
        if newline >= 0:
            end = size - searched + newline + 1
            return Text(text.words, end), characters[end:size].tobytes(), False
    return Text(text.words, 0), characters[:size].tobytes(), False


@contextmanager
def _opened(source: Input) -> Iterator[tuple[Any, Any]]:
    """The file as it is stored, and its text."""
    try:
        with source.filesystem.open(source.path, "rb") as stored:
            yield stored, gzip.GzipFile(fileobj=stored) if source.path.endswith(".gz") else stored
    except UserError:
        raise
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{source.uri} is not a complete gzip file ({error}); copy it again") from error
    except Exception as error:  # each store has its own exceptions
        raise explained(error, source.uri, "--input") from error
