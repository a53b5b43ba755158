"""Columns of Parquet files: the types that can be read, and errors that name the column and the row."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_samples import write_table
from parquet_reads import dense_of_column, ids_of_column, read

from trainer.errors import UserError

# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        [False, True, True],
        pa.array([0, 1, 1], pa.uint8()),
        [0.0, 1.0, 1.0],
        pa.array([0, 1, 1], pa.float16()),
        [Decimal("0.0"), Decimal("1.0"), Decimal("1.0")],
        pa.array([0, 1, 1]).dictionary_encode(),
    ],
)
def test_labels_are_read_from_any_type_of_number(tmp_path: Path, labels: Any) -> None:
    path = write_table(tmp_path / "x.parquet", {"label": labels, "serial": [0, 0, 0], "user": [1, 2, 3]})
    assert read(path).labels_B.tolist() == [0.0, 1.0, 1.0]


def test_a_label_may_be_a_probability(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", {"label": [0.25], "serial": [0], "user": [1]})
    assert read(path).labels_B.tolist() == [0.25]


@pytest.mark.parametrize("bad", [math.nan, 2.0, -1.0])
def test_a_label_outside_0_to_1_names_its_row(tmp_path: Path, bad: float) -> None:
    labels = [0.0] * 11 + [bad]
    path = write_table(tmp_path / "x.parquet", {"label": labels, "serial": [0] * 12, "user": [1] * 12})
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == (
        f"wrong label in row 11 of {path}: got {bad}; allowed: 0, 1 or a probability between. "
        f"Fix: correct or drop that row"
    )


def test_a_label_that_is_null_names_its_row(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", {"label": [0, None], "serial": [0, 0], "user": [1, 2]})
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == f"column label of data.parquet.label is null in row 1 of {path}. Fix: drop such rows"


# --- dense columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 0, 1], pa.int8()),
        [1.0, 0.0, 1.0],
        [True, False, True],
        [Decimal("1.00"), Decimal("0.00"), Decimal("1.00")],
        pa.array([1, 0, 1], pa.uint64()),
        pa.array([1.0, 0.0, 1.0]).dictionary_encode(),
    ],
)
def test_numbers_of_any_type_are_dense_values(tmp_path: Path, values: Any) -> None:
    assert dense_of_column(tmp_path, values) == [1.0, 0.0, 1.0]


def test_log1p_clips_negative_values(tmp_path: Path) -> None:
    expected = [0.0, 0.0, math.log(2), math.log(101)]
    assert dense_of_column(tmp_path, [-5, 0, 1, 100], transform="log1p") == pytest.approx(expected)


def test_standardizing_keeps_the_precision_of_large_numbers(tmp_path: Path) -> None:
    seconds = [1_700_000_000, 1_700_000_001]
    assert dense_of_column(tmp_path, seconds, transform="standardize", mean=1.7e9, std=2.0) == [0.0, 0.5]


def test_a_fill_replaces_null_and_nan_before_the_transform(tmp_path: Path) -> None:
    values = pa.array([1.0, None, math.nan], pa.float64())
    expected = [math.log(2), math.log(100), math.log(100)]
    assert dense_of_column(tmp_path, values, fill=99.0, transform="log1p") == pytest.approx(expected)


def test_a_column_of_nulls_becomes_all_fill(tmp_path: Path) -> None:
    assert dense_of_column(tmp_path, pa.nulls(3), fill=-1.0) == [-1.0] * 3


def test_a_null_without_fill_names_column_and_row(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        dense_of_column(tmp_path, [*range(25), None])
    assert str(caught.value) == (
        f"column age of data.parquet.dense is null in row 25 of {tmp_path}/x.parquet. Fix: set the column's fill"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_names_column_and_row(tmp_path: Path, bad: float) -> None:
    with pytest.raises(UserError) as caught:
        dense_of_column(tmp_path, [0.0, bad])
    assert str(caught.value) == (
        f"wrong value of dense feature age in row 1 of {tmp_path}/x.parquet: got {bad}; allowed: finite numbers. "
        f"Fix: correct or drop that row"
    )


def test_text_in_a_dense_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"column age of data\.parquet\.dense: got string; allowed: numbers"):
        dense_of_column(tmp_path, ["young", "old"])


# --- sparse columns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, 1, 999], pa.int16()),
        pa.array([0, 1, 999], pa.uint64()),
        [0.0, 1.0, 999.0],
        [Decimal(0), Decimal(1), Decimal(999)],
        pa.array([0, 1, 999]).dictionary_encode(),
    ],
)
def test_integers_of_any_type_are_ids(tmp_path: Path, values: Any) -> None:
    assert ids_of_column(tmp_path, values) == [[0], [1], [999]]


def test_booleans_are_ids(tmp_path: Path) -> None:
    assert ids_of_column(tmp_path, [True, False]) == [[1], [0]]


@pytest.mark.parametrize("bad", [1_000, -1])
def test_an_id_outside_its_table_names_column_row_and_value(tmp_path: Path, bad: int) -> None:
    with pytest.raises(UserError) as caught:
        ids_of_column(tmp_path, [3] * 14 + [bad])
    assert str(caught.value) == (
        f"feature user has an id outside its table t_user of 1000 rows in row 14 of {tmp_path}/x.parquet: "
        f"got {bad}; allowed: 0 to 999. Fix: raise model.num_embeddings, or hash the ids "
        f"(Parquet: hash = true; Criteo: --data.criteo.modulo-ids true)"
    )


def test_a_column_may_set_the_rows_of_its_table(tmp_path: Path) -> None:
    assert ids_of_column(tmp_path, [4_999], rows=5_000) == [[4_999]]
    with pytest.raises(UserError, match="t_user of 4999 rows"):
        ids_of_column(tmp_path, [4_999], rows=4_999)


def test_a_table_of_more_than_2_31_rows_keeps_its_ids(tmp_path: Path) -> None:
    assert ids_of_column(tmp_path, [2**33], rows=2**34) == [[2**33]]


@pytest.mark.parametrize(
    ("values", "kind", "hash_it", "allowed"),
    [
        (["ann"], "string", False, "integers or lists; strings need hash = true"),
        ([dt.datetime(2026, 1, 1)], r"timestamp\[us\]", True, "integers, strings or lists of them"),
    ],
)
def test_a_type_that_cannot_be_an_id_is_refused(
    tmp_path: Path, values: Any, kind: str, hash_it: bool, allowed: str
) -> None:
    with pytest.raises(UserError, match=rf"column user of data.parquet.sparse: got {kind}; allowed: {allowed}"):
        ids_of_column(tmp_path, values, hash=hash_it)


def test_a_number_with_a_fraction_is_refused_as_id(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"column user of data\.parquet\.sparse: got double that is not integral"):
        ids_of_column(tmp_path, [1.5])


@pytest.mark.parametrize("nothing", [[5, None], pa.array([5.0, None]), pa.array([5, None]).dictionary_encode()])
def test_a_null_id_without_fill_names_column_and_row(tmp_path: Path, nothing: Any) -> None:
    with pytest.raises(UserError) as caught:
        ids_of_column(tmp_path, nothing)
    assert str(caught.value) == (
        f"column user of data.parquet.sparse is null in row 1 of {tmp_path}/x.parquet. Fix: set the column's fill"
    )


@pytest.mark.parametrize("nothing", [[5, None], pa.array([5.0, None]), pa.array([5, None]).dictionary_encode()])
def test_a_fill_is_the_id_of_a_null(tmp_path: Path, nothing: Any) -> None:
    assert ids_of_column(tmp_path, nothing, fill=7) == [[5], [7]]


def test_a_fill_must_be_in_range_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"feature user has an id .* in row 1 of .* got 1000"):
        ids_of_column(tmp_path, [5, None], fill=1_000)


def test_a_fill_of_another_type_than_the_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ids_of_column(tmp_path, [5, None], fill="none", hash=True)
    assert str(caught.value) == (
        "wrong fill of column user in data.parquet.sparse: got 'none'; allowed: a value of the column's type int64"
    )
