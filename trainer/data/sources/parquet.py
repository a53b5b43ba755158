"""A source that reads label, dense values and ids from the user's Parquet files, one row group at a time.

Shapes: N rows of a row group, B samples, D dense and F sparse features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from trainer.config import ParquetConfig
from trainer.data.base import Batch, SourceContext, jagged_batch, one_id_batch
from trainer.data.block_order import BlockOrder
from trainer.data.checks import Where
from trainer.data.ids import Ids, Integers
from trainer.data.lru import LruCache
from trainer.data.sources.columns import Floats, dense_values, is_multi_valued, label_values, sparse_ids
from trainer.data.sources.parquet_files import ParquetFile, open_files
from trainer.errors import UserError


@dataclass(frozen=True)
class _Group:
    """A row group of a file."""

    file: ParquetFile
    number: int
    first_row: int  # in the file

    @property
    def where(self) -> Where:
        """Return a function that describes the place of the i-th row."""
        return lambda i: f"row {self.first_row + i} of {self.file.path}"


@dataclass(frozen=True)
class _Decoded:
    """Checked rows in memory, of a row group or a part of one."""

    dense_ND: Floats
    labels_N: Floats
    ids: Ids  # F stacked columns

    def take(self, rows: Integers) -> _Decoded:
        """Return these rows, in the given order."""
        return _Decoded(
            self.dense_ND.take(rows, axis=0), self.labels_N.take(rows), self.ids.take_rows(rows, self.labels_N.size)
        )


def _join(parts: Sequence[_Decoded]) -> _Decoded:
    """Return the rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    ids = Ids.join_columns([part.ids for part in parts], [part.labels_N.size for part in parts])
    dense_ND = np.concatenate([part.dense_ND for part in parts])
    return _Decoded(dense_ND, np.concatenate([part.labels_N for part in parts]), ids)


class ParquetSource:
    """Rows of Parquet files. The train split is reshuffled by row groups in every epoch, the eval split never."""

    def __init__(self, context: SourceContext) -> None:
        data = context.config.data
        path, option = (data.path, "data.path") if context.split == "train" else (data.eval_path, "data.eval_path")
        if not path:
            raise UserError(
                "data.eval_path is missing: an evaluation needs its own Parquet files. Fix: --data.eval-path PATH"
            )
        self._columns, self._rows = data.parquet, context.config.rows_per_table
        self._features = data.sparse_features
        files = open_files(path, option)
        _check_schemas(files, self._columns)
        self._groups = [group for file in files for group in _groups_of(file)]
        sizes = [group.file.group_sizes[group.number] for group in self._groups]
        self._order = BlockOrder(sizes, data.seed, data.shuffle and context.split == "train")
        self._decoded: LruCache[int, _Decoded] = LruCache(self._decode, self._columns.cache_groups)
        self.samples_per_epoch: int | None = self._order.num_samples

    def read(self, position: int, count: int) -> Batch:
        """Return samples `position` .. `position + count - 1`, in host memory."""
        rows = _join([self._decoded[block].take(rows) for block, rows in self._order.locate(position, count)])
        dense_BD, labels_B = torch.from_numpy(rows.dense_ND), torch.from_numpy(rows.labels_N)
        values_V = torch.from_numpy(rows.ids.values.astype(np.int64))
        if rows.ids.offsets is None:
            return one_id_batch(self._features, None, dense_BD, values_V.view(-1, count), labels_B, position)
        lengths_FB = torch.from_numpy(rows.ids.lengths).view(-1, count)
        values_F = torch.split(values_V, lengths_FB.sum(1).tolist())
        return jagged_batch(self._features, None, dense_BD, values_F, list(lengths_FB), labels_B, position)

    def _decode(self, block: int) -> _Decoded:
        """Read, convert and check one row group."""
        group, columns = self._groups[block], self._columns
        names = [columns.label, *(c.column for c in columns.dense), *self._features]
        table = group.file.read_group(group.number, list(dict.fromkeys(names)))
        dense_DN = [dense_values(table[c.column], c, group.where) for c in columns.dense]
        ids_F = [
            sparse_ids(table[c.column], c, r, group.where) for c, r in zip(columns.sparse, self._rows, strict=True)
        ]
        labels_N = label_values(table[columns.label], columns.label, group.where)
        return _Decoded(np.stack(dense_DN, axis=1), labels_N, Ids.join(ids_F))


def _groups_of(file: ParquetFile) -> list[_Group]:
    """Return the row groups of a file that have rows."""
    first_rows = np.cumsum([0, *file.group_sizes])
    return [_Group(file, g, int(first_rows[g])) for g, size in enumerate(file.group_sizes) if size]


def _check_schemas(files: Sequence[ParquetFile], columns: ParquetConfig) -> None:
    """Raise UserError if a file lacks a column, or mixes lists and single values with the first file."""
    columns_by_option = {"data.parquet.label": [columns.label]}
    columns_by_option["data.parquet.dense"] = [c.column for c in columns.dense]
    columns_by_option["data.parquet.sparse"] = [c.column for c in columns.sparse]
    for file in files:
        for option, names in columns_by_option.items():
            for name in names:
                if name not in file.schema.names:
                    raise UserError(
                        f"{option} names a column that is not in {file.path}: got {name}; "
                        f"allowed: {', '.join(file.schema.names)}"
                    )
        for name in columns_by_option["data.parquet.sparse"]:
            kinds: list[pa.DataType] = [f.schema.field(name).type for f in (files[0], file)]
            if is_multi_valued(kinds[0]) != is_multi_valued(kinds[1]):
                raise UserError(
                    f"column {name} has different types: got {kinds[0]} in {files[0].path} and {kinds[1]} in "
                    f"{file.path}; allowed: lists in both or single values in both"
                )
