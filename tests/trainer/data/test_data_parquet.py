"""Parquet files: the types of columns that can be read, and errors that name the column and the row."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_samples import config_of, lists_of, parquet_data, samples_of, serials, source_of, table_of, write_table

from trainer.config import DenseColumn, SparseColumn
from trainer.data import Batch
from trainer.data.ids import Ids
from trainer.data.sources.columns import dense_values, sparse_ids
from trainer.data.sources.stable_hash import hash_integers, hash_strings
from trainer.errors import UserError

FOUR = {"label": [0, 1, 0, 1], "serial": [0.0, 1.0, 2.0, 3.0]}


def read(path: Path, num_embeddings: int = 1_000, **columns: Any) -> Batch:
    """Read all rows in the order of the file."""
    source = source_of(config_of(parquet_data(path, path, **columns), num_embeddings), "eval")
    return source.read(0, source.samples_per_epoch or 0)


def read_column(tmp_path: Path, values: Any, num_embeddings: int = 1_000, **options: Any) -> Batch:
    """Read rows with `values` in the sparse column `user`."""
    rows = len(values)
    path = write_table(tmp_path / "x.parquet", {"label": [0] * rows, "serial": [0.0] * rows, "user": values})
    return read(path, num_embeddings, sparse=[{"column": "user", **options}])


def ids(batch: Batch, feature: str = "user") -> list[list[int]]:
    features = list(batch.sparse.keys())
    return [list(sample[1][features.index(feature)]) for sample in samples_of(batch)]


def ids_of_column(tmp_path: Path, values: Any, num_embeddings: int = 1_000, **options: Any) -> list[list[int]]:
    return ids(read_column(tmp_path, values, num_embeddings, **options))


def dense_of_column(tmp_path: Path, values: Any, **options: Any) -> list[float]:
    path = write_table(tmp_path / "x.parquet", {"label": [0] * len(values), "age": values, "user": [0] * len(values)})
    batch = read(path, dense=[{"column": "age", **options}])
    return [float(value) for value in batch.dense_BD[:, 0]]


def row_of(value: int | str, rows: int) -> int:
    hashed = hash_integers(np.array([value])) if isinstance(value, int) else hash_bytes(value.encode())
    return int(hashed[0]) % rows


def hash_bytes(*texts: bytes) -> Any:
    offsets = np.cumsum([0, *map(len, texts)])
    return hash_strings(np.frombuffer(b"".join(texts), np.uint8), offsets)


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


# --- hashing ---------------------------------------------------------------------------------------------------------


def test_the_hash_of_integers_never_changes() -> None:
    # Trained embedding rows depend on these values.
    values = np.array([0, 1, -1, 2**63 - 1, -(2**63)])
    assert [f"{h:016x}" for h in hash_integers(values)] == [
        "e220a8397b1dcdaf", "910a2dec89025cc1", "e4d971771b652c20", "2a67d7552e039ea7", "481ec0a212a9f3db",
    ]  # fmt: skip


def test_the_hash_of_strings_never_changes() -> None:
    texts = (b"", b"a", b"eight-by", b"nine-byte", "Zürich ✓".encode(), bytes(16), bytes(17))
    assert [f"{h:016x}" for h in hash_bytes(*texts)] == [
        "e220a8397b1dcdaf", "5e025f9ade9eaf3e", "0a46830d1a620740", "36aa2c5904d17d56", "46f6065e1d59f2c8",
        "e032dcb999e67f99", "f4fcb2652433a66d",
    ]  # fmt: skip


def test_hashing_agrees_with_its_description_in_plain_python() -> None:
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 256, int(n)).astype(np.uint8).tobytes() for n in draw.integers(0, 40, 10_000)]
    assert hash_bytes(*texts).tolist() == [plain_hash(text) for text in texts]


def plain_hash(text: bytes) -> int:
    state = plain_mix(len(text))
    for start in range(0, len(text), 8):
        state = plain_mix(state ^ int.from_bytes(text[start : start + 8], "little"))
    return state


def plain_mix(state: int) -> int:
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]
)
def test_the_hash_of_text_does_not_depend_on_its_arrow_type(tmp_path: Path, kind: pa.DataType) -> None:
    texts = pa.array(["ann", "bob", "", "ann", "Zürich, a longer name"])
    expected = [[row_of(str(text), 1_000)] for text in texts.to_pylist()]
    assert ids_of_column(tmp_path, texts.cast(kind), hash=True) == expected


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float64(), pa.decimal128(20, 0)])
def test_the_hash_of_integers_does_not_depend_on_their_arrow_type(tmp_path: Path, kind: pa.DataType) -> None:
    expected = [[row_of(value, 50)] for value in (7, 100, 0)]
    assert ids_of_column(tmp_path, pa.array([7, 100, 0]).cast(kind), num_embeddings=50, hash=True) == expected


@pytest.mark.parametrize("value", [2**64 - 1, 2**63])
def test_the_largest_unsigned_integers_can_be_hashed(tmp_path: Path, value: int) -> None:
    assert ids_of_column(tmp_path, pa.array([value], pa.uint64()), hash=True) == [[plain_mix(value) % 1_000]]


def test_a_fill_is_hashed_like_any_value(tmp_path: Path) -> None:
    expected = [[row_of("ann", 1_000)], [row_of("unknown", 1_000)]]
    assert ids_of_column(tmp_path, ["ann", None], hash=True, fill="unknown") == expected


def test_hashing_spreads_over_all_rows_of_a_table(tmp_path: Path) -> None:
    batch = read_column(tmp_path, [f"user-{i}" for i in range(5_000)], num_embeddings=100, hash=True)
    counts = np.bincount(batch.sparse.values().numpy(), minlength=100)
    assert counts.min() > 15
    assert counts.max() < 95


# --- multi-valued columns --------------------------------------------------------------------------------------------


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


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_parquet_files_of_a_folder_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    write_table(tmp_path / "b.parquet", table_of(10, first=10))
    write_table(tmp_path / "a.parquet", table_of(10))
    write_table(tmp_path / "nested" / "c.parquet", table_of(10, first=20))
    (tmp_path / "_SUCCESS").touch()
    assert [int(v) for v in read(tmp_path).dense_BD[:, 0]] == list(range(20))


@pytest.fixture
def bucket() -> Iterator[str]:
    """Yield a folder in fsspec's memory file system, and delete it afterwards."""
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)  # type: ignore[no-untyped-call]


