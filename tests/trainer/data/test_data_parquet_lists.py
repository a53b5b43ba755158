"""List columns of Parquet files, which are multi-valued features, and columns in several pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_samples import lists_of, table_of, write_table
from parquet_reads import FOUR, ids, ids_of_column, read, row_of

from trainer.config import DenseColumn, SparseColumn
from trainer.data.ids import Ids
from trainer.data.sources.columns import dense_values, sparse_ids
from trainer.errors import UserError


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_a_list_is_a_multi_valued_feature(tmp_path: Path, kind: pa.DataType) -> None:
    lists = [[1, 2], [], [3], [4, 5, 6]]
    assert ids_of_column(tmp_path, pa.array(lists, kind)) == lists


def test_a_fixed_size_list_is_a_multi_valued_feature(tmp_path: Path) -> None:
    assert ids_of_column(tmp_path, pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))) == [[1, 2], [3, 4]]


def test_lists_of_text_are_hashed(tmp_path: Path) -> None:
    kinds = (pa.list_(pa.string()), pa.list_(pa.dictionary(pa.int32(), pa.string())))
    expected = [[row_of("drama", 1_000), row_of("war", 1_000)], []]
    for kind in kinds:
        assert ids_of_column(tmp_path, pa.array([["drama", "war"], []], kind), hash=True) == expected


def test_a_null_list_becomes_a_list_with_the_fill(tmp_path: Path) -> None:
    lists = pa.array([None, [1, 2], None, None, [3], None], pa.list_(pa.int64()))
    assert ids_of_column(tmp_path, lists, fill=9) == [[9], [1, 2], [9], [9], [3], [9]]


def test_a_null_inside_a_list_becomes_the_fill(tmp_path: Path) -> None:
    assert ids_of_column(tmp_path, pa.array([[1, None], [None]], pa.list_(pa.int64())), fill=9) == [[1, 9], [9]]


@pytest.mark.parametrize("bad", [None, [5, None]])
def test_a_null_in_a_list_column_without_fill_names_its_row(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(UserError, match=r"column user of data\.parquet\.sparse is null in row 2 of "):
        ids_of_column(tmp_path, pa.array([[1, 2], [], bad, [3]], pa.list_(pa.int64())))


def test_an_id_outside_its_table_names_the_row_of_its_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"feature user has an id .* in row 12 of .* got 1000"):
        ids_of_column(tmp_path, [[1, 2], [], [3]] * 4 + [[1, 1_000]])


def test_single_and_multi_valued_features_keep_their_canonical_order(tmp_path: Path) -> None:
    table = table_of(25, genres=lists_of(25), tags=lists_of(25, first=1), item=list(range(25)))
    path = write_table(tmp_path / "x.parquet", table)
    order = ["genres", "user", "tags", "item"]
    batch = read(path, sparse=order)
    assert list(batch.sparse.keys()) == order
    for name in order:
        column = pq.read_table(path)[name].to_pylist()
        expected = [value if isinstance(value, list) else [value] for value in column]
        assert ids(batch, name) == expected, name


def test_lists_in_one_file_and_single_values_in_another_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", FOUR | {"user": [1, 2, 3, 4]})
    write_table(tmp_path / "b.parquet", FOUR | {"user": [[1], [2], [3], [4]]})
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"column user has different types: got int64 in {tmp_path}/a.parquet and list<element: int64> in "
        f"{tmp_path}/b.parquet; allowed: lists in both or single values in both"
    )


def test_joined_parts_keep_the_ids_of_each_column() -> None:
    left = Ids.from_lengths(np.array([1, 2, 3]), np.array([1, 0, 2, 0]))  # two columns of two rows: [1] [] and [2 3] []
    right = Ids(np.array([7, 8]))  # two columns of one row
    joined = Ids.join_columns([left, right], [2, 1])
    assert joined.values.tolist() == [1, 7, 2, 3, 8]
    assert joined.lengths.tolist() == [1, 0, 1, 2, 0, 1]


def test_a_column_in_several_pieces_is_read_as_one() -> None:
    """Arrow cuts a column of strings at 2 GiB."""
    lists = pa.chunked_array([pa.array([[1, 2], []]), pa.array([[3]], pa.list_(pa.int64()))])
    read_ids = sparse_ids(lists, SparseColumn(column="user"), 1_000, str)
    assert (read_ids.values.tolist(), read_ids.lengths.tolist()) == ([1, 2, 3], [2, 0, 1])
    assert dense_values(pa.chunked_array([[1.0], [2.0, 3.0]]), DenseColumn(column="age"), str).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "column", [pa.chunked_array([[1, 2], [3, -1]]), pa.chunked_array([[[1], [2]], [[3], [4, -1]]])]
)
def test_a_bad_id_in_a_later_piece_is_named_with_its_row(column: Any) -> None:
    with pytest.raises(UserError, match=r"feature user has an id .* in row 3: got -1;"):
        sparse_ids(column, SparseColumn(column="user"), 1_000, lambda row: f"row {row}")
