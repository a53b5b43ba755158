"""Find Parquet files, on this machine or behind a URI, and read their row groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import fsspec.core
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from trainer.errors import UserError


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file, of which only the footer is in memory."""

    path: str  # as the user knows it
    inner_path: str  # in its file system
    filesystem: pafs.FileSystem
    metadata: pq.FileMetaData
    schema: pa.Schema
    group_sizes: tuple[int, ...]  # rows of each row group

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of one row group; raise UserError if the file cannot be read."""
        try:
            with self.filesystem.open_input_file(self.inner_path) as stream:
                file = pq.ParquetFile(stream, metadata=self.metadata, pre_buffer=True)
                return file.read_row_group(group, columns=list(columns), use_threads=True)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"cannot read row group {group} of {self.path}: {error}") from error


def open_files(uri: str, option: str) -> list[ParquetFile]:
    """Open the file `uri`, or the *.parquet files in that folder by name; raise UserError if there are none."""
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)  # type: ignore[no-untyped-call]
        if filesystem.isdir(path):
            paths = sorted(p for p in filesystem.ls(path, detail=False) if p.endswith(".parquet"))
        else:
            paths = [path] if filesystem.exists(path) else []
    except Exception as error:  # each store has its own exceptions; all mean that the URI does not work
        raise UserError(f"{option} {uri} cannot be opened: {type(error).__name__}: {error}") from error
    if not paths:
        raise UserError(f"{option} {uri}: no such file, and no folder with *.parquet files")
    local = isinstance(filesystem, LocalFileSystem)
    arrow = pafs.LocalFileSystem() if local else _arrow_filesystem(filesystem)
    files = [_open(p if local else filesystem.unstrip_protocol(p), p, arrow) for p in paths]
    if not sum(file.metadata.num_rows for file in files):
        raise UserError(f"{option} {uri} has no rows")
    return files


def _arrow_filesystem(filesystem: AbstractFileSystem) -> pafs.FileSystem:
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))  # type: ignore[abstract]  # abstract only in the stubs


def _open(path: str, inner_path: str, filesystem: pafs.FileSystem) -> ParquetFile:
    try:
        with filesystem.open_input_file(inner_path) as stream:
            file = pq.ParquetFile(stream)
            sizes = tuple(file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups))
            return ParquetFile(path, inner_path, filesystem, file.metadata, file.schema_arrow, sizes)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a complete Parquet file: {error}") from error