def write_in_memory(uri: str, columns: dict[str, Any]) -> None:
    with fsspec.open(uri, "wb") as stream:  # type: ignore[no-untyped-call]
        pq.write_table(pa.table(columns), stream, row_group_size=7)


def test_a_uri_is_read_through_fsspec(bucket: str) -> None:
    write_in_memory(f"{bucket}/part-0.parquet", table_of(30))
    for uri in (f"{bucket}/part-0.parquet", bucket):
        assert serials(source_of(config_of(parquet_data("unused", uri)), "eval"), 0, 30) == list(range(30))


def test_a_bad_row_behind_a_uri_is_named_with_its_uri(bucket: str) -> None:
    write_in_memory(f"{bucket}/bad.parquet", FOUR | {"user": [1, 2, None, 4]})
    with pytest.raises(UserError, match=r"is null in row 2 of memory:///bucket/bad\.parquet"):
        source_of(config_of(parquet_data(f"{bucket}/bad.parquet"))).read(0, 4)


def test_rows_do_not_depend_on_the_cached_row_groups(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", table_of(100))
    small, large = (source_of(config_of(parquet_data(path, cache_groups=n))) for n in (1, 100))
    for position in (0, 95, 5, 180, 0, 42):
        assert serials(small, position, 30) == serials(large, position, 30)


def test_only_the_row_groups_that_are_needed_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(config_of(parquet_data(write_table(tmp_path / "x.parquet", table_of(100)), cache_groups=2)))
    decoded: list[int] = []
    decode = type(source)._decode  # type: ignore[attr-defined]
    monkeypatch.setattr(source._decoded, "_compute", lambda block: decoded.append(block) or decode(source, block))  # type: ignore[attr-defined, func-returns-value]
    for position in range(0, 100, 5):
        source.read(position, 5)
    assert sorted(decoded) == list(range(10))


@pytest.mark.parametrize(("option", "value"), [("label", "y"), ("dense", ["serial", "y"]), ("sparse", ["user", "y"])])
def test_a_missing_column_is_named_with_its_option_and_the_columns_of_the_file(
    tmp_path: Path, option: str, value: Any
) -> None:
    path = write_table(tmp_path / "x.parquet", FOUR | {"user": [1, 2, 3, 4]})
    with pytest.raises(UserError) as caught:
        read(path, **{option: value})
    assert str(caught.value) == (
        f"data.parquet.{option} names a column that is not in {path}: got y; allowed: label, serial, user"
    )


def test_every_file_of_a_folder_must_have_the_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", FOUR | {"user": [1, 2, 3, 4]})
    write_table(tmp_path / "b.parquet", FOUR)
    with pytest.raises(
        UserError, match=f"data.parquet.sparse names a column that is not in {tmp_path}/b.parquet: got user"
    ):
        read(tmp_path)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "absent")
    assert str(caught.value) == f"data.eval_path {tmp_path}/absent: no such file, and no folder with *.parquet files"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file, and no folder with \*\.parquet files"):
        read(tmp_path)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", {name: values[:0] for name, values in table_of(1).items()})
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == f"data.eval_path {path} has no rows"


def test_an_empty_file_next_to_others_is_allowed(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {name: values[:0] for name, values in table_of(1).items()})
    write_table(tmp_path / "b.parquet", table_of(10))
    assert read(tmp_path).labels_B.numel() == 10


@pytest.mark.parametrize("content", [b"", b"PAR1 but not really PAR1"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/x.parquet is not a complete Parquet file: "):
        read(tmp_path)


def test_a_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", table_of(1_000), row_group_size=1_000)
    content = bytearray(path.read_bytes())
    content[10:200] = bytes(190)
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"cannot read row group 0 of {path}: "):
        read(path)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.path nowhere://x cannot be opened: ValueError: Protocol not known"):
        source_of(config_of(parquet_data("nowhere://x")))


def test_an_evaluation_without_its_own_path_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", table_of(5))
    with pytest.raises(UserError) as caught:
        source_of(config_of(parquet_data(path)), "eval")
    assert str(caught.value) == (
        "data.eval_path is missing: an evaluation needs its own Parquet files. Fix: --data.eval-path PATH"
    )
