"""Which files hold the click logs, and their text in chunks of whole lines."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.preprocess.options import Options
from trainer.remote import explained, open_store

CHUNK_BYTES = 4 << 20
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


def read_chunks(source: Input, advanced: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines) of the text, about 4 MiB each; `advanced` is told the bytes as stored."""
    line, rest = 1, b""
    for block in _read_blocks(source, advanced):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            if len(rest) > CHUNK_BYTES:
                raise UserError(f"{source.uri} line {line} is longer than 4 MiB: this is no Criteo text")
            continue
        chunk, rest = rest + head + newline, tail
        yield line, chunk
        line += chunk.count(b"\n")
    if rest:
        yield line, rest + b"\n"


def _read_blocks(source: Input, advanced: Callable[[int], None]) -> Iterator[bytes]:
    try:
        with source.filesystem.open(source.path, "rb") as stored:
            text = gzip.GzipFile(fileobj=stored) if source.path.endswith(".gz") else stored
            told = 0
            while block := text.read(CHUNK_BYTES):
                advanced(stored.tell() - told)
                told = stored.tell()
                yield block
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{source.uri} is not a complete gzip file ({error}); copy it again") from error
    except Exception as error:  # each store has its own exceptions
        raise explained(error, source.uri, "--input") from error
